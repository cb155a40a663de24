"""Which adapter images are in the engine, and which are on their way: the only writer of that.

    absent → fetching → host → device → draining → absent

A thread fetches an image to local disk; once the budget could hold it, a thread reads, verifies and
packs it (host); then the engine loop hands it to the executor (device), which copies it, evicting
idle images in the order of `eviction`. Nothing is evicted for an image that is not verified, and
one that waits for room lets others pass. An image that nobody wants any more while a thread works
on it is draining. Threads only report what they did: all state changes on the engine loop.

A tenant may have a limit to its bytes (`allowances`): an image that would pass it waits on local
disk, behind nobody but its own tenant's, until others of theirs are idle and can be evicted.

A prefetched image goes the same way without a reference, one at a time and only while no request
waits for any; it stays in host memory where the device has no room that is free or older.

This file knows digests, bytes, tenants and references. It refuses to know requests and tensors.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor

from loraplex.engine.arrivals import Arrivals
from loraplex.engine.eviction import EvictionOrder
from loraplex.engine.image_fetcher import Failure, ImageFetcher, Loaded, Prepared
from loraplex.engine.image_places import Image
from loraplex.engine.protocol import Part
from loraplex.engine.residency_report import ResidencyReport

POLL_BYTES = 8 << 20  # that one poll copies to the device, where several images wait for it

log = logging.getLogger(__name__)


class Residency(ResidencyReport):
    """Keeps images resident by need, within a budget of device memory.

    `load(digest, prepared)` makes an image resident; if it raises, only that image fails.
    `unload(digest)` must not raise. Both run in `poll`, which the engine loop calls before each
    step; `wake` is called, from threads too, when there is something to poll. Host memory for
    images on their way is bounded by `host_bytes`, by default the first budget, or by one image.
    """

    def __init__(
        self,
        fetcher: ImageFetcher,
        *,
        budget_bytes: int,
        load: Callable[[str, Prepared], None],
        unload: Callable[[str], None],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        ttl_s: float | None = None,
        tenant_minimum: int = 0,
        host_bytes: int | None = None,
        pool: Executor | None = None,
    ) -> None:
        super().__init__(budget_bytes)
        self._load, self._unload, self._wake, self._clock = load, unload, wake, clock
        self._limit = fetcher.limit_bytes
        self._order = EvictionOrder(tenant_minimum, ttl_s)
        self.host_bytes = budget_bytes if host_bytes is None else host_bytes
        self._arrivals = Arrivals(fetcher, self._places, wake, self.host_bytes, pool)
        self._changed = False  # since the last poll

    def acquire(
        self,
        digest: str,
        tenant: str = "",
        parts: tuple[Part, ...] = (),
        limit: int | None = None,
    ) -> None:
        """Take a reference for one request, and start a fetch if the image is absent.

        With `parts`, what is fetched is their composition. The tenant's images may take `limit`
        bytes from now on (see `allowances`). What is wrong with the image is no
        exception here: `failure` tells. Requests that come while others hold a failure share it;
        the first to come after them tries again.
        """
        image = self._places.images.get(digest) or Image(parts)
        self._places.allowances.set_limit(tenant, limit)
        self._places.hold(image, tenant)
        self._changed = True
        if image.place is None:
            self._arrivals.begin(digest, image)
        elif self._places.is_resident(image):
            self._arrange(digest, image)
        else:
            image.parts = parts
            self._arrivals.join(digest, image)

    def release(self, digest: str, tenant: str = "") -> None:
        """Give a reference of a tenant's back; raises `ValueError` when it has none."""
        image = self._places.images.get(digest)
        if image is None or not image.holders[tenant]:
            raise ValueError(f"image {digest[:12]}… was released more often than acquired")
        self._places.let_go(image, tenant)
        self._changed = True
        if image.references == 0:
            if self._places.is_resident(image):
                self._arrange(digest, image)
            else:
                self._arrivals.leave(digest, image)

    def prefetch(self, digest: str) -> None:
        """Expect a request for an image: see the head of this file."""
        image = self._places.images.get(digest)
        if image is None:
            self._arrivals.hint(digest, self._clock())
            self._ask_for_poll()
        elif image.place is self._places.idle:
            self._order.rest(digest, self._clock())

    def pin(self, digest: str, pinned: bool) -> bool:
        """Keep an image once it is resident, or no longer; says whether that can be done.

        Pins may take half of the budget; one that is found to be too much once its image is
        resident is dropped.
        """
        image = self._places.images.get(digest)
        is_resident = image is not None and self._places.is_resident(image)
        if not pinned:
            self._pins.remove(digest)
        elif digest not in self._pins:
            size = image.device_bytes if image and is_resident else 0
            if not self._pins.add(digest, size, self.budget_bytes):
                return False
        if image and is_resident:
            self._arrange(digest, image)
            self._ask_for_poll()
        return True

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget, evicting idle images down to it.

        Raises `ValueError` when it is below what requests hold and pins keep.
        """
        if budget_bytes < self._places.kept_bytes:
            raise ValueError(f"images that must stay take more than {budget_bytes} bytes")
        self.budget_bytes = budget_bytes
        self._make_room(0)
        self._ask_for_poll()

    def poll(self) -> None:
        """Take what threads did, load what is verified and fits, read what there is room for."""
        if self._arrivals.settle() or self._changed:
            self._changed = False
            self._arrivals.let_in()
            self._evict_what_tenants_may_not_keep()
            self._refuse_what_pins_exclude()
            self._load_what_fits()
            self._load_hinted()
            self._arrivals.read(self.budget_bytes - self._places.kept_bytes)
            self._arrivals.follow_hint()
            self._places.allowances.tidy()

    def close(self) -> None:
        """Stop the threads, waiting for the jobs that run."""
        self._arrivals.close()

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when the books do not agree with the images."""
        places = self._places
        places.check_integrity()
        self._arrivals.check_integrity()
        self._order.check_integrity()
        self._pins.check_integrity()
        resident = [
            i for d, i in places.images.items() if d in self._pins and places.is_resident(i)
        ]
        pinned_bytes = sum(image.device_bytes for image in resident)
        rules = {
            "device budget": self.resident_bytes <= self.budget_bytes,
            "pinned bytes": self._pins.resident_bytes == pinned_bytes,
            "idle pins": all(digest in self._pins for digest in places.pinned.images),
            "order": {d for d, _ in self._order.oldest(self._clock())} == set(places.idle.images),
            "owners": all(self._order.owner(d) == i.tenant for d, i in places.idle.images.items()),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise RuntimeError(f"residency is inconsistent: {', '.join(broken)}")

    def _ask_for_poll(self) -> None:
        self._changed = True
        self._wake()

    def _arrange(self, digest: str, image: Image) -> None:
        """Put a resident image where its references and its pin want it."""
        places, pinned = self._places, digest in self._pins
        resting = places.pinned if pinned else places.idle
        places.put(digest, image, places.used if image.references else resting)
        if pinned:
            self._order.forget(digest)
            if not image.references:
                image.tenant = None  # it is kept for nobody in particular
        elif image.references:
            self._order.use(digest, image.tenant or "")
        else:
            self._order.rest(digest, self._clock())

    def _evict_what_tenants_may_not_keep(self) -> None:
        """Evict idle images of tenants that have, or are about to have, more than their limit."""
        over = self._places.allowances.over
        for tenant in sorted(over):
            for digest in self._order.of(tenant):
                if tenant in over:
                    self._evict(digest)

    def _refuse_what_pins_exclude(self) -> None:
        """Fail images for which there can be no room while pinned ones stay."""
        places, most = self._places, self._limit - self._pins.resident_bytes
        for place in (places.unread, places.verified) if self._pins else ():
            for digest, image in list(place.images.items()):
                if image.device_bytes > most:
                    message = f"pinned images leave too little room for image {digest[:12]}…"
                    self._arrivals.fail(digest, image, Failure("overloaded", message))

    def _load_what_fits(self) -> None:
        """Make verified images resident, oldest first; some of them only, if they are large."""
        loaded = 0
        for digest, image in list(self._places.verified.images.items()):
            if loaded and loaded + image.device_bytes > POLL_BYTES:
                self._ask_for_poll()
                return
            if image.loaded and self._make_room(image.device_bytes):
                self._make_resident(digest, image, image.loaded)
                loaded += image.device_bytes

    def _load_hinted(self) -> None:
        """Find a place for a prefetched image, which never evicts what is younger than its hint."""
        for digest, image in list(self._places.hinted.images.items()):
            if image.loaded is None:
                continue
            is_free = not self._places.wanted_count
            if is_free and self._make_room(image.device_bytes, before=image.hinted):
                self._make_resident(digest, image, image.loaded)
            else:
                self._places.put(digest, image, self._places.spare)

    def _make_resident(self, digest: str, image: Image, loaded: Loaded) -> None:
        try:
            self._load(digest, loaded.prepared)
        except Exception:
            log.exception("image %s could not be loaded", digest[:12])
            if image.references == 0:
                self._places.forget(digest)
                return
            message = f"image {digest[:12]}… could not be loaded; the log says why"
            self._arrivals.fail(digest, image, Failure("internal", message))
            return
        image.loaded = None
        if digest in self._pins and not self._pins.add(
            digest, image.device_bytes, self.budget_bytes
        ):
            log.warning("image %s is not pinned: pins take half of the budget", digest[:12])
            self._pins.remove(digest)
        self._arrange(digest, image)

    def _make_room(self, size: int, before: float = float("inf")) -> bool:
        """Evict idle images until `size` bytes are free, all or none of those it takes.

        Says whether they are; images that became idle after `before` stay.
        """
        if self._places.kept_bytes + size > self.budget_bytes:
            return False
        lacking, victims = self.resident_bytes + size - self.budget_bytes, []
        for digest, since in self._order.oldest(self._clock()) if lacking > 0 else ():
            if lacking <= 0 or since > before:
                break
            victims.append(digest)
            lacking -= self._places.images[digest].device_bytes
        if lacking > 0:
            return False
        for digest in victims:
            self._evict(digest)
        return True

    def _evict(self, digest: str) -> None:
        self._unload(digest)
        self._order.forget(digest)
        self._places.forget(digest)
