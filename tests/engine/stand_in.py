"""A base without a model, for tests of the engine's loop; run as a program it is an engine process.

Its KV cache is real: the state of a token is a hash of the token, its image, its position and the
state of the token before, which is read back through the block table. So logits are right only
where scheduling, blocks and segments are.
"""

import argparse
import hashlib
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loraplex.engine.batch import Batch
from loraplex.engine.core import Engine
from loraplex.engine.images import BaseManifest, ImageBuilder, ImageHeader, ImageStore, SliceData
from loraplex.engine.outcome import Outcome, outcome_of
from loraplex.engine.protocol import Chunk, Event, Failed, FailureCode, Finished, Generate, Sampling
from loraplex.engine.residency import Residency
from loraplex.engine.settings import EngineSettings
from loraplex.engine.waker import Waker
from loraplex.engine.worker import Worker

EOS = 0
MANIFEST = BaseManifest(
    name="hash",
    path="",
    fingerprint="f" * 64,
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

    def __init__(self, num_blocks: int = 64, block_size: int = 4) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.image_budget_bytes = 1 << 20
        self.images: set[str] = set()
        self.batches: list[Batch] = []
        self.broken: Exception | None = None
        self.poison: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.step_s = 0.0
        self._kv = np.zeros((num_blocks, block_size), np.uint64)

    def add_image(self, digest: str, header: ImageHeader, block: bytearray) -> None:
        self.images.add(digest)

    def remove_image(self, digest: str) -> None:
        self.images.remove(digest)

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
        return int(table[position // self.block_size]), position % self.block_size

    def _logits(self, state: int, token: int) -> np.ndarray:
        if int(token) in self.poison:
            return np.full(MANIFEST.vocab_size, np.nan, np.float32)
        bits = np.random.Generator(np.random.Philox(key=state))
        return (bits.standard_normal(MANIFEST.vocab_size) * 3).astype(np.float32)


class StandInResidency:
    """`Residency` by hand: images arrive or fail when the test says so."""

    def __init__(self) -> None:
        self.references: Counter[str] = Counter()
        self.resident: set[str] = set()
        self.failures: dict[str, tuple[FailureCode, str]] = {}
        self.polls = 0
        self.resident_bytes, self.budget_bytes = 0, 1 << 20

    @property
    def resident_count(self) -> int:
        return len(self.resident)

    def acquire(self, digest: str) -> None:
        self.references[digest] += 1

    def release(self, digest: str) -> None:
        self.references[digest] -= 1
        if not self.references[digest]:
            self.failures.pop(digest, None)

    def state(self, digest: str) -> str:
        return "device" if digest in self.resident else "fetching"

    def failure(self, digest: str) -> tuple[FailureCode, str] | None:
        return self.failures.get(digest)

    def poll(self) -> None:
        self.polls += 1

    def check_integrity(self) -> None:
        assert min(self.references.values(), default=0) >= 0


def make_image(
    store: ImageStore, scratch: Path, seed: int, base: str = MANIFEST.fingerprint
) -> str:
    """Put a tiny image into `store`; return its digest."""
    builder = ImageBuilder(base, "fp32")
    a = np.full((1, 8), seed, np.float32).tobytes()
    builder.add(0, "o", 8, a, np.ones(1, np.float32).tobytes(), [SliceData(1, 8, a)])
    path = scratch / f"{seed}.safetensors"
    digest = builder.finish(path)
    store.put(path, digest)
    return digest


def request(name: str, *prompt: int, image: str | None = None, **sampling: object) -> Generate:
    """A request, greedy and up to 8 tokens unless told otherwise."""
    asked = Sampling(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return Generate(name, prompt or (1, 2, 3), asked, image)


class Rig:
    """An engine, its stand-ins, and what it said so far."""

    def __init__(self, *, num_blocks: int = 64, **settings: Any) -> None:
        self.executor = HashExecutor(num_blocks)
        self.residency = StandInResidency()
        knobs = EngineSettings(**{"max_num_seqs": 8, "max_num_batched_tokens": 24, **settings})
        self.engine = Engine(self.executor, self.residency, knobs, MANIFEST)
        self.events: list[Event] = []

    def arrive(self, *digests: str) -> None:
        self.residency.resident.update(digests)
        self.executor.images.update(digests)

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

    def tokens(self, name: str) -> list[int]:
        chunks = [e for e in self.events if isinstance(e, Chunk) and e.request_id == name]
        return [token for chunk in chunks for token in chunk.token_ids]

    def end(self, name: str) -> Finished | Failed:
        ends = [e for e in self.events if not isinstance(e, Chunk) and e.request_id == name]
        assert len(ends) == 1, f"{name} ended {len(ends)} times"
        assert self.events.index(ends[0]) == max(
            i for i, e in enumerate(self.events) if e.request_id == name
        )
        return ends[0]

    def holds_nothing(self) -> bool:
        self.engine.check_integrity()
        stats = self.engine.stats()
        return not (
            stats.running + stats.waiting + stats.loading + stats.kv_blocks_used
            or any(self.residency.references.values())
        )


class Served:
    """A worker in a thread, with the residency of production and the base without a model."""

    def __init__(self, endpoint: str, folder: Path, **options: Any) -> None:
        self.executor, self.waker = HashExecutor(), Waker()
        self.store = ImageStore(str(folder / "images"))
        self.residency = Residency(
            self.store, folder, MANIFEST.fingerprint, 1 << 20,
            self.executor.add_image, self.executor.remove_image, self.waker.set,
        )  # fmt: skip
        knobs = EngineSettings(max_num_seqs=4, max_num_batched_tokens=16, max_waiting=8)
        self.engine = Engine(self.executor, self.residency, knobs, MANIFEST)
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
    residency = Residency(
        ImageStore(images), cache, MANIFEST.fingerprint, executor.image_budget_bytes,
        executor.add_image, executor.remove_image, waker.set,
    )  # fmt: skip
    settings = EngineSettings(max_num_seqs=8, max_num_batched_tokens=32)
    worker = Worker(
        Engine(executor, residency, settings, MANIFEST), endpoint, waker, silence_s=silence_s
    )
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
