"""Images by hand, for tests of the engine's loop; use `runpy.run_path`."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from loraplex.engine.image_builder import ImageBuilder, SliceData
from loraplex.engine.images import ImageHeader, ImageStore
from loraplex.engine.protocol import FailureCode, Part

FINGERPRINT = "f" * 64


class StandInResidency:
    """`Residency` by hand: images arrive or fail when the test says so."""

    def __init__(self) -> None:
        self.references: Counter[str] = Counter()
        self.resident: set[str] = set()
        self.failures: dict[str, tuple[FailureCode, str]] = {}
        self.invocations: dict[str, tuple[int, ...]] = {}
        self.near: set[str] = set()
        self.located: set[str] = set()
        self.barred: set[str] = set()  # tenants
        self.pins: set[str] = set()
        self.polls = 0
        self.resident_bytes = self.budget_bytes = self.lacking_bytes = self.spare_bytes = 0

    @property
    def resident_count(self) -> int:
        return len(self.resident)

    @property
    def pinned_count(self) -> int:
        return len(self.pins)

    def set_budget(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes

    def acquire(
        self,
        digest: str,
        tenant: str = "",
        parts: tuple[Part, ...] = (),
        limit: int | None = None,
    ) -> None:
        self.references[digest] += 1

    def release(self, digest: str, tenant: str = "") -> None:
        self.references[digest] -= 1
        if not self.references[digest]:
            self.failures.pop(digest, None)

    def prefetch(self, digest: str) -> None:
        self.near.add(digest)

    def pin(self, digest: str, pinned: bool) -> bool:
        (self.pins.add if pinned else self.pins.discard)(digest)
        return True

    def is_located(self, digest: str) -> bool:
        return digest in self.located

    def lacks_room(self, digest: str) -> bool:
        return digest in self.located

    def is_barred(self, tenant: str) -> bool:
        return tenant in self.barred

    def resident_digests(self) -> Iterator[str]:
        return iter(sorted(self.resident))

    def tenant_bytes(self, tenant: str) -> int:
        return 0

    def header(self, digest: str) -> ImageHeader:
        return ImageHeader(FINGERPRINT, "fp32", 0, (), invocation=self.invocations.get(digest, ()))

    def state(self, digest: str) -> str:
        return "device" if digest in self.resident else "fetching"

    def failure(self, digest: str) -> tuple[FailureCode, str] | None:
        return self.failures.get(digest)

    def poll(self) -> None:
        self.polls += 1

    def check_integrity(self) -> None:
        assert min(self.references.values(), default=0) >= 0


def make_image(
    store: ImageStore,
    scratch: Path,
    seed: int,
    base: str = FINGERPRINT,
    rank: int = 1,
    invocation: tuple[int, ...] = (),
) -> str:
    """Put an image of 64 bytes a rank, and some padding, into `store`; return its digest."""
    builder = ImageBuilder(base, "fp32", invocation=invocation)
    a = np.full((rank, 8), seed, np.float32).tobytes()
    builder.add(0, "o", 8, a, np.ones(rank, np.float32).tobytes(), [SliceData(rank, 8, a)])
    path = scratch / f"{seed}.safetensors"
    digest = builder.finish(path)
    store.put(path, digest)
    return digest
