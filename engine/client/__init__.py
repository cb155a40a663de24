"""The seam between the platform and an engine: `EngineClient`, and the promise each one keeps.

`loraplex.engine.client.local` talks to an engine process on this machine,
`loraplex.engine.client.fake` is a deterministic stand-in. This package knows messages; it refuses
to know torch, text and how an engine process is started.
"""

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from loraplex.engine.protocol import CacheEvents, Event, Generate, Ready, Stats


class EngineClient(Protocol):
    """A way to reach one engine. Every request ends in exactly one terminal event.

    `cache_listener` is called with what happens to cached KV, in the client's own loop.
    """

    cache_listener: Callable[[CacheEvents], None]

    @property
    def info(self) -> Ready | None:
        """Who the engine is; None while none is ready."""

    @property
    def stats(self) -> Stats:
        """The engine's last word on what it has done; all zero while none is ready."""

    async def start(self) -> None:
        """Begin to look for an engine; returns at once."""

    async def close(self) -> None:
        """Let go of the engine. What is in flight fails with "engine_unavailable"."""

    async def wait_ready(self, timeout: float) -> Ready:  # noqa: ASYNC109  # part of the contract
        """Wait until an engine is ready, at most `timeout` seconds; raises `TimeoutError`."""

    def generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        """Run a request: its chunks, then exactly one `Finished` or `Failed`.

        Closing the generator before the end aborts the request. While no engine is ready the only
        event is `Failed` with "engine_unavailable"; when the engine dies, with "engine_died".
        """

    async def abort(self, request_id: str, index: int) -> None:
        """End one choice of a request in flight; it gets no further chunk. Others go on."""

    async def prefetch(self, image: str) -> None:
        """Have an image brought near, for a request is expected; only a hint."""
