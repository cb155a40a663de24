"""The client against engine processes that live, die, freeze, lie and come back."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zmq
import zmq.asyncio

from loraplex.engine.client import EngineClient
from loraplex.engine.client.local import LocalEngine
from loraplex.engine.protocol import (
    Abort,
    Chunk,
    Event,
    Failed,
    Finished,
    Generate,
    Hello,
    Ping,
    Ready,
    Stats,
    ToEngine,
    decode_to_engine,
    encode,
)

pytestmark = pytest.mark.anyio
PATIENCE_S = 20.0
READY = Ready("1", "f" * 64, 128, 8, 256, "scripted", "cpu", "float32")


class Processes:
    """Engine processes on the base without a model, one after another at one endpoint."""

    def __init__(self, program: Path, endpoint: str, folder: Path) -> None:
        self._command = (
            sys.executable, str(program), "--endpoint", endpoint,
            "--images", str(folder / "images"), "--cache", str(folder),
        )  # fmt: skip
        self.current: asyncio.subprocess.Process | None = None

    async def start(self, *options: str) -> None:
        self.current = await asyncio.create_subprocess_exec(
            *self._command, *options, stdout=asyncio.subprocess.PIPE
        )
        assert self.current.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            assert await self.current.stdout.readline() == b"ready\n"

    def send(self, number: signal.Signals) -> None:
        assert self.current is not None
        self.current.send_signal(number)

    async def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self.current is not None
        with contextlib.suppress(ProcessLookupError):
            self.send(number)
        async with asyncio.timeout(PATIENCE_S):
            await self.current.communicate()
        assert self.current.returncode is not None
        return self.current.returncode


@pytest.fixture
async def processes(stand_in_file: Path, endpoint: str, tmp_path: Path) -> AsyncIterator[Processes]:
    made = Processes(stand_in_file, endpoint, tmp_path)
    yield made
    if made.current is not None:
        await made.end()


Start = Callable[..., Any]
Connect = Callable[..., Awaitable[LocalEngine]]


@pytest.fixture
async def connect(endpoint: str) -> AsyncIterator[Connect]:
    opened = []

    async def start(**options: Any) -> LocalEngine:
        client = LocalEngine(endpoint, **options)
        opened.append(client)
        await client.start()
        return client

    yield start
    for client in opened:
        async with asyncio.timeout(PATIENCE_S):
            await client.close()


async def collect(engine: EngineClient, request: Generate) -> list[Event]:
    async with asyncio.timeout(PATIENCE_S):
        return [event async for event in engine.generate(request)]


async def started(stream: Any) -> Any:
    """A stream of which the first chunk has come."""
    async with asyncio.timeout(PATIENCE_S):
        assert isinstance(await anext(stream), Chunk)
    return stream


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # a client tells of its numbers by no event
            await asyncio.sleep(0.01)


def idle(client: LocalEngine) -> bool:
    stats = client.stats
    return stats != Stats() and not stats.running + stats.waiting + stats.kv_blocks_used


def code_of(events: list[Event]) -> str:
    """The code of the `Failed` that ends `events`, in which nothing else is terminal."""
    assert all(isinstance(event, Chunk) for event in events[:-1])
    assert isinstance(events[-1], Failed)
    return events[-1].code


async def test_many_requests_stream_side_by_side(
    served: Start, connect: Connect, stand_in: ModuleType
) -> None:
    served()
    client = await connect()
    ready = await client.wait_ready(PATIENCE_S)
    assert client.info == ready
    requests = [stand_in.request(str(i), 1 + i, ignore_eos=True) for i in range(8)]
    answers = await asyncio.gather(*(collect(client, request) for request in requests))
    for request, events in zip(requests, answers, strict=True):
        assert {event.request_id for event in events} == {request.request_id}
        assert [type(event) for event in events] == [Chunk] * 8 + [Finished]
    await until(lambda: client.stats.generated_tokens == 8 * 8)


async def test_without_an_engine_there_is_a_prompt_answer(
    connect: Connect, stand_in: ModuleType
) -> None:
    client = await connect()
    assert client.info is None
    assert code_of(await collect(client, stand_in.request("r", 1))) == "engine_unavailable"
    with pytest.raises(TimeoutError):
        await client.wait_ready(0.05)


async def test_a_kill_under_load_ends_each_request_once_and_a_new_process_serves(
    processes: Processes, connect: Connect, stand_in: ModuleType
) -> None:
    await processes.start("--step-s", "0.02")
    client = await connect()
    first = await client.wait_ready(PATIENCE_S)
    slow = {"max_tokens": 100, "ignore_eos": True}
    running = await started(client.generate(stand_in.request("runs", 1, **slow)))
    tasks = [
        asyncio.create_task(collect(client, stand_in.request(str(i), 1, **slow))) for i in range(20)
    ]
    async with asyncio.timeout(PATIENCE_S):
        assert isinstance(await anext(running), Chunk)
    await processes.end(signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        assert code_of([event async for event in running]) == "engine_died"
    for events in await asyncio.gather(*tasks):
        assert code_of(events) == "engine_died"
    assert client.info is None
    assert client.stats == Stats()
    await processes.start()
    second = await client.wait_ready(PATIENCE_S)
    assert second.epoch != first.epoch
    assert isinstance((await collect(client, stand_in.request("runs", 1)))[-1], Finished)


async def test_a_process_is_given_up_while_frozen_taken_back_and_told_to_stop(
    processes: Processes, connect: Connect, stand_in: ModuleType
) -> None:
    await processes.start("--step-s", "0.02")
    client = await connect(silence_s=0.5)
    await client.wait_ready(PATIENCE_S)
    request = stand_in.request("r", 1, max_tokens=100, ignore_eos=True)
    frozen = await started(client.generate(request))
    processes.send(signal.SIGSTOP)
    async with asyncio.timeout(PATIENCE_S):
        assert code_of([event async for event in frozen]) == "engine_died"
    processes.send(signal.SIGCONT)
    await client.wait_ready(PATIENCE_S)
    stopped = await started(client.generate(request))
    assert await processes.end(signal.SIGTERM) == 0
    assert code_of([event async for event in stopped]) == "engine_died"


async def test_closing_a_stream_aborts_its_request(
    served: Start, connect: Connect, stand_in: ModuleType
) -> None:
    served().executor.step_s = 0.02
    client = await connect()
    await client.wait_ready(PATIENCE_S)
    request = stand_in.request("r", 1, max_tokens=100, ignore_eos=True)
    stream = await started(client.generate(request))
    await until(lambda: client.stats.running == 1)
    await stream.aclose()
    await until(lambda: idle(client))
    assert client.stats.generated_tokens < 100


async def test_an_id_can_be_used_again_when_its_last_use_has_ended(
    served: Start, connect: Connect, stand_in: ModuleType
) -> None:
    served().executor.step_s = 0.02
    client = await connect()
    await client.wait_ready(PATIENCE_S)
    request = stand_in.request("r", 1, max_tokens=100, ignore_eos=True)
    stream = await started(client.generate(request))
    assert code_of(await collect(client, request)) == "invalid_request"
    assert isinstance(await anext(stream), Chunk)
    await stream.aclose()
    again = stand_in.request("r", 1, max_tokens=2, ignore_eos=True)
    assert code_of(await collect(client, again)) == "invalid_request"
    await until(lambda: client.stats.generated_tokens > 0 and idle(client))
    events = await collect(client, again)
    assert isinstance(events[-1], Finished)
    assert (events[-1].reason, len(events)) == ("length", 3)


async def test_a_client_that_closes_ends_its_requests_here_and_there(
    served: Start, connect: Connect, endpoint: str, stand_in: ModuleType
) -> None:
    served(silence_s=60.0).executor.step_s = 0.02
    watcher, leaver = await connect(), LocalEngine(endpoint)
    await leaver.start()
    await asyncio.gather(watcher.wait_ready(PATIENCE_S), leaver.wait_ready(PATIENCE_S))
    request = stand_in.request("r", 1, max_tokens=120, ignore_eos=True)
    stream = await started(leaver.generate(request))
    await until(lambda: watcher.stats.running == 1)
    await leaver.close()
    assert code_of([event async for event in stream]) == "engine_unavailable"
    await until(lambda: idle(watcher))
    assert watcher.stats.generated_tokens < 120
    assert leaver.info is None


class Scripted:
    """An engine's end of the socket in the hands of a test."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(endpoint)

    async def hear(self, kind: type[ToEngine]) -> bytes:
        """Wait for a message of a kind; return its sender."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                identity, *frames = await self._socket.recv_multipart()
                if any(isinstance(decode_to_engine(frame), kind) for frame in frames):
                    return identity

    async def say(self, identity: bytes, *frames: bytes) -> None:
        await self._socket.send_multipart([identity, *frames])

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
async def scripted(endpoint: str) -> AsyncIterator[Scripted]:
    made = Scripted(endpoint)
    yield made
    made.close()


@pytest.mark.parametrize("frame", [b"\xc1", encode(Hello()), b""])
async def test_an_engine_that_speaks_nonsense_is_left(
    scripted: Scripted, connect: Connect, stand_in: ModuleType, frame: bytes
) -> None:
    client = await connect()
    await scripted.say(await scripted.hear(Hello), encode(READY))
    await client.wait_ready(PATIENCE_S)
    task = asyncio.create_task(collect(client, stand_in.request("r", 1)))
    await scripted.say(await scripted.hear(Generate), frame)
    assert code_of(await task) == "engine_died"
    await scripted.say(await scripted.hear(Hello), encode(READY))
    await client.wait_ready(PATIENCE_S)


async def test_an_engine_that_says_nothing_for_too_long_is_left(
    scripted: Scripted, connect: Connect, stand_in: ModuleType
) -> None:
    client = await connect(stall_s=0.5)
    await scripted.say(await scripted.hear(Hello), encode(READY))
    await client.wait_ready(PATIENCE_S)
    assert code_of(await collect(client, stand_in.request("r", 1))) == "engine_died"


async def test_events_after_the_end_and_of_strangers_are_dropped(
    scripted: Scripted, connect: Connect, stand_in: ModuleType
) -> None:
    client = await connect()
    await scripted.say(await scripted.hear(Hello), encode(READY))
    await client.wait_ready(PATIENCE_S)
    task = asyncio.create_task(collect(client, stand_in.request("r", 1)))
    end = encode(Finished("r", "stop", 1, 1))
    chunk = encode(Chunk("r", (5,)))
    stranger = encode(Finished("stranger", "stop", 1, 1))
    await scripted.say(await scripted.hear(Generate), stranger, chunk, end, end, chunk)
    assert [type(event) for event in await task] == [Chunk, Finished]


@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_a_stream_that_is_left_sends_an_abort_and_its_end_is_dropped(
    scripted: Scripted, connect: Connect, stand_in: ModuleType, how: str
) -> None:
    client = await connect()
    identity = await scripted.hear(Hello)
    await scripted.say(identity, encode(READY))
    await client.wait_ready(PATIENCE_S)
    stream = client.generate(stand_in.request("r", 1))
    waiting = asyncio.create_task(anext(stream))
    await scripted.hear(Generate)
    if how == "closed":
        await scripted.say(identity, encode(Chunk("r", (1,))))
        await waiting
        await stream.aclose()
    else:
        waiting.cancel()
    await scripted.hear(Abort)
    await scripted.say(identity, encode(Finished("r", "abort", 1, 1)))
    await scripted.hear(Ping)
    task = asyncio.create_task(collect(client, stand_in.request("r", 1)))
    await scripted.hear(Generate)
    await scripted.say(identity, encode(Finished("r", "stop", 1, 0)))
    assert await task == [Finished("r", "stop", 1, 0)]
