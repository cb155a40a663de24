"""What the residency tells of its images, and what their bytes add up to; changes nothing."""

from collections.abc import Iterator

from loraplex.engine.image_fetcher import Failure
from loraplex.engine.image_places import Places, State
from loraplex.engine.images import ImageHeader
from loraplex.engine.pins import Pins


class ResidencyReport:
    """The readable side of `Residency`. Device memory for images is bounded by `budget_bytes`."""

    def __init__(self, budget_bytes: int) -> None:
        self._places, self._pins = Places(), Pins()
        self.budget_bytes = budget_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of device memory that images take."""
        return self._places.resident_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of device memory that requests hold."""
        return self._places.used.device_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of device memory that could be evicted now."""
        return self._places.idle.device_bytes

    @property
    def lacking_bytes(self) -> int:
        """Bytes that the budget lacks for all that requests hold or wait for, and for pins."""
        places = self._places
        return max(0, places.kept_bytes + places.wanted_bytes - self.budget_bytes)

    @property
    def spare_bytes(self) -> int:
        """Bytes of the budget that nothing requests hold or wait for needs, nor pins."""
        places = self._places
        return max(0, self.budget_bytes - places.kept_bytes - places.wanted_bytes)

    @property
    def staged_bytes(self) -> int:
        """Bytes of host memory that images on their way take."""
        return self._places.staged_bytes

    @property
    def resident_count(self) -> int:
        """How many images are on the device."""
        return self._places.resident_count

    @property
    def pinned_count(self) -> int:
        """How many images are pinned, on the device or not."""
        return len(self._pins)

    @property
    def loading_count(self) -> int:
        """How many images requests wait for."""
        return self._places.wanted_count + len(self._places.barred)

    def tenant_bytes(self, tenant: str) -> int:
        """Bytes of images on the device that a tenant uses, or was the last to use."""
        return self._places.allowances.resident(tenant)

    def is_barred(self, tenant: str) -> bool:
        """Whether a tenant waits for an image until others that it uses are idle."""
        return self._places.allowances.is_barred(tenant)

    def resident_digests(self) -> Iterator[str]:
        """The images on the device, those that requests hold first."""
        return self._places.resident_digests()

    def state(self, digest: str) -> State:
        """Where an image is."""
        image = self._places.images.get(digest)
        return image.place.state if image and image.place else State.ABSENT

    def references(self, digest: str) -> int:
        """How many requests hold an image."""
        image = self._places.images.get(digest)
        return image.references if image else 0

    def is_located(self, digest: str) -> bool:
        """Whether the image is on local disk by now, or nearer: no store keeps it waiting."""
        image = self._places.images.get(digest)
        return image is not None and image.located is not None

    def lacks_room(self, digest: str) -> bool:
        """Whether it is, and its tenant may have it: what it waits for is everybody's memory."""
        return self.is_located(digest) and digest not in self._places.barred.images

    def failure(self, digest: str) -> Failure | None:
        """Why an image could not be had; kept while requests that waited for it hold it."""
        image = self._places.images.get(digest)
        return image.failure if image else None

    def header(self, digest: str) -> ImageHeader:
        """What a resident image says of itself; raises `KeyError` for one that is not resident."""
        image = self._places.images[digest]
        if not self._places.is_resident(image) or image.located is None:
            raise KeyError(digest)
        return image.located.header
