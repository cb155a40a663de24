"""A base without a model, for tests of the engine's loop; run as a program it is an engine process.

Its KV cache is real: the state of a token is a hash of the token, its image, its position and the
state of the token before, which is read back through the block table. So logits are right only
where scheduling, blocks and segments are.
"""

import argparse
import dataclasses
import functools
import hashlib
import runpy
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loraplex.engine.batch import Batch
from loraplex.engine.core import Engine
from loraplex.engine.draw import Draw, Drawer
from loraplex.engine.image_fetcher import ImageFetcher
from loraplex.engine.images import BaseManifest, ImageHeader, ImageStore
from loraplex.engine.outcome import Outcome, outcome_of
from loraplex.engine.protocol import (
    Chunk,
    Event,
    Failed,
    Finished,
    Generate,
    Sampling,
)
from loraplex.engine.residency import Residency
from loraplex.engine.settings import EngineSettings
from loraplex.engine.waker import Waker
from loraplex.engine.worker import Worker

KIT = runpy.run_path(str(Path(__file__).with_name("stand_in_guides.py")))
StandInGuides, EOS = KIT["StandInGuides"], KIT["EOS"]
IMAGES = runpy.run_path(str(Path(__file__).with_name("stand_in_images.py")))
StandInResidency, make_image = IMAGES["StandInResidency"], IMAGES["make_image"]
MANIFEST = BaseManifest(
    name="hash",
    path="",
    fingerprint=IMAGES["FINGERPRINT"],
    num_layers=1,
    hidden_size=8,
    vocab_size=64,
    max_position_embeddings=128,
    eos_token_ids=(EOS,),
    modules={"o_proj": (8, 8)},
)


class HashExecutor:
    """`Executor` whose logits are a function of a sequence's own tokens, positions and images.

    A step waits for `gate`, so that a test can hold it, and takes `step_s` seconds. `broken` is
    raised by the next steps; logits after a token in `poison` are NaN.
    """

    name, device, dtype = "hash", "cpu", "float32"
    block_bytes, weight_bytes = 1 << 10, 3 << 20

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        swap_slots: int = 0,
        memory_blocks: int | None = None,
    ) -> None:
        """Images have a quarter of the memory beside the blocks, unless it is said how much."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.memory_bytes = (memory_blocks or -(-num_blocks * 4 // 3)) * self.block_bytes
        self.swap_slots, self.blocks = swap_slots, num_blocks
        self.images: dict[str, int] = {}  # and what each takes
        self.batches: list[Batch] = []
        self.broken: Exception | None = None
        self.poison: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.step_s = 0.0
        self._kv = np.zeros((num_blocks, block_size), np.uint64)
        self._host = np.zeros((swap_slots, block_size), np.uint64)

    def set_blocks(self, count: int) -> None:
        room = self.memory_bytes - count * self.block_bytes
        assert sum(self.images.values()) <= room, "images lie where blocks are to be"
        self.blocks = count
        self._kv[count:] = 0xDEAD

    def prepare_image(self, header: ImageHeader, block: bytearray) -> int:
        return header.block_bytes

    def image_bytes(self, header: ImageHeader) -> int:
        return header.block_bytes

    def add_image(self, digest: str, prepared: int) -> None:
        self.images[digest] = prepared
        self.set_blocks(self.blocks)

    def remove_image(self, digest: str) -> None:
        del self.images[digest]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._kv[target] = self._kv[source]

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        for block, slot in pairs:
            self._host[slot] = self._kv[block]

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        for slot, block in pairs:
            self._kv[block] = self._host[slot]
            self._host[slot] = 0xDEAD

    def execute(self, batch: Batch) -> Outcome:
        self.gate.wait(30)
        time.sleep(self.step_s)
        if self.broken is not None:
            raise self.broken
        self.batches.append(batch)
        images = self._images_of_rows(batch)
        states = {}
        for span, table in zip(batch.spans, batch.block_tables, strict=True):
            for row in range(span.start, span.end):
                states[row] = self._run(batch, row, table, images[row])
        rows = [self._logits(states[row], batch.token_ids[row]) for row in batch.wanted.tolist()]
        logits = torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, MANIFEST.vocab_size)
        return outcome_of(logits)

    def _images_of_rows(self, batch: Batch) -> list[str]:
        images = [""] * len(batch.token_ids)
        for segment in batch.segments:
            assert segment.image in self.images, "the image is not resident"
            images[segment.start : segment.end] = [segment.image] * (segment.end - segment.start)
        return images

    def _run(self, batch: Batch, row: int, table: np.ndarray, image: str) -> int:
        position = int(batch.positions[row])
        before = 0 if position == 0 else self._kv[self._slot(table, position - 1)]
        text = f"{before} {position} {batch.token_ids[row]} {image}"
        state = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
        self._kv[self._slot(table, position)] = state
        return state

    def _slot(self, table: np.ndarray, position: int) -> tuple[int, int]:
        assert table[position // self.block_size] < self.blocks
        return int(table[position // self.block_size]), position % self.block_size

    def _logits(self, state: int, token: int) -> np.ndarray:
        if int(token) in self.poison:
            return np.full(MANIFEST.vocab_size, np.nan, np.float32)
        bits = np.random.Generator(np.random.Philox(key=state))
        return (bits.standard_normal(MANIFEST.vocab_size) * 3).astype(np.float32)


class LateExecutor(HashExecutor):
    """Does what it is told in order, but as late as it can: when tokens are waited for.

    So it finds out who counts on what has not happened yet. `flying` steps are launched and not
    read.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waiting: deque[Callable[[], Any]] = deque()
        self._chosen: list[int | None] = []
        self.flying = self.most_flying = self.launched = self.fed = 0

    def proceed(self) -> Any:
        """Do the first thing that was told and not done."""
        return self._waiting.popleft()()

    def set_blocks(self, count: int) -> None:
        self._later(super().set_blocks, count)

    def add_image(self, digest: str, prepared: int) -> None:
        self._later(self.images.__setitem__, digest, prepared)

    def remove_image(self, digest: str) -> None:
        self._later(super().remove_image, digest)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._later(super().copy_blocks, list(pairs))

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._later(super().swap_out, list(pairs))

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._later(super().swap_in, list(pairs))

    def execute(self, batch: Batch) -> Outcome:
        assert min(batch.token_ids, default=0) >= 0 and not self.flying
        while self._waiting:
            self.proceed()
        return super().execute(batch)

    def launch(self, batch: Batch, draws: Sequence[Draw | None]) -> "Landing":
        assert len(draws) == len(batch.wanted)
        self.flying, self.launched = self.flying + 1, self.launched + 1
        self.most_flying = max(self.most_flying, self.flying)
        landing = Landing(self)
        self._later(self._run_late, batch, draws, landing)
        return landing

    def wait(self) -> None:
        while self._waiting:
            self.proceed()

    def _later(self, do: Callable[..., Any], *arguments: Any) -> None:
        self._waiting.append(functools.partial(do, *arguments))

    def _run_late(self, batch: Batch, draws: Sequence[Draw | None], landing: "Landing") -> None:
        ids = batch.token_ids.tolist()
        self.fed += sum(token < 0 for token in ids)
        ids = [token if token >= 0 else self._chosen[-1 - token] or 0 for token in ids]
        try:
            batch = dataclasses.replace(batch, token_ids=np.array(ids, np.int32))
            landing.tokens = self._choose(super().execute(batch), draws)
        except RuntimeError as error:
            landing.error = error
        self._chosen = landing.tokens or [0] * len(draws)

    def _choose(self, outcome: Outcome, draws: Sequence[Draw | None]) -> list[int | None]:
        chosen: list[int | None] = []
        for row, draw in enumerate(draws):
            token, logits = int(outcome.likeliest[row]), outcome.logits[row].numpy()
            if draw is not None and np.isfinite(logits).all():
                token = Drawer(len(logits)).draw(logits, float(logits.max()), *draw)
            chosen.append(token if np.isfinite(logits).all() else None)
        return chosen


@dataclasses.dataclass
class Landing:
    """`Pending` of a `LateExecutor`."""

    executor: LateExecutor
    tokens: list[int | None] | None = None
    error: RuntimeError | None = None

    def result(self) -> list[int | None]:
        self.executor.flying -= 1
        while self.tokens is None and self.error is None:
            self.executor.proceed()
        if self.error is not None:
            raise self.error
        assert self.tokens is not None
        return self.tokens


def make_residency(
    executor: HashExecutor, store: ImageStore, cache: Path, waker: Waker
) -> Residency:
    fetcher = ImageFetcher(
        store,
        cache,
        MANIFEST.fingerprint,
        limit_bytes=executor.memory_bytes,
        prepare=executor.prepare_image,
        measure=executor.image_bytes,
    )
    return Residency(
        fetcher,
        budget_bytes=executor.memory_bytes // 4,
        load=executor.add_image,
        unload=executor.remove_image,
        wake=waker.set,
    )


def request(name: str, *prompt: int, image: str | None = None, **options: Any) -> Generate:
    """A request, greedy and up to 8 tokens unless told otherwise."""
    own = {key: options.pop(key) for key in list(options) if key in Generate.__struct_fields__}
    asked = Sampling(**{"max_tokens": 8, "temperature": 0.0, **options})
    return Generate(name, prompt or (1, 2, 3), asked, image, **own)


class Rig:
    """An engine, its stand-ins, and what it said so far."""

    def __init__(
        self, *, num_blocks: int = 64, swap_slots: int = 0, late: bool = False, **settings: Any
    ) -> None:
        kind = LateExecutor if late else HashExecutor
        self.executor = kind(num_blocks, swap_slots=swap_slots)
        self.residency, self.guides = StandInResidency(), StandInGuides()
        knobs = EngineSettings(**{"max_num_seqs": 8, "max_num_batched_tokens": 24, **settings})
        self.engine = Engine(self.executor, self.residency, self.guides, knobs, MANIFEST)
        self.events: list[Event] = []

    def arrive(self, *digests: str) -> None:
        self.residency.resident.update(digests)
        self.executor.images.update(dict.fromkeys(digests, 0))

    def add(self, *requests: Generate) -> None:
        for request in requests:
            self.engine.add(request)

    def step(self) -> list[Event]:
        events = self.engine.step()
        self.engine.check_integrity()
        self.events += events
        return events

    def drain(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                return
            self.step()
        raise TimeoutError("the engine does not come to an end")

    def chunks(self, name: str, index: int = 0) -> list[Chunk]:
        chunks = [e for e in self.events if isinstance(e, Chunk) and e.request_id == name]
        return [chunk for chunk in chunks if chunk.index == index]

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [token for chunk in self.chunks(name, index) for token in chunk.token_ids]

    def end(self, name: str) -> Finished | Failed:
        ends = [e for e in self.events if isinstance(e, Finished | Failed) and e.request_id == name]
        assert len(ends) == 1, f"{name} ended {len(ends)} times"
        assert self.events.index(ends[0]) == max(
            i for i, e in enumerate(self.events) if e.request_id == name
        )
        return ends[0]

    def holds_nothing(self) -> bool:
        self.engine.check_integrity()
        stats = self.engine.stats()
        return not (
            stats.running
            + stats.waiting
            + stats.loading
            + stats.kv_blocks_used
            + stats.swap_blocks_used
            or any(self.residency.references.values())
        )


class Served:
    """A worker in a thread, with the residency of production and the base without a model."""

    def __init__(self, endpoint: str, folder: Path, **options: Any) -> None:
        self.executor, self.waker = HashExecutor(), Waker()
        self.store = ImageStore(str(folder / "images"))
        self.residency = make_residency(self.executor, self.store, folder, self.waker)
        knobs = EngineSettings(max_num_seqs=4, max_num_batched_tokens=16, max_waiting=8)
        self.engine = Engine(self.executor, self.residency, StandInGuides(), knobs, MANIFEST)
        self.worker = Worker(self.engine, endpoint, self.waker, **options)
        self.thread = threading.Thread(target=self.worker.run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.executor.gate.set()
        self.worker.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.residency.close()
        self.waker.close()


def serve(endpoint: str, images: str, cache: Path, silence_s: float, step_s: float) -> None:
    """Be an engine process until SIGTERM."""
    waker, executor = Waker(), HashExecutor()
    executor.step_s = step_s
    residency = make_residency(executor, ImageStore(images), cache, waker)
    settings = EngineSettings(max_num_seqs=8, max_num_batched_tokens=32)
    engine = Engine(executor, residency, StandInGuides(), settings, MANIFEST)
    worker = Worker(engine, endpoint, waker, silence_s=silence_s)
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    print("ready", flush=True)
    worker.run()
    residency.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--images", required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--silence-s", type=float, default=10.0)
    parser.add_argument("--step-s", type=float, default=0.0)
    serve(**vars(parser.parse_args()))
    sys.exit(0)
