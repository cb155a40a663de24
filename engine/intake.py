"""Sequences between the door and the scheduler's queue: they wait for a guide and for an image.

Both are prepared on threads, for one request each; nobody else waits. But an image for which there
is no memory would wait for ever while others, always in use, stay resident: once `PASSES` requests
have passed it, those that come later are held back, whatever their image, until it is resident.
One that its own tenant's limit keeps out holds back nobody but that tenant's.

This file knows whom to tell the scheduler of and what failed; it refuses to know steps and events.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

from loraplex.engine.activation import activation
from loraplex.engine.guidance import GuideError, Guides, Matcher
from loraplex.engine.protocol import FailureCode, Generate
from loraplex.engine.residency import Residency
from loraplex.engine.scheduler import Scheduler
from loraplex.engine.sequence import Request, Sequence, name_blocks

PASSES = 64


class Refused(NamedTuple):
    """A request that cannot have what it waited for, and why."""

    request: Request
    code: FailureCode
    message: str


class Intake:
    """Takes sequences, and gives the scheduler those that lack nothing but an image."""

    def __init__(
        self,
        residency: Residency,
        guides: Guides,
        scheduler: Scheduler,
        base: str,
        wake: Callable[[], None],
    ) -> None:
        """`base` is the base's fingerprint; `wake` is called, on any thread, for a guide."""
        self._residency, self._guides, self._scheduler = residency, guides, scheduler
        self._base, self._wake = base, wake
        self._compiling: dict[Sequence, Future[Matcher]] = {}
        self._held: dict[Sequence, Generate] = {}  # oldest first
        self._queues: dict[str, dict[Sequence, Generate]] = {}  # the same, behind a tenant's own
        self._turns = 0  # requests that have asked for an image
        self.images_changed = False  # acquired or released since the last `settle`

    @property
    def waiting(self) -> int:
        """Sequences whose guide is not ready, or that are held back."""
        queued = sum(map(len, self._queues.values()))
        return len(self._compiling) + len(self._held) + queued

    def add(self, sequence: Sequence, message: Generate) -> None:
        """Take the first sequence of a request."""
        if message.image is not None and (self._held or self._is_passed_by()):
            self._held[sequence] = message
        else:
            self._enter(sequence, message)

    def release(self, request: Request) -> None:
        """The request ends: forget what it waited for, and give its image back."""
        for sequence in request.alive:
            self._compiling.pop(sequence, None)
            if self._held.pop(sequence, None) or self._unqueue(sequence):
                return
        if request.image is not None:
            self._residency.release(request.image, request.tenant)
            self.images_changed = True

    def _enter(self, sequence: Sequence, message: Generate) -> None:
        """Take a sequence, unless it has to wait behind an image of its own tenant's."""
        tenant = message.tenant
        if message.image is not None and (tenant in self._queues or self._is_outrun(tenant)):
            self._queues.setdefault(tenant, {})[sequence] = message
        else:
            self._take(sequence, message)

    def _unqueue(self, sequence: Sequence) -> bool:
        queue = self._queues.get(sequence.tenant, {})
        if queue.pop(sequence, None) is None:
            return False
        if not queue:
            del self._queues[sequence.tenant]
        return True

    def _take(self, sequence: Sequence, message: Generate) -> None:
        guide = message.sampling.guide
        if message.image is None:
            name_blocks(sequence, self._base)
        else:
            limit = message.policy.resident_bytes
            self._residency.acquire(message.image, message.tenant, message.parts, limit)
            self._turns += 1
            sequence.request.turn = self._turns
            self.images_changed = True
        if guide is None:
            self._scheduler.add(sequence)
        else:
            job = self._compiling[sequence] = self._guides.compile(guide)
            job.add_done_callback(lambda _: self._wake())

    def _is_passed_by(self) -> bool:
        """Whether too many have passed the request that waits for memory longest.

        Who is held back for it stays so until its image is there, not only until it has room. An
        image that a slow store or its tenant's own limit keeps waiting holds nobody back.
        """
        if not (self._held or self._residency.lacking_bytes):
            return False
        oldest = next(filter(self._residency.lacks_room, self._scheduler.loading_images), None)
        if oldest is None:
            return False
        return self._turns - self._scheduler.loading_for(oldest)[0].request.turn >= PASSES

    def _is_outrun(self, tenant: str) -> bool:
        """The same for one tenant, whose limit keeps out an image while it uses others."""
        if not (tenant in self._queues or self._residency.is_barred(tenant)):
            return False
        located = filter(self._residency.is_located, self._scheduler.loading_images)
        waiting = (s for digest in located for s in self._scheduler.loading_for(digest))
        oldest = next((s for s in waiting if s.tenant == tenant), None)
        return oldest is not None and self._turns - oldest.request.turn >= PASSES

    def settle(self) -> Iterator[Refused]:
        """Let on what has all it needs by now; yields what will not get it."""
        yield from self._settle_guides()
        while self._held and not self._is_passed_by():
            held = next(iter(self._held))
            self._enter(held, self._held.pop(held))
        for tenant in [] if self._held else list(self._queues):
            self._settle_queue(tenant)
        self.images_changed = False
        self._residency.poll()
        for digest in self._scheduler.loading_images:
            failure = self._residency.failure(digest)
            if failure is not None:
                for sequence in self._scheduler.loading_for(digest):
                    yield Refused(sequence.request, *failure)
            elif self._residency.state(digest) == "device":
                self._begin(digest)

    def _settle_queue(self, tenant: str) -> None:
        """Let on those of a tenant that waited behind its own image, once it is there."""
        queue = self._queues[tenant]
        while queue and not (self._is_outrun(tenant) or self._is_passed_by()):
            held = next(iter(queue))
            self._take(held, queue.pop(held))
        if not queue:
            del self._queues[tenant]

    def _settle_guides(self) -> Iterator[Refused]:
        for sequence, job in list(self._compiling.items()):
            if not job.done():
                continue
            del self._compiling[sequence]
            try:
                sequence.matcher = job.result()
            except GuideError as error:
                yield Refused(sequence.request, "invalid_request", str(error))
            else:
                self._scheduler.add(sequence)

    def _begin(self, digest: str) -> None:
        """The image is resident: those that waited know where their adapter starts, and may run."""
        invocation, now = self._residency.header(digest).invocation, time.monotonic()
        for sequence in self._scheduler.loading_for(digest):
            if invocation:
                sequence.adapter_start = activation(sequence.token_ids, invocation)
            name_blocks(sequence, self._base)
            sequence.request.loaded = now
        self._scheduler.image_ready(digest)
