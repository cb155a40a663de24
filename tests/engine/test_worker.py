"""The worker over real sockets, spoken to frame by frame as a client would, well or badly."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.engine import worker as worker_module
from loraplex.engine.protocol import (
    Abort,
    Chunk,
    Failed,
    Finished,
    FromEngine,
    Generate,
    Hello,
    Message,
    Ping,
    Ready,
    Stats,
    decode_from_engine,
    encode,
)
from loraplex.engine.worker import Worker

PATIENCE_S = 20.0


class Wire:
    """A client's socket in the hands of a test."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.pings = True
        self._heard: list[FromEngine] = []

    def say(self, *messages: Message) -> None:
        self.socket.send_multipart([encode(message) for message in messages])

    def hear(self, *kinds: type[Message], name: str | None = None) -> Any:
        """The next message of one of `kinds`, about the request `name` where one is given."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for message in self._heard:
                about = getattr(message, "request_id", None)
                if isinstance(message, kinds) and name in (None, about):
                    self._heard.remove(message)
                    return message
            if self.socket.poll(100):
                self._heard += map(decode_from_engine, self.socket.recv_multipart())
            elif self.pings:
                self.say(Ping())
        raise TimeoutError(kinds)

    def end(self, name: str) -> Any:
        return self.hear(Finished, Failed, name=name)

    def idle(self) -> Stats:
        """Wait for word that the engine does nothing and holds nothing."""
        while True:
            stats = self.hear(Stats)
            if not stats.running + stats.waiting + stats.loading + stats.kv_blocks_used:
                return stats


@pytest.fixture
def wire(endpoint: str) -> Iterator[Callable[[], Wire]]:
    opened = []

    def connect() -> Wire:
        opened.append(Wire(endpoint))
        return opened[-1]

    yield connect
    for one in opened:
        one.socket.close()


Start, Connect = Callable[..., Any], Callable[[], Wire]


def test_hello_generate_and_the_end(served: Start, wire: Connect, stand_in: ModuleType) -> None:
    served()
    client = wire()
    client.say(Hello(), stand_in.request("r", 1, 2, ignore_eos=True, max_tokens=5))
    ready = client.hear(Ready)
    assert ready.base == stand_in.MANIFEST.fingerprint
    tokens = [client.hear(Chunk).token_ids for _ in range(5)]
    end = client.end("r")
    assert end.reason == "length"
    assert end.completion_tokens == sum(map(len, tokens)) == 5


def test_two_clients_may_use_the_same_ids(
    served: Start, wire: Connect, stand_in: ModuleType
) -> None:
    subject = served()
    subject.executor.gate.clear()
    one, other = wire(), wire()
    one.say(stand_in.request("r", 1, max_tokens=2, ignore_eos=True))
    other.say(stand_in.request("r", 2, max_tokens=3, ignore_eos=True))
    subject.executor.gate.set()
    assert one.end("r").completion_tokens == 2
    assert other.end("r").completion_tokens == 3


def test_an_id_in_flight_fails_and_its_first_request_goes_on(
    served: Start, wire: Connect, stand_in: ModuleType
) -> None:
    subject = served()
    subject.executor.gate.clear()
    client = wire()
    client.say(stand_in.request("r", 1, ignore_eos=True), stand_in.request("r", 1))
    subject.executor.gate.set()
    assert client.hear(Failed).code == "invalid_request"
    assert client.hear(Finished).completion_tokens == 8


def test_a_client_that_goes_silent_has_its_requests_aborted(
    served: Start, wire: Connect, stand_in: ModuleType
) -> None:
    subject = served(silence_s=0.4)
    subject.executor.step_s = 0.02
    gone, watcher = wire(), wire()
    gone.say(*(stand_in.request(str(i), 1, max_tokens=99, ignore_eos=True) for i in range(7)))
    watcher.say(Hello())
    gone.hear(Chunk, name="3")
    assert watcher.idle().generated_tokens < 7 * 99
    gone.say(Hello())
    assert gone.hear(Ready)


def test_a_client_that_pings_is_kept(served: Start, wire: Connect, stand_in: ModuleType) -> None:
    subject = served(silence_s=2.0)
    client = wire()
    subject.executor.gate.clear()
    client.say(stand_in.request("r", 1, ignore_eos=True))
    deadline = time.monotonic() + 2.5
    pause = threading.Event()
    while time.monotonic() < deadline:
        client.say(Ping())
        pause.wait(0.1)
    subject.executor.gate.set()
    assert client.end("r").reason == "length"


def test_abort_ends_with_what_was_sent(served: Start, wire: Connect, stand_in: ModuleType) -> None:
    subject = served()
    client = wire()
    client.say(stand_in.request("r", 1, max_tokens=120, ignore_eos=True))
    client.hear(Chunk)
    subject.executor.gate.clear()
    client.say(Abort("r"), Abort("never heard of"))
    subject.executor.gate.set()
    end = client.end("r")
    assert end.reason == "abort"
    assert 1 <= end.completion_tokens < 120
    client.idle()


def test_a_full_queue_refuses_and_goes_on(
    served: Start, wire: Connect, stand_in: ModuleType
) -> None:
    subject = served()
    client = wire()
    subject.executor.gate.clear()
    client.say(*(stand_in.request(str(i), 1, max_tokens=2) for i in range(30)))
    subject.executor.gate.set()
    ends = [client.end(str(i)) for i in range(30)]
    refused = [end for end in ends if isinstance(end, Failed)]
    assert {end.code for end in refused} == {"overloaded"}
    assert 0 < len(refused) < 30
    client.say(stand_in.request("later", 1))
    assert isinstance(client.end("later"), Finished)


NESTED = b"\x91" * 100_000
WRONG = [
    b"",
    b"\xc1",
    NESTED,
    encode(Finished("r", "stop", 1, 1)),
    msgspec.msgpack.encode(["Generate", "r", "no tokens"]),
    msgspec.msgpack.encode(["Generate", "r", [2**64 - 1, -(2**63)], [1.5]]),
    msgspec.msgpack.encode({"type": "Hello"}),
    b"\x92\xa5Abort\xa2\xff\xfe",
]


@pytest.mark.parametrize("frame", WRONG, ids=range(len(WRONG)))
def test_a_malformed_frame_is_dropped_with_a_line(
    served: Start,
    wire: Connect,
    stand_in: ModuleType,
    caplog: pytest.LogCaptureFixture,
    frame: bytes,
) -> None:
    served()
    client = wire()
    client.socket.send_multipart([frame, encode(stand_in.request("r", 1))])
    assert isinstance(client.end("r"), Finished)
    assert caplog.text.count("malformed frame") == 1


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.lists(st.binary(max_size=80), min_size=1, max_size=4), max_size=20))
def test_noise_harms_nobody(endpoint: str, noisy: "Noisy", garbage: list[list[bytes]]) -> None:
    noisy.count += 1
    for frames in garbage:
        noisy.attacker.socket.send_multipart(frames)
    name = str(noisy.count)
    noisy.client.say(noisy.request(name))
    assert isinstance(noisy.client.end(name), Finished)


class Noisy:
    def __init__(self, attacker: Wire, client: Wire, request: Callable[[str], Generate]) -> None:
        self.attacker, self.client, self.request, self.count = attacker, client, request, 0


@pytest.fixture
def noisy(served: Start, wire: Connect, stand_in: ModuleType) -> Noisy:
    served()
    return Noisy(wire(), wire(), lambda name: stand_in.request(name, 1))


def test_images_come_and_wake_a_loop_that_sleeps(
    served: Start,
    wire: Connect,
    stand_in: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "STATS_S", 3600.0)
    subject = served()
    digest = stand_in.make_image(subject.store, tmp_path, seed=1)
    client = wire()
    client.say(
        stand_in.request("r", 1, image=digest),
        stand_in.request("base", 1),
        stand_in.request("missing", 1, image="b" * 64),
    )
    assert isinstance(client.end("r"), Finished)
    assert isinstance(client.end("base"), Finished)
    assert client.end("missing").code == "image_missing"


def test_an_image_of_another_base_fails_its_request(
    served: Start, wire: Connect, stand_in: ModuleType, tmp_path: Path
) -> None:
    subject = served()
    digest = stand_in.make_image(subject.store, tmp_path, seed=1, base="e" * 64)
    client = wire()
    client.say(stand_in.request("r", 1, image=digest))
    assert client.end("r").code == "image_mismatch"


def test_an_idle_worker_sleeps_and_still_shows_that_it_lives(
    served: Start, wire: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = served()
    client = wire()
    client.pings = False
    client.say(Hello())
    client.hear(Stats)
    subject.waker.set()
    steps = []
    step = subject.engine.step
    monkeypatch.setattr(subject.engine, "step", lambda: steps.append(1) or step())
    client.hear(Stats)
    client.hear(Stats)
    assert len(steps) <= 8


def test_stop_fails_what_runs_and_ends_the_loop(
    served: Start, wire: Connect, stand_in: ModuleType
) -> None:
    subject = served()
    client = wire()
    client.say(stand_in.request("r", 1, max_tokens=99, ignore_eos=True))
    client.hear(Chunk)
    subject.executor.gate.clear()
    subject.worker.stop()
    subject.executor.gate.set()
    assert client.end("r").code == "engine_died"
    subject.thread.join(PATIENCE_S)
    assert not subject.thread.is_alive()


def test_a_batch_that_breaks_leaves_the_worker_alive(
    served: Start, wire: Connect, stand_in: ModuleType
) -> None:
    subject = served()
    client = wire()
    subject.executor.broken = RuntimeError("broken")
    client.say(stand_in.request("1", 1), stand_in.request("2", 1))
    assert {client.end(name).code for name in "12"} == {"internal"}
    subject.executor.broken = None
    client.say(stand_in.request("3", 1))
    assert isinstance(client.end("3"), Finished)
    client.idle()


def test_an_endpoint_that_cannot_be_bound_raises(served: Start, tmp_path: Path) -> None:
    subject = served()
    with pytest.raises(zmq.ZMQError):
        Worker(subject.engine, f"ipc://{tmp_path}/no/such/folder/e", subject.waker)
