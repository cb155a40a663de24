"""Images on their way to host memory: what threads do for them, and what is expected next.

Threads only report what they did; all state changes on the engine loop, in `settle` and `read`.
Host memory is bounded by `host_bytes`, or by one image. Prefetched images go one at a time, begin
only while no request waits for any image, and give way to what requests wait for. This file knows
jobs and host memory; it refuses to know the device, but for how much room it has.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor

from loraplex.engine.background import background_pool
from loraplex.engine.cores import available_cores
from loraplex.engine.image_fetcher import Failure, ImageFetcher, Loaded, Located
from loraplex.engine.image_places import Image, Job, Place, Places

FETCHERS = 8  # threads that wait for the store
READS = 4  # images at most that are being read, verified and packed, or wait for a thread
CORES_PER_READER = 4  # there is such a thread for as many cores, but at least one
MAX_HINTS = 256

log = logging.getLogger(__name__)


class Arrivals:
    """Brings images of `places` to host memory; `wake` is called from threads."""

    def __init__(
        self,
        fetcher: ImageFetcher,
        places: Places,
        wake: Callable[[], None],
        host_bytes: int,
        pool: Executor | None,
    ) -> None:
        self._fetcher, self._places, self._wake = fetcher, places, wake
        self._fetchers = pool or background_pool(FETCHERS, "fetch")
        readers = min(max(1, available_cores() // CORES_PER_READER), READS)
        self._readers = pool or background_pool(readers, "read")
        self._done: deque[tuple[str, Job]] = deque()
        self._hints: OrderedDict[str, float] = OrderedDict()  # not begun; when each was given
        self.host_bytes = host_bytes

    def begin(self, digest: str, image: Image) -> None:
        """Start to fetch an image for a request."""
        self._hints.pop(digest, None)
        self._locate(digest, image, self._places.locating)

    def join(self, digest: str, image: Image) -> None:
        """One more request waits for an image that is on its way."""
        places = self._places
        if image.place is places.spare:
            places.put(digest, image, places.verified)
        elif image.place in (places.hinted, places.draining):
            places.put(digest, image, self._stage(image))
        elif image.place is places.failed and image.parts != image.tried:
            image.failure = None
            self._locate(digest, image, places.locating)

    def leave(self, digest: str, image: Image) -> None:
        """Nobody waits any more: forget the image, once a job that runs has ended."""
        if image.job is None or image.job.cancel():
            self._places.forget(digest)
        else:
            self._places.put(digest, image, self._places.draining)

    def hint(self, digest: str, now: float) -> None:
        """Expect a request for an image that is not known yet; old hints give way to new ones."""
        self._hints[digest] = now
        self._hints.move_to_end(digest)
        if len(self._hints) > MAX_HINTS:
            self._hints.popitem(last=False)

    def settle(self) -> bool:
        """Take what threads did; says whether they did anything."""
        count = len(self._done)
        for _ in range(count):
            digest, job = self._done.popleft()
            image = self._places.images.get(digest)
            if image is not None and image.job is job:  # else it was left before the job began
                image.job = None
                self._take(digest, image, job.result())
        return count > 0

    def let_in(self) -> None:
        """Let images on that a tenant of theirs may have, none before another of its tenant's.

        One that lost its place while it was read, for its tenants use others again, waits first in
        line, without its memory.
        """
        places, allowances = self._places, self._places.allowances
        for digest, image in list(places.verified.images.items()):
            if not any(map(allowances.may_keep, image.holders)):
                image.loaded = None
                places.put(digest, image, places.barred)
                places.barred.images.move_to_end(digest, last=False)
        behind: set[str] = set()
        for digest, image in list(places.barred.images.items()):
            first, size = image.holders.keys() - behind, image.device_bytes
            if any(allowances.may_have(tenant, size) for tenant in first):
                places.put(digest, image, places.unread)
            else:
                behind |= image.holders.keys()

    def read(self, room: int) -> None:
        """Start to read images, oldest first, for which the device will have `room` bytes.

        Verified images still here found none, so the room that is left is not kept for them.
        """
        places, chosen = self._places, list[tuple[str, Image, Located]]()
        room -= places.reading.device_bytes
        staged = places.staged_bytes - places.spare.host_bytes
        for digest, image in places.unread.images.items():
            if len(places.reading) + len(chosen) >= READS:
                break
            located = image.located
            fits = staged == 0 or staged + image.host_bytes <= self.host_bytes
            if located and fits and located.device_bytes <= room:
                room, staged = room - located.device_bytes, staged + located.host_bytes
                chosen.append((digest, image, located))
        for digest, image, located in chosen:
            self._make_host_room(located.host_bytes)
            self._read(digest, image, located, places.reading)

    def follow_hint(self) -> None:
        """Start on the oldest hint if nothing else is under way."""
        if self._hints and not self._places.hinted and not self._places.wanted_count:
            digest, now = self._hints.popitem(last=False)
            image = Image(())
            image.hinted = now
            self._locate(digest, image, self._places.hinted)

    def fail(self, digest: str, image: Image, failure: Failure) -> None:
        """Keep the reason for those who wait for the image."""
        log.warning("%s: %s", failure.code, failure.message)
        self._places.lift(digest, image)
        image.located, image.loaded, image.failure = None, None, failure
        self._places.put(digest, image, self._places.failed)

    def close(self) -> None:
        """Stop the threads, waiting for the jobs that run."""
        for pool in (self._fetchers, self._readers):
            pool.shutdown(wait=True, cancel_futures=True)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when there is more in host memory than there may be."""
        places = self._places
        arriving = (places.reading, places.verified, places.draining)
        staged = [image for place in arriving for image in place.images.values() if image.located]
        if places.staged_bytes > self.host_bytes and len(staged) > 1:
            raise RuntimeError("images on their way take too much host memory")
        if self._hints.keys() & places.images.keys() or len(places.hinted) > 1:
            raise RuntimeError("hints are inconsistent")

    def _take(self, digest: str, image: Image, outcome: Located | Loaded | Failure) -> None:
        places = self._places
        if image.place is places.draining:
            places.forget(digest)
        elif isinstance(outcome, Failure):
            self._take_failure(digest, image, outcome)
        elif isinstance(outcome, Loaded):
            image.loaded = outcome
            if image.references:
                places.put(digest, image, places.verified)
        elif image.references:
            places.lift(digest, image)
            image.located = outcome
            places.put(digest, image, places.barred)
        else:
            self._read_hinted(digest, image, outcome)

    def _take_failure(self, digest: str, image: Image, failure: Failure) -> None:
        if image.references == 0:
            log.info("prefetching %r failed: %s: %s", digest[:12], *failure)
            self._places.forget(digest)
        elif image.located is None and image.parts != image.tried:
            self._locate(digest, image, self._places.locating)
        else:
            self.fail(digest, image, failure)

    def _read_hinted(self, digest: str, image: Image, located: Located) -> None:
        """Read a prefetched image, unless requests wait by now or there is no room for it."""
        places = self._places
        staged = places.staged_bytes - places.spare.host_bytes
        if places.wanted_count:
            places.forget(digest)
            self.hint(digest, image.hinted)
        elif staged + located.host_bytes > self.host_bytes:
            places.forget(digest)
        else:
            places.lift(digest, image)
            self._make_host_room(located.host_bytes)
            image.located = located
            self._read(digest, image, located, places.hinted)

    def _make_host_room(self, size: int) -> None:
        """Drop prefetched images from host memory, oldest first, as far as need be."""
        places = self._places
        while places.spare and places.staged_bytes + size > self.host_bytes:
            places.forget(next(iter(places.spare.images)))

    def _locate(self, digest: str, image: Image, place: Place) -> None:
        image.tried = image.parts
        image.job = self._fetchers.submit(self._fetcher.locate, digest, image.parts)
        self._start(digest, image, image.job, place)

    def _read(self, digest: str, image: Image, located: Located, place: Place) -> None:
        image.job = self._readers.submit(self._fetcher.read, digest, located)
        self._start(digest, image, image.job, place)

    def _start(self, digest: str, image: Image, job: Job, place: Place) -> None:
        self._places.put(digest, image, place)
        job.add_done_callback(lambda done: self._report(digest, done))

    def _report(self, digest: str, job: Job) -> None:
        self._done.append((digest, job))
        self._wake()

    def _stage(self, image: Image) -> Place:
        """Where an image on its way is, once a request waits for it."""
        places = self._places
        if image.loaded:
            return places.verified
        return places.reading if image.located else places.locating
