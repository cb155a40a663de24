"""Where each image is on its way to the device and back, and how many bytes lie in each place.

An image is in one place at a time, so totals are kept by moving it. This file knows digests and
bytes; it refuses to know threads, budgets and who asks for an image.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from enum import StrEnum
from itertools import chain

from loraplex.engine.allowances import Allowances, Claim
from loraplex.engine.image_fetcher import Failure, Loaded, Located
from loraplex.engine.protocol import Part

Job = Future[Located | Loaded | Failure]


class State(StrEnum):
    """Where an image is, as seen from outside; one that failed is absent."""

    ABSENT = "absent"
    FETCHING = "fetching"
    HOST = "host"
    DEVICE = "device"
    DRAINING = "draining"


class Image:
    """What is known of one image. It is forgotten once it is nowhere and nobody holds it."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts  # of a composition, as the last request gave them
        self.tried = parts  # those of the last attempt
        self.holders: Counter[str] = Counter()  # references of each tenant
        self.tenant: str | None = None  # who took the last reference
        self.place: Place | None = None
        self.job: Job | None = None
        self.located: Located | None = None
        self.loaded: Loaded | None = None
        self.failure: Failure | None = None
        self.hinted = 0.0  # when a prefetch asked for it

    @property
    def references(self) -> int:
        """How many requests hold it."""
        return self.holders.total()

    @property
    def host_bytes(self) -> int:
        """Bytes that it takes in host memory while it is read or waits there."""
        return self.located.host_bytes if self.located else 0

    @property
    def device_bytes(self) -> int:
        """Bytes that it takes on the device; 0 until its header is read."""
        return self.located.device_bytes if self.located else 0


class Place:
    """The images that are in one place, in the order they came, and their bytes."""

    def __init__(
        self,
        state: State,
        is_held: bool,
        is_sound: Callable[[Image], bool],
        claim: Claim | None = None,
    ) -> None:
        """`is_held`: whether requests hold its images; `is_sound` tells if one belongs here.

        `claim`: what they count as for their tenants, if anything.
        """
        self.state, self._is_held, self._is_sound = state, is_held, is_sound
        self.claim = claim
        self.images: OrderedDict[str, Image] = OrderedDict()
        self.host_bytes = self.device_bytes = 0

    def __len__(self) -> int:
        return len(self.images)

    def add(self, digest: str, image: Image) -> None:
        """Let an image that is in no place be here; its bytes may not change while it is."""
        self.images[digest] = image
        self.host_bytes += image.host_bytes
        self.device_bytes += image.device_bytes
        image.place = self

    def remove(self, digest: str) -> None:
        """Let an image that is here be nowhere."""
        image = self.images.pop(digest)
        self.host_bytes -= image.host_bytes
        self.device_bytes -= image.device_bytes
        image.place = None

    def is_consistent(self) -> bool:
        """Whether the totals are right and each image belongs here."""
        images = self.images.values()
        return (
            self.host_bytes == sum(image.host_bytes for image in images)
            and self.device_bytes == sum(image.device_bytes for image in images)
            and all(i.place is self and (i.references > 0) == self._is_held for i in images)
            and all(self._is_sound(image) for image in images)
        )


class Places:
    """All places, and what they add up to."""

    def __init__(self) -> None:
        state, claim = State, Claim
        self.locating = Place(state.FETCHING, True, _is_sought, claim.WAITING)
        self.barred = Place(state.FETCHING, True, _is_idle_on_disk, claim.BARRED)
        self.unread = Place(state.FETCHING, True, _is_idle_on_disk, claim.COMING)
        self.reading = Place(state.FETCHING, True, _is_being_read, claim.COMING)
        self.verified = Place(state.HOST, True, _is_in_memory, claim.READY)
        self.failed = Place(state.ABSENT, True, _is_not_to_be_had, claim.WAITING)
        self.hinted = Place(state.FETCHING, False, _is_hinted)
        self.spare = Place(state.HOST, False, _is_in_memory)
        self.draining = Place(state.DRAINING, False, lambda i: i.job is not None)
        self.used = Place(state.DEVICE, True, _is_on_device, claim.USED)
        self.idle = Place(state.DEVICE, False, _is_on_device, claim.IDLE)
        self.pinned = Place(state.DEVICE, False, _is_on_device)
        self._staged = (self.reading, self.verified, self.hinted, self.spare, self.draining)
        self._wanted = (self.locating, self.unread, self.reading, self.verified)
        self._resident = (self.used, self.idle, self.pinned)
        self.images: dict[str, Image] = {}
        self.allowances = Allowances()

    def hold(self, image: Image, tenant: str) -> None:
        """One more request of a tenant's holds an image."""
        self._count(image, self.allowances.remove)
        image.holders[tenant] += 1
        image.tenant = tenant
        self._count(image, self.allowances.add)

    def let_go(self, image: Image, tenant: str) -> None:
        """One of them does so no longer."""
        self._count(image, self.allowances.remove)
        image.holders[tenant] -= 1
        image.holders += Counter()  # without those that hold it no longer
        self._count(image, self.allowances.add)

    def put(self, digest: str, image: Image, place: Place) -> None:
        """Move an image from where it is, if anywhere."""
        self.lift(digest, image)
        self.images[digest] = image
        place.add(digest, image)
        self._count(image, self.allowances.add)

    def lift(self, digest: str, image: Image) -> None:
        """Let a known image be in no place until it is put into one; its bytes may change."""
        if image.place is not None:
            self._count(image, self.allowances.remove)
            image.place.remove(digest)

    def forget(self, digest: str) -> None:
        """Drop all that is known of an image."""
        self.lift(digest, self.images.pop(digest))

    def is_resident(self, image: Image) -> bool:
        """Whether an image is on the device."""
        return image.place in self._resident

    @property
    def staged_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(place.host_bytes for place in self._staged)

    @property
    def wanted_bytes(self) -> int:
        """Bytes of device memory for which requests wait, as far as is known."""
        return sum(place.device_bytes for place in self._wanted)

    @property
    def wanted_count(self) -> int:
        """Images for which requests wait."""
        return sum(len(place) for place in self._wanted)

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device."""
        return sum(place.device_bytes for place in self._resident)

    def resident_digests(self) -> Iterator[str]:
        """The images on the device, those that requests hold first."""
        return chain.from_iterable(place.images for place in self._resident)

    @property
    def resident_count(self) -> int:
        """Images on the device."""
        return sum(len(place) for place in self._resident)

    @property
    def kept_bytes(self) -> int:
        """Bytes on the device that must stay there."""
        return self.used.device_bytes + self.pinned.device_bytes

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when an image is not where it belongs, or totals are wrong."""
        places = {name: p for name, p in vars(self).items() if isinstance(p, Place)}
        broken = [name for name, place in places.items() if not place.is_consistent()]
        if broken or sum(map(len, places.values())) != len(self.images):
            raise RuntimeError(f"images are not where they should be: {', '.join(broken)}")
        counted = Allowances()
        for image in self.images.values():
            self._count(image, counted.add)
        if counted.totals() != self.allowances.totals():
            raise RuntimeError("tenants' bytes do not add up to their images'")

    def _count(self, image: Image, change: Callable[[str, Claim, int], None]) -> None:
        """Count an image for those whose it is, or no longer."""
        claim = image.place.claim if image.place else None
        if claim is None:
            return
        owners: Iterable[str | None] = image.holders
        for tenant in (image.tenant,) if claim is Claim.IDLE else owners:
            if tenant is not None:
                change(tenant, claim, image.device_bytes)


def _is_sought(image: Image) -> bool:
    return image.job is not None and image.located is None


def _is_being_read(image: Image) -> bool:
    return image.job is not None and image.loaded is None


def _is_not_to_be_had(image: Image) -> bool:
    return image.job is None and image.failure is not None


def _is_hinted(image: Image) -> bool:
    return (image.job is None) == (image.loaded is not None)


def _is_idle_on_disk(image: Image) -> bool:
    return image.job is None and image.located is not None and image.loaded is None


def _is_in_memory(image: Image) -> bool:
    return image.job is None and image.loaded is not None


def _is_on_device(image: Image) -> bool:
    return image.job is None and image.located is not None and image.loaded is None
