"""Which adapter images are in the engine, and which are on their way: the only writer of that.

    absent → fetching → host → device → draining → absent

A thread fetches an image to local disk; once the budget could hold it, a thread reads and verifies
it (host); then the engine loop hands it to the executor (device), evicting the least recently used
images that no request holds. Nothing is evicted for an image that is not verified, and one that
waits for room lets others pass. An image that nobody wants any more while work on it is under way
is draining. Threads only report what they did: all state changes on the engine loop.

This file knows digests, bytes and references. It refuses to know requests, tensors and names.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path

from loraplex.engine.image_fetcher import Failure, ImageFetcher, Loaded, Located
from loraplex.engine.images import ImageHeader, ImageStore

FETCHERS = 8

log = logging.getLogger(__name__)

Outcome = Located | Loaded | Failure
Job = Future[Outcome]


class State(StrEnum):
    """Where an image is; one that failed is absent."""

    ABSENT = "absent"
    FETCHING = "fetching"
    HOST = "host"
    DEVICE = "device"
    DRAINING = "draining"


class _Image:
    """What is known of one image. It is forgotten once it is absent and nobody holds it."""

    def __init__(self) -> None:
        self.state = State.FETCHING
        self.references = 0
        self.job: Job | None = None
        self.located: Located | None = None
        self.loaded: Loaded | None = None
        self.failure: Failure | None = None
        self.bytes = 0  # of host memory while it is read or waits, then of device memory


def block_bytes(header: ImageHeader) -> int:
    """Bytes of an image's block."""
    return header.block_bytes


class Residency:
    """Keeps images resident by need, within `budget_bytes` of device memory.

    `load(digest, header, block)` makes an image resident and may keep the block; if it raises, only
    that image fails. `unload(digest)` must not raise. Both run in `poll`, which the engine loop
    calls before each step; `wake` is called from threads when there is something to poll. Host
    memory for images on their way is bounded by `budget_bytes` too. `measure` tells how many bytes
    of device memory an image takes, by default those of its block.
    """

    def __init__(
        self,
        store: ImageStore,
        cache: Path,
        base_fingerprint: str,
        budget_bytes: int,
        load: Callable[[str, ImageHeader, bytearray], None],
        unload: Callable[[str], None],
        wake: Callable[[], None],
        *,
        measure: Callable[[ImageHeader], int] = block_bytes,
        pool: Executor | None = None,
    ) -> None:
        self._fetcher = ImageFetcher(store, cache, base_fingerprint, budget_bytes, measure)
        self._load, self._unload, self._wake = load, unload, wake
        self._pool = pool or ThreadPoolExecutor(FETCHERS, thread_name_prefix="image")
        self._waiting: dict[str, _Image] = {}  # not on the device, oldest first
        self._resident: OrderedDict[str, _Image] = OrderedDict()  # least recently used first
        self._done: deque[tuple[str, Job]] = deque()
        self.budget_bytes = budget_bytes
        self.resident_bytes = 0  # of device memory
        self.held_bytes = 0  # the part of them that requests hold
        self.staged_bytes = 0  # of host memory

    @property
    def resident_count(self) -> int:
        """How many images are on the device."""
        return len(self._resident)

    @property
    def loading_count(self) -> int:
        """How many images are waited for."""
        return sum(i.state in (State.FETCHING, State.HOST) for i in self._waiting.values())

    def state(self, digest: str) -> State:
        """Where an image is."""
        image = self._find(digest)
        return image.state if image else State.ABSENT

    def references(self, digest: str) -> int:
        """How many requests hold an image."""
        image = self._find(digest)
        return image.references if image else 0

    def failure(self, digest: str) -> Failure | None:
        """Why an image could not be had; kept while requests that waited for it hold it."""
        image = self._find(digest)
        return image.failure if image else None

    def acquire(self, digest: str) -> None:
        """Take a reference for one request, and start a fetch if the image is absent.

        What is wrong with the image is no exception here: `failure` tells. Requests that come while
        others hold a failure share it; the first to come after them tries again.
        """
        image = self._find(digest)
        if image is None:
            image = self._waiting[digest] = _Image()
            self._start(digest, image, self._fetcher.locate, digest)
        image.references += 1
        if image.state is State.DEVICE:
            self._resident.move_to_end(digest)
            self.held_bytes += image.bytes if image.references == 1 else 0
        elif image.state is State.DRAINING:
            image.state = State.FETCHING

    def release(self, digest: str) -> None:
        """Give a request's reference back; raises `ValueError` when there is none."""
        image = self._find(digest)
        if image is None or image.references == 0:
            raise ValueError(f"image {digest[:12]}… was released more often than acquired")
        image.references -= 1
        if image.state is State.DEVICE:
            self._resident.move_to_end(digest)
            self.held_bytes -= image.bytes if image.references == 0 else 0
        elif image.references == 0:
            self._abandon(digest, image)

    def poll(self) -> None:
        """Take what threads did, load what is verified and fits, read what there is room for."""
        while self._done:
            self._settle(*self._done.popleft())
        for digest, image in list(self._waiting.items()):
            if image.loaded and self.held_bytes + image.bytes <= self.budget_bytes:
                self._make_resident(digest, image, image.loaded)
        self._read_what_fits()

    def close(self) -> None:
        """Stop the threads, waiting for the jobs that run."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when the books do not agree with the images."""
        resident, waiting = self._resident.values(), self._waiting.values()
        held = (i.bytes for i in resident if i.references)
        rules = {
            "device bytes": self.resident_bytes == sum(i.bytes for i in resident),
            "held bytes": self.held_bytes == sum(held),
            "host bytes": self.staged_bytes == sum(i.bytes for i in waiting),
            "device budget": self.resident_bytes <= self.budget_bytes,
            "host budget": self.staged_bytes <= self.budget_bytes,
            "one place for each image": not self._resident.keys() & self._waiting.keys(),
            "device images": all(i.state is State.DEVICE for i in resident),
            "device images keep no host copy": not any(i.loaded or i.job for i in resident),
            "waiting images": all(_is_consistent(i) for i in waiting),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise RuntimeError(f"residency is inconsistent: {', '.join(broken)}")

    def _find(self, digest: str) -> _Image | None:
        return self._resident.get(digest) or self._waiting.get(digest)

    def _start(
        self, digest: str, image: _Image, job: Callable[..., Outcome], *arguments: object
    ) -> None:
        image.job = self._pool.submit(job, *arguments)
        image.job.add_done_callback(lambda done: self._report(digest, done))

    def _report(self, digest: str, job: Job) -> None:
        self._done.append((digest, job))
        self._wake()

    def _settle(self, digest: str, job: Job) -> None:
        image = self._waiting.get(digest)
        if image is None or image.job is not job:
            return  # it was abandoned before the job began
        image.job = None
        outcome = job.result()
        if image.references == 0:
            self._forget(digest, image)
        elif isinstance(outcome, Failure):
            self._fail(digest, image, outcome)
        elif isinstance(outcome, Located):
            image.located = outcome
        else:
            image.state, image.loaded = State.HOST, outcome

    def _read_what_fits(self) -> None:
        """Start to read images, oldest first, for which the device will have room.

        Verified images still here found none, so the room that is left is not kept for them.
        """
        waiting = self._waiting.items()
        taken = self.held_bytes + sum(i.bytes for _, i in waiting if i.loaded is None)
        for digest, image in waiting:
            if image.located is None or image.job is not None or image.loaded is not None:
                continue
            size = image.located.most_bytes
            if max(taken, self.staged_bytes) + size <= self.budget_bytes:
                taken += size
                self._stage(image, size)
                self._start(digest, image, self._fetcher.read, digest, image.located)

    def _make_resident(self, digest: str, image: _Image, loaded: Loaded) -> None:
        size = image.bytes
        self._evict(self.budget_bytes - size)
        try:
            self._load(digest, *loaded)
        except Exception:
            log.exception("image %s could not be loaded", digest[:12])
            message = f"image {digest[:12]}… could not be loaded; the log says why"
            self._fail(digest, image, Failure("internal", message))
            return
        self._forget(digest, image)
        image.state, image.located, image.loaded, image.bytes = State.DEVICE, None, None, size
        self._resident[digest] = image
        self.resident_bytes += size
        self.held_bytes += size

    def _evict(self, target_bytes: int) -> None:
        """Unload unreferenced images, least recently used first, down to `target_bytes`."""
        idle = (digest for digest, image in self._resident.items() if image.references == 0)
        for digest in list(idle):
            if self.resident_bytes <= target_bytes:
                return
            image = self._resident[digest]
            image.state = State.DRAINING
            self._unload(digest)
            del self._resident[digest]
            self.resident_bytes -= image.bytes

    def _fail(self, digest: str, image: _Image, failure: Failure) -> None:
        log.warning("%s: %s", failure.code, failure.message)
        self._stage(image, 0)
        image.state, image.located, image.loaded = State.ABSENT, None, None
        image.failure = failure

    def _abandon(self, digest: str, image: _Image) -> None:
        """Nobody waits any more: forget the image, once a job that runs has ended."""
        if image.job is None or image.job.cancel():
            self._forget(digest, image)
        else:
            image.state = State.DRAINING

    def _forget(self, digest: str, image: _Image) -> None:
        self._stage(image, 0)
        del self._waiting[digest]

    def _stage(self, image: _Image, size: int) -> None:
        self.staged_bytes += size - image.bytes
        image.bytes = size


def _is_consistent(image: _Image) -> bool:
    """Whether an image that is not on the device is what its state says."""
    held = image.references > 0
    return {
        State.ABSENT: held and image.failure is not None and image.job is None,
        State.FETCHING: held and (image.job is not None or image.located is not None),
        State.HOST: held and image.job is None and image.loaded is not None,
        State.DRAINING: not held and image.job is not None,
        State.DEVICE: False,
    }[image.state]
