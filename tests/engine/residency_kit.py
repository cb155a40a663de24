"""What residency's tests share: a residency with its store, threads and device in their hands.

Test folders are not on the import path: use `runpy.run_path`.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from loraplex.engine.image_builder import ImageBuilder, SliceData
from loraplex.engine.image_fetcher import ImageFetcher
from loraplex.engine.image_places import State
from loraplex.engine.images import ImageHeader, ImageStore
from loraplex.engine.residency import Residency

BASE, OTHER_BASE = "b" * 64, "c" * 64
KIB = 1024


class ManualPool(Executor):
    """Runs a job when told to, on the caller's thread."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, lambda: function(*args, **kwargs)))
        return future

    def begin(self) -> Callable[[], None] | None:
        """Take the oldest job that was not cancelled; the returned call ends it."""
        while self.jobs:
            future, job = self.jobs.popleft()
            if future.set_running_or_notify_cancel():
                return lambda: future.set_result(job())
        return None

    def run(self) -> bool:
        end = self.begin()
        if end:
            end()
        return end is not None


class Device:
    """Stands in for the executor: holds what was loaded, and checks what it is told."""

    def __init__(self) -> None:
        self.images: dict[str, bytes] = {}
        self.log: list[str] = []
        self.faulty: set[str] = set()

    def load(self, digest: str, prepared: bytes) -> None:
        assert digest not in self.images
        if digest in self.faulty:
            raise RuntimeError("no memory on the device")
        self.images[digest] = prepared
        self.log.append(f"+{digest[:4]}")

    def unload(self, digest: str) -> None:
        del self.images[digest]
        self.log.append(f"-{digest[:4]}")

    @property
    def bytes(self) -> int:
        return sum(len(block) for block in self.images.values())


class House:
    """A residency with a budget, a store on disk, and everything else in the test's hands."""

    def __init__(
        self, folder: Path, budget: int, growth: int = 1, limit: int | None = None, **options: Any
    ) -> None:
        """An image takes `growth` times its block on the device; `options` are Residency's."""
        self.folder, self.growth = folder, growth
        self.store = ImageStore(str(folder / "store"))
        self.pool, self.device, self.wakes, self.now = ManualPool(), Device(), 0, 0.0
        self.options: dict[str, Any] = {
            "budget_bytes": budget,
            "load": self.device.load,
            "unload": self.device.unload,
            "wake": self.wake,
            "clock": lambda: self.now,
            "pool": self.pool,
        } | options
        self.limit = limit or budget
        self.residency = Residency(self.fetcher(self.store), **self.options)

    def fetcher(self, store: ImageStore) -> ImageFetcher:
        return ImageFetcher(
            store,
            self.folder / "cache",
            BASE,
            limit_bytes=self.limit,
            prepare=self.prepare,
            measure=lambda header: header.block_bytes * self.growth,
        )

    @staticmethod
    def prepare(header: ImageHeader, block: Any) -> bytes:
        assert header.base == BASE
        assert len(block) == header.block_bytes
        return bytes(block)

    def wake(self) -> None:
        self.wakes += 1

    def image(self, kib: int, base: str = BASE) -> str:
        """Put an image with a block of `kib` KiB into the store."""
        path = self.folder / "image"
        builder = ImageBuilder(base, "bf16")
        a = kib * KIB // 2  # bytes of A, as many of B
        builder.add(
            0, "o", a // 2, bytes(a), bytes(4), [SliceData(1, (a - 128) // 2, bytes(a - 128))]
        )
        digest = builder.finish(path)
        self.store.put(path, digest)
        return digest

    def path(self, digest: str) -> Path:
        return self.store.fetch(digest, self.folder)

    def settle(self) -> None:
        """Run jobs and poll until nothing more happens."""
        wakes = -1
        while self.pool.run() or self.wakes > wakes:
            wakes = self.wakes
            self.residency.poll()
        self.residency.check_integrity()

    def acquire(self, *digests: str, tenant: str = "", limit: int | None = None) -> None:
        for digest in digests:
            self.residency.acquire(digest, tenant, limit=limit)
        self.residency.poll()
        self.settle()

    def release(self, *digests: str, tenant: str = "") -> None:
        for digest in digests:
            self.residency.release(digest, tenant)
        self.residency.poll()
        self.settle()

    def states(self, *digests: str) -> list[State]:
        return [self.residency.state(digest) for digest in digests]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
