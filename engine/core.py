"""The engine without its process: requests in, a step at a time, events out.

It joins the scheduler, the executor, the sampler and the residency of images, and keeps the promise
that each request added ends in exactly one terminal event, after which it holds no block, no slot
and no image. It knows token ids, digests and events; it refuses to know sockets, clients and text.
"""

import logging
import time
from collections.abc import Callable

from loraplex.engine.ahead import remaining
from loraplex.engine.block_pool import BlockPool
from loraplex.engine.costs import Costs
from loraplex.engine.counters import Counters
from loraplex.engine.executor import Executor
from loraplex.engine.guessing import foresees, guess
from loraplex.engine.guidance import Guides
from loraplex.engine.host_slots import HostSlots
from loraplex.engine.images import BaseManifest
from loraplex.engine.intake import Intake
from loraplex.engine.memory_share import MemoryShare, divide, model_len
from loraplex.engine.meter import Meter
from loraplex.engine.plan import Plan
from loraplex.engine.protocol import (
    CacheEvent,
    Chunk,
    Event,
    Failed,
    FailureCode,
    FinishReason,
    Generate,
    PromptLogprobs,
    Ready,
    Stats,
)
from loraplex.engine.reader import extend, why_no_token
from loraplex.engine.ready import ready
from loraplex.engine.residency import Residency
from loraplex.engine.scheduler import Limits, Scheduler
from loraplex.engine.searching import advance, lacks_room
from loraplex.engine.sequence import Request, Sequence, finished, from_request
from loraplex.engine.settings import EngineSettings
from loraplex.engine.stepper import Flight, Reading, Stepper
from loraplex.engine.validate import refusal

log = logging.getLogger(__name__)


class DuplicateRequest(Exception):
    """Two requests in flight would have the same id."""


class Engine:
    """Runs requests on one base. Raises `SettingsError` when the settings cannot fit the base.

    `wake` is called, on any thread, when `step` has something to do that `has_work` did not see.
    """

    def __init__(
        self,
        executor: Executor,
        residency: Residency,
        guides: Guides,
        settings: EngineSettings,
        manifest: BaseManifest,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._executor, self._residency = executor, residency
        self._settings, self._manifest = settings, manifest
        self._model_len = model_len(executor, settings, manifest)
        boundary = divide(executor, settings, manifest)
        self._pool = BlockPool(
            executor.num_blocks,
            executor.block_size,
            caching=settings.enable_prefix_caching,
            limit=boundary.blocks,
        )
        self._host, self._counters = HostSlots(executor.swap_slots), Counters()
        limits = Limits(settings.max_num_seqs, settings.max_num_batched_tokens, settings.max_wanted)
        costs = Costs()
        scheduler = self._scheduler = Scheduler(
            self._pool, self._host, self._counters, limits, costs.prefers_swap
        )
        self._share = MemoryShare(executor, self._pool, residency, scheduler, boundary)
        self._intake = Intake(residency, guides, scheduler, manifest.fingerprint, wake)
        self._stepper = Stepper(executor, scheduler, guides, costs, settings, self._model_len)
        self._flight: Flight | None = None  # its tokens are not read yet
        self._requests: dict[str, Request] = {}
        self._outbox: list[Event] = []
        self._meter = Meter()

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something without a new request or what threads prepare."""
        runnable = self._scheduler.waiting or self._scheduler.running
        return bool(self._outbox or runnable or self._flight or self._intake.images_changed)

    def add(self, message: Generate) -> None:
        """Take a request; one that is refused has its `Failed` in what `step` returns next.

        Raises `DuplicateRequest` when its id is in flight, which stays as it is.
        """
        name, settings = message.request_id, self._settings
        if name in self._requests:
            raise DuplicateRequest("a request with this id is in flight")
        vocabulary, scheduler = self._manifest.vocab_size, self._scheduler
        reason = refusal(message, vocabulary, self._model_len, settings.max_num_seqs)
        reason = reason or lacks_room(message, self._model_len, self._executor.block_size)
        if reason is not None:
            self._outbox.append(Failed(name, "invalid_request", reason))
        elif scheduler.waiting + scheduler.loading + self._intake.waiting >= settings.max_waiting:
            reason = f"{settings.max_waiting} requests wait already; try again later"
            self._outbox.append(Failed(name, "overloaded", reason))
        else:
            self._accept(message)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request with reason "abort", or one choice of it; ignores what is not there."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if index is None:
            self._end(request, finished(request, "abort", time.monotonic()))
            return
        forked = len(request.alive) + len(request.reasons) == request.choices
        for sequence in [s for s in request.alive if s.index == index and forked]:
            self._end_choice(sequence, "abort")

    def prefetch(self, digest: str) -> None:
        """Bring an image near: a request for it is expected."""
        self._residency.prefetch(digest)

    def pin(self, digest: str, pinned: bool) -> None:
        """Keep an image resident once it is there, or no longer."""
        if not self._residency.pin(digest, pinned):
            log.warning("image %s… is not pinned: pins have taken all that they may", digest[:12])

    def fail_all(self, code: FailureCode, message: str) -> None:
        """End all requests in flight with `Failed`."""
        for request in list(self._requests.values()):
            self._fail(request, code, message)

    def step(self) -> list[Event]:
        """Run or launch one batch, if there is one; return what happened since the last step."""
        for refused in self._intake.settle():
            self._fail(*refused)
        self._balance()
        drafts = self._settings.speculative_tokens
        if foresees(self._scheduler.running, drafts):
            self._advance(Plan())  # which lands what flies
        guess(self._scheduler.running, drafts, self._model_len)
        self._advance(self._scheduler.schedule())
        events = self.take_events()
        if not self.has_work:  # an ask for memory that was refused before the last one ended
            self._balance()
        return events

    def _balance(self) -> None:
        if self._share.balance():
            self._intake.images_changed = True

    def take_events(self) -> list[Event]:
        """What happened since the last step, without a new one."""
        events, self._outbox = self._outbox, []
        return events

    def take_cache_events(self) -> list[CacheEvent]:
        """What happened to cached KV since the last call."""
        return self._pool.take_events()

    def describe(self, epoch: str) -> Ready:
        """Who this engine is, in the life of the process that `epoch` names."""
        return ready(epoch, self._executor, self._settings, self._manifest, self._pool.limit)

    def stats(self) -> Stats:
        """What was done so far, and how things are now."""
        waiting = self._scheduler.waiting + self._intake.waiting
        return self._meter.stats(self._scheduler, self._pool, self._host, self._residency, waiting)

    def check_integrity(self) -> None:
        """Raise unless blocks, slots and images are held by exactly the requests in flight."""
        self._scheduler.check_integrity()
        self._residency.check_integrity()

    def _accept(self, message: Generate) -> None:
        manifest, now = self._manifest, time.monotonic()
        sequence = from_request(message, now, manifest.eos_token_ids, self._model_len)
        self._requests[message.request_id] = sequence.request
        self._intake.add(sequence, message)

    def _advance(self, plan: Plan) -> None:
        """Launch a plan before the flight before it lands, or run it after."""
        flight, self._flight = self._flight, None
        if self._stepper.may_launch(plan):
            self._attempt(self._launch, plan)
            self._land(flight)
            return
        if flight is not None:
            self._land(flight)
            plan = remaining(plan, self._lives)
        if plan.scheduled or plan.preempted:
            self._attempt(self._run, plan)

    def _attempt(self, do: Callable[[Plan], None], plan: Plan) -> None:
        """Count a step and do it; when it breaks, its requests end."""
        plan.mark(time.monotonic())
        self._meter.count_step(plan)
        try:
            do(plan)
        except Exception:
            self._give_up(plan)

    def _give_up(self, plan: Plan) -> None:
        log.exception("a step failed; its %d requests end", len(plan.scheduled))
        touched = [part.sequence for part in plan.scheduled] + list(plan.preempted)
        for request in {sequence.request for sequence in touched}:
            self._fail(request, "internal", "the engine failed to compute this request")

    def _launch(self, plan: Plan) -> None:
        self._flight = self._stepper.launch(plan)

    def _run(self, plan: Plan) -> None:
        for reading in self._stepper.run(plan):
            self._take(reading)
        for request in {p.sequence.request for p in plan.scheduled if p.sequence.tops}:
            self._search(request)

    def _land(self, flight: Flight | None) -> None:
        """Take what a flight chose for the sequences that have not ended meanwhile."""
        if flight is None:
            return
        try:
            for reading in self._stepper.land(flight):
                if self._lives(reading.sequence):
                    self._take(reading)
        except Exception:
            self._give_up(flight.plan)

    def _lives(self, sequence: Sequence) -> bool:
        request = sequence.request
        return self._requests.get(request.request_id) is request and sequence in request.alive

    def _take(self, reading: Reading) -> None:
        """Add chosen tokens to their sequence and tell of them."""
        sequence, choices = reading.sequence, [c for c in reading.choices if c is not None]
        if sequence.request.request_id not in self._requests:
            return  # another choice of it has just failed
        if len(choices) < len(reading.choices):
            self._fail(sequence.request, *why_no_token(sequence))
            return
        self._meter.count_guesses(len(sequence.drafts), len(choices) - 1)
        sequence.drafts = []
        told, reason = extend(sequence, choices, self._model_len)
        if reading.computed is not None:
            self._scheduler.commit(sequence, min(reading.computed, len(sequence.token_ids)))
        tokens = tuple(choice.token_id for choice in told)
        logprobs = tuple(choice.logprob for choice in told if choice.logprob is not None)
        self._tell(sequence.request, tokens)
        name, index = sequence.request.request_id, sequence.index
        self._outbox.append(Chunk(name, tokens, logprobs, index, reason))
        if reason is not None:
            self._end_choice(sequence, reason)

    def _search(self, request: Request) -> None:
        """Let a beam search choose, once all its beams have run, and tell of it at its end."""
        if request.search is None or not all(sequence.tops for sequence in request.alive):
            return
        if advance(request, self._scheduler):
            self._counters.charge(request.tenant, generated_tokens=len(request.alive))
            return
        for index, found in enumerate(request.search.results()):
            self._tell(request, found.tokens, charged=True)
            request.reasons[index] = found.reason
            chunk = Chunk(request.request_id, found.tokens, (), index, found.reason, found.score)
            self._outbox.append(chunk)
        self._end(request, finished(request, request.reasons[0], time.monotonic()))

    def _tell(self, request: Request, tokens: tuple[int, ...], *, charged: bool = False) -> None:
        """Account for tokens that a chunk is about to tell."""
        request.generated += len(tokens)
        self._meter.generated_tokens += len(tokens)
        if not charged:
            self._counters.charge(request.tenant, generated_tokens=len(tokens))
        if request.first_token is None:
            request.first_token = time.monotonic()
            self._meter.prompt_tokens += request.prompt_len
            if request.sampling.prompt_logprobs is not None:
                known = PromptLogprobs(request.request_id, tuple(request.prompt_logprobs))
                self._outbox.append(known)

    def _end_choice(self, sequence: Sequence, reason: FinishReason) -> None:
        """One choice ends; the last one takes its request with it."""
        request = sequence.request
        request.reasons[sequence.index] = reason
        if request.alive == [sequence]:
            ended = [request.reasons[index] for index in sorted(request.reasons)]
            reason = next((each for each in ended if each != "abort"), "abort")
            self._end(request, finished(request, reason, time.monotonic()))
            return
        self._scheduler.remove(sequence)
        request.alive.remove(sequence)

    def _fail(self, request: Request, code: FailureCode, message: str) -> None:
        self._end(request, Failed(request.request_id, code, message))

    def _end(self, request: Request, event: Event) -> None:
        """The one way out: whatever the request holds is free and its terminal event is queued."""
        if self._requests.pop(request.request_id, None) is None:
            return
        for sequence in request.alive:
            self._scheduler.remove(sequence)
        self._intake.release(request)
        self._outbox.append(event)
