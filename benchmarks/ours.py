"""Loraplex's side of a comparison: an engine process, its client, and works run through both."""

import argparse
import asyncio
import os
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench import START_S, connected, engine_process, host, token_times
from peers.wire import Facts, Times, Work

from loraplex.engine.client.local import LocalEngine
from loraplex.engine.protocol import Generate, Sampling

KV_CACHE_BYTES = 1 << 30


class Ours:
    """Runs works on an engine; row `i` runs under image `i` modulo the work's adapters."""

    def __init__(self, client: LocalEngine, facts: Facts) -> None:
        self._client, self.facts, self._count = client, facts, 0

    async def run(self, work: Work, digests: Sequence[str]) -> Times:
        """When each token of each row came, in seconds since the first request was sent."""
        images = [None if i is None else digests[i] for i in work.adapters_of_rows()]
        pairs = zip(work.prompts, images, strict=True)
        requests = [self._request(work, prompt, image) for prompt, image in pairs]
        started = time.perf_counter()
        rows = await asyncio.gather(*(token_times(self._client, one) for one in requests))
        return [[moment - started for moment in row] for row in rows]

    def _request(self, work: Work, prompt: tuple[int, ...], image: str | None) -> Generate:
        self._count += 1
        return Generate(
            request_id=f"compare-{self._count}",
            token_ids=prompt,
            sampling=Sampling(max_tokens=work.tokens, temperature=0.0, ignore_eos=True),
            image=image,
        )


def flags(options: argparse.Namespace, quantization: str) -> list[str]:
    """Flags of an engine, from the command line of a comparison."""
    chosen = [] if options.dtype == "auto" else ["--dtype", options.dtype]
    chosen += [] if quantization == "none" else ["--quantization", quantization]
    return chosen + shlex.split(options.engine)


@asynccontextmanager
async def running(base_file: Path, store: Path, options: Sequence[str]) -> AsyncIterator[Ours]:
    """An engine with the given flags, for as long as the block runs."""
    threads = len(os.sched_getaffinity(0))
    flags = ["--kv-cache-bytes", str(KV_CACHE_BYTES), "--threads", str(threads), *options]
    with (
        tempfile.TemporaryDirectory(prefix="loraplex-engine-") as folder,
        engine_process(base_file, store, Path(folder), flags) as endpoint,
    ):
        async with connected(endpoint) as client:
            yield Ours(client, host(await client.wait_ready(START_S)))
