"""The engine without its process: requests in, a step at a time, events out.

It joins the scheduler, the executor, the sampler and the residency of images, and keeps the promise
that each request added ends in exactly one terminal event, after which it holds no block and no
image. It knows token ids, digests and events; it refuses to know sockets, clients and text.
"""

import logging
import time

from loraplex.engine.batch import build
from loraplex.engine.block_pool import BlockPool
from loraplex.engine.executor import Executor
from loraplex.engine.images import BaseManifest
from loraplex.engine.meter import Meter
from loraplex.engine.protocol import (
    Chunk,
    Event,
    Failed,
    FailureCode,
    Finished,
    FinishReason,
    Generate,
    Ready,
    Stats,
)
from loraplex.engine.residency import Residency
from loraplex.engine.sampler import Choice, sample
from loraplex.engine.scheduler import Plan, Scheduler
from loraplex.engine.sequence import Sequence, finish_reason, finished, from_request
from loraplex.engine.settings import EngineSettings
from loraplex.engine.validate import refusal

log = logging.getLogger(__name__)


class DuplicateRequest(Exception):
    """Two requests in flight would have the same id."""


class Engine:
    """Runs requests on one base. Raises `SettingsError` when the settings cannot fit the base."""

    def __init__(
        self,
        executor: Executor,
        residency: Residency,
        settings: EngineSettings,
        manifest: BaseManifest,
    ) -> None:
        self._executor, self._residency = executor, residency
        self._settings, self._manifest = settings, manifest
        self._pool = BlockPool(executor.num_blocks, executor.block_size)
        capacity = executor.num_blocks * executor.block_size
        self._model_len = settings.fit_model_len(manifest.max_position_embeddings, capacity)
        self._scheduler = Scheduler(
            self._pool, settings.max_num_seqs, settings.max_num_batched_tokens
        )
        self._sequences: dict[str, Sequence] = {}
        self._outbox: list[Event] = []
        self._images_changed = False  # acquired or released since the last poll
        self._meter = Meter()

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something without a new request or a fetched image."""
        runnable = self._scheduler.waiting + self._scheduler.running > 0
        return bool(self._outbox) or runnable or self._images_changed

    def add(self, request: Generate) -> None:
        """Take a request; one that is refused has its `Failed` in what `step` returns next.

        Raises `DuplicateRequest` when its id is in flight, which stays as it is.
        """
        name = request.request_id
        if name in self._sequences:
            raise DuplicateRequest("a request with this id is in flight")
        reason = refusal(request, self._manifest.vocab_size, self._model_len)
        if reason is not None:
            self._outbox.append(Failed(name, "invalid_request", reason))
        elif self._scheduler.waiting + self._scheduler.loading >= self._settings.max_waiting:
            message = f"{self._settings.max_waiting} requests wait already; try again later"
            self._outbox.append(Failed(name, "overloaded", message))
        else:
            self._accept(request)

    def abort(self, request_id: str) -> None:
        """End a request with reason "abort"; one that is not in flight is ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, "abort")

    def fail_all(self, code: FailureCode, message: str) -> None:
        """End all requests in flight with `Failed`."""
        for sequence in list(self._sequences.values()):
            self._fail(sequence, code, message)

    def step(self) -> list[Event]:
        """Run one batch, if there is one, and return what happened since the last step."""
        self._settle_images()
        plan = self._scheduler.schedule()
        if plan.scheduled:
            self._run(plan)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """What happened since the last step, without a new one."""
        events, self._outbox = self._outbox, []
        return events

    def describe(self, epoch: str) -> Ready:
        """Who this engine is, in the life of the process that `epoch` names."""
        executor = self._executor
        return Ready(
            epoch,
            base=self._manifest.fingerprint,
            max_model_len=self._model_len,
            max_num_seqs=self._settings.max_num_seqs,
            kv_capacity_tokens=executor.num_blocks * executor.block_size,
            executor=executor.name,
            device=executor.device,
            dtype=executor.dtype,
        )

    def stats(self) -> Stats:
        """What was done so far, and how things are now."""
        meter, scheduler, residency = self._meter, self._scheduler, self._residency
        return Stats(
            steps=meter.steps,
            prompt_tokens=meter.prompt_tokens,
            generated_tokens=meter.generated_tokens,
            preemptions=meter.preemptions,
            running=scheduler.running,
            waiting=scheduler.waiting,
            loading=scheduler.loading,
            kv_blocks_used=self._pool.used_count,
            kv_blocks_total=self._pool.num_blocks,
            images_resident=residency.resident_count,
            image_bytes=residency.resident_bytes,
            image_budget_bytes=residency.budget_bytes,
            sequences_per_step_max=meter.sequences_max,
            adapters_per_step_max=meter.adapters_max,
            rows_total=meter.rows_total,
            rows_per_step=tuple(meter.rows),
            adapters_per_step=tuple(meter.adapters),
        )

    def check_integrity(self) -> None:
        """Raise unless blocks and images are held by exactly the requests in flight."""
        self._scheduler.check_integrity()
        self._residency.check_integrity()

    def _accept(self, request: Generate) -> None:
        sequence = from_request(request, time.monotonic())
        self._sequences[sequence.request_id] = sequence
        if sequence.image is not None:
            self._residency.acquire(sequence.image)
            self._images_changed = True
        self._scheduler.add(sequence)

    def _settle_images(self) -> None:
        """Let run what has its image by now, and fail what will not get it."""
        self._images_changed = False
        self._residency.poll()
        for digest in self._scheduler.loading_images:
            failure = self._residency.failure(digest)
            if failure is not None:
                for sequence in self._scheduler.loading_for(digest):
                    self._fail(sequence, *failure)
            elif self._residency.state(digest) == "device":
                for sequence in self._scheduler.image_ready(digest):
                    sequence.loaded = time.monotonic()

    def _run(self, plan: Plan) -> None:
        _mark_scheduled(plan)
        try:
            batch, order = build(plan.scheduled, self._pool.block_size)
            outcome = self._executor.execute(batch)
            self._scheduler.commit(order)
            wanting = [part.sequence for part in order if part.sequence.pending == 0]
            choices = sample(outcome, wanting)
        except Exception:
            log.exception("a step failed; its %d requests end", len(plan.scheduled))
            for part in plan.scheduled:
                self._fail(part.sequence, "internal", "the engine failed to compute this request")
            return
        self._meter.count_step(plan)
        for sequence, choice in zip(wanting, choices, strict=True):
            self._take(sequence, choice)

    def _take(self, sequence: Sequence, choice: Choice | None) -> None:
        """Add a chosen token to its sequence and tell of it."""
        if choice is None:
            message = "the model's output is not finite; the adapter's weights may be too large"
            self._fail(sequence, "internal", message)
            return
        sequence.token_ids.append(choice.token_id)
        self._meter.generated_tokens += 1
        if sequence.first_token is None:
            sequence.first_token = time.monotonic()
            self._meter.prompt_tokens += sequence.prompt_len
        logprobs = () if choice.logprob is None else (choice.logprob,)
        self._outbox.append(Chunk(sequence.request_id, (choice.token_id,), logprobs))
        reason = finish_reason(sequence, self._manifest.eos_token_ids, self._model_len)
        if reason is not None:
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._end(sequence, finished(sequence, reason, time.monotonic()))

    def _fail(self, sequence: Sequence, code: FailureCode, message: str) -> None:
        self._end(sequence, Failed(sequence.request_id, code, message))

    def _end(self, sequence: Sequence, event: Finished | Failed) -> None:
        """The one way out: whatever the sequence holds is free and its terminal event is queued."""
        del self._sequences[sequence.request_id]
        self._scheduler.remove(sequence)
        if sequence.image is not None:
            self._residency.release(sequence.image)
            self._images_changed = True
        self._outbox.append(event)


def _mark_scheduled(plan: Plan) -> None:
    now = time.monotonic()
    for part in plan.scheduled:
        if part.sequence.scheduled is None:
            part.sequence.scheduled = now
