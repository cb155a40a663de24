"""The engine's loop in its process: messages from clients in, a step, events back to clients.

It owns the ZeroMQ ROUTER socket and knows which client each request belongs to; request ids need
only be unique within a client. A frame is one message of `protocol.py`; a ZeroMQ message may carry
several. The loop blocks while the engine has nothing to do, and refuses to know how a step runs.
"""

import logging
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field

import msgspec
import zmq
from msgspec.structs import replace

from loraplex.engine.core import DuplicateRequest, Engine
from loraplex.engine.protocol import (
    Abort,
    CacheEvents,
    Event,
    Failed,
    Finished,
    Generate,
    Hello,
    Message,
    Pin,
    Prefetch,
    Stats,
    decode_to_engine,
    encode,
)
from loraplex.engine.waker import Waker

MESSAGES_PER_TURN = 1024
STATS_S = 0.5  # between two `Stats`, while something changes
HEARTBEAT_S = 1.0  # between two `Stats` at most
LINGER_S = 1.0  # for the last words of a worker that ends

log = logging.getLogger(__name__)


@dataclass
class _Client:
    last_seen: float
    requests: set[str] = field(default_factory=set)  # ids as the client gave them


class Worker:
    """Serves one engine at a ZeroMQ endpoint. `waker` wakes the loop; `stop` uses it too.

    The requests of a client that was silent for `silence_s` seconds are aborted. Raises
    `zmq.ZMQError` when the endpoint cannot be bound.
    """

    def __init__(
        self, engine: Engine, endpoint: str, waker: Waker, *, silence_s: float = 10.0
    ) -> None:
        self._engine, self._waker, self._silence_s = engine, waker, silence_s
        self._ready = encode(engine.describe(epoch=uuid.uuid4().hex))
        self._clients: dict[bytes, _Client] = {}
        self._owners: dict[str, tuple[bytes, str]] = {}  # by the id that the engine knows
        self._stats, self._stats_sent = Stats(), 0.0
        self._stopping = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)  # `max_waiting` bounds what comes in, silence what goes out
        self._socket.linger = int(LINGER_S * 1000)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(waker.fileno(), zmq.POLLIN)

    def run(self) -> None:
        """Serve until `stop`; then all requests in flight fail with "engine_died"."""
        try:
            while not self._stopping:
                self._turn()
            self._engine.fail_all("engine_died", "the engine was told to stop; try again")
            self._deliver(self._engine.take_events())
        finally:
            self._socket.close()
            self._context.term()

    def stop(self) -> None:
        """Make `run` return soon; from any thread or a signal handler."""
        self._stopping = True
        self._waker.set()

    def _turn(self) -> None:
        self._receive(0 if self._engine.has_work else STATS_S)
        self._drop_silent_clients()
        self._deliver(self._engine.step())
        self._send_stats()

    def _receive(self, patience_s: float) -> None:
        """Handle what has come; wait for it, or for the waker, at most `patience_s`."""
        if patience_s:
            ready = dict(self._poller.poll(int(patience_s * 1000)))
            if self._waker.fileno() in ready:
                self._waker.clear()
        for _ in range(MESSAGES_PER_TURN):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for frame in frames:
                self._handle(identity, frame)

    def _handle(self, identity: bytes, frame: bytes) -> None:
        try:
            message = decode_to_engine(frame)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            log.warning("dropped a malformed frame of %d bytes: %s", len(frame), error)
            return
        client = self._clients.setdefault(identity, _Client(0.0))
        client.last_seen = time.monotonic()
        if isinstance(message, Hello):
            self._socket.send_multipart([identity, self._ready])
        elif isinstance(message, Generate):
            self._generate(identity, client, message)
        elif isinstance(message, Abort):
            self._engine.abort(_engine_id(identity, message.request_id), message.index)
        elif isinstance(message, Prefetch):
            self._engine.prefetch(message.image)
        elif isinstance(message, Pin):
            self._engine.pin(message.image, message.pinned)

    def _generate(self, identity: bytes, client: _Client, request: Generate) -> None:
        name = _engine_id(identity, request.request_id)
        try:
            self._engine.add(replace(request, request_id=name))
        except DuplicateRequest as error:
            failed = Failed(request.request_id, "invalid_request", str(error))
            self._socket.send_multipart([identity, encode(failed)])
            return
        client.requests.add(request.request_id)
        self._owners[name] = identity, request.request_id

    def _drop_silent_clients(self) -> None:
        oldest = time.monotonic() - self._silence_s
        for identity in [i for i, c in self._clients.items() if c.last_seen < oldest]:
            requests = self._clients.pop(identity).requests
            log.info("a client went silent; aborting its %d requests", len(requests))
            for request_id in requests:
                self._engine.abort(_engine_id(identity, request_id))

    def _deliver(self, events: list[Event]) -> None:
        """Send each client its events, under the ids that it gave."""
        outgoing: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for event in events:
            identity, request_id = self._owners[event.request_id]
            if isinstance(event, Finished | Failed):
                del self._owners[event.request_id]
                if identity in self._clients:
                    self._clients[identity].requests.discard(request_id)
            outgoing[identity].append(encode(replace(event, request_id=request_id)))
        for identity, frames in outgoing.items():
            self._socket.send_multipart([identity, *frames])

    def _send_stats(self) -> None:
        """Tell all clients how things are, when it is time: also a sign of life."""
        now = time.monotonic()
        if now - self._stats_sent < STATS_S:
            return
        stats = self._engine.stats()
        if stats != self._stats or now - self._stats_sent >= HEARTBEAT_S:
            self._stats, self._stats_sent = stats, now
            self._broadcast(stats)
        if events := self._engine.take_cache_events():
            self._broadcast(CacheEvents(tuple(events)))

    def _broadcast(self, message: Message) -> None:
        frame = encode(message)
        for identity in self._clients:
            self._socket.send_multipart([identity, frame])


def _engine_id(identity: bytes, request_id: str) -> str:
    return f"{identity.hex()}/{request_id}"
