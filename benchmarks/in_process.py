"""An engine in this process, and images to serve with it: for `engine.py`.

Knows how an engine is put together from its parts, so that what images and KV blocks may take is
exact. Refuses to know what is measured.
"""

import functools
import hashlib
import os
import select
import time
from collections import defaultdict
from pathlib import Path
from random import Random

import msgspec
import numpy as np
from adapters import compile_image, write_peft

from loraplex.engine.core import Engine
from loraplex.engine.guidance import Guides
from loraplex.engine.image_fetcher import ImageFetcher
from loraplex.engine.images import BaseManifest, ImageHeader, ImageStore, read_header
from loraplex.engine.model.config import read_model_config
from loraplex.engine.model.weights import Checkpoint
from loraplex.engine.native.executor import NativeExecutor, Team
from loraplex.engine.native.weights import PackedBase, are_bf16, choose_precision, pack_base
from loraplex.engine.protocol import Chunk, Failed, Finished, Generate, Sampling
from loraplex.engine.residency import Residency
from loraplex.engine.settings import EngineSettings
from loraplex.engine.waker import Waker
from loraplex.kernels.cpu.library import load_library

THREADS = len(os.sched_getaffinity(0))
FIRST_TOKEN, LAST_TOKEN = 1_000, 30_000  # ids of ordinary words, in any base
MODEL_LEN = 4096
PATIENCE_S = 0.05
SIGN = 15  # bit of a bf16


class Images:
    """Random adapters of one base, in a store of their own under `folder`."""

    def __init__(self, base_file: Path, folder: Path) -> None:
        self.base = msgspec.json.decode(base_file.read_bytes(), type=BaseManifest)
        self.store = ImageStore(str(folder / "images"))
        self._base_file, self._folder, self._count = base_file, folder, 0
        self._adapters: defaultdict[int, list[str]] = defaultdict(list)  # by rank

    def adapters(self, count: int, rank: int = 16) -> list[str]:
        """The first `count` adapters of a rank on all linears, made where they are not yet."""
        made = self._adapters[rank]
        if not made:
            made.append(self.compile(rank))
        made += self.vary(made[0], max(0, count - len(made)))
        return made[:count]

    def compile(self, rank: int = 16, **config: object) -> str:
        """Compile a random adapter, on all linears unless PEFT's `config` says less."""
        name = self._name()
        write_peft(self.base, self._folder / name, self._count, rank, **config)
        digest = compile_image(self._folder / name, self._base_file, self._file(name))
        self.store.put(self._file(name), digest)
        return digest

    def vary(self, digest: str, count: int) -> list[str]:
        """So many other images of the same sizes: the signs of their weights are drawn anew."""
        path = self.store.fetch(digest, self._folder)
        head, block = path.read_bytes()[: self._start(path)], self._block(path)
        return [self._signed(head, block) for _ in range(count)]

    def memory(self, digest: str) -> int:
        """Bytes of memory that a resident image may take: its block and a little."""
        block = self.header(digest).block_bytes
        return block + block // 64

    def header(self, digest: str) -> ImageHeader:
        """What an image says of itself."""
        with self.store.fetch(digest, self._folder).open("rb") as file:
            return read_header(file)

    def _signed(self, head: bytes, block: np.ndarray) -> str:
        name = self._name()
        signs = np.random.default_rng(self._count).integers(0, 2, len(block), np.uint16)
        content = head + (block ^ (signs << SIGN)).tobytes()
        self._file(name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        self.store.put(self._file(name), digest)
        self._file(name).unlink()
        return digest

    def _block(self, path: Path) -> np.ndarray:
        return np.fromfile(path, np.uint16, offset=self._start(path))

    def _start(self, path: Path) -> int:
        with path.open("rb") as file:
            read_header(file)
            return file.tell()

    def _name(self) -> str:
        self._count += 1
        return f"image-{self._count}"

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"


class Served:
    """An engine on the native executor, and when each token of its requests came.

    KV blocks for `kv_tokens` tokens and `image_bytes` for images share memory, and the boundary
    stays where it is.
    """

    def __init__(
        self, images: Images, *, kv_tokens: int, image_bytes: int = 0, max_num_seqs: int = 16
    ) -> None:
        base, library, manifest = packed(images.base.path), load_library(), images.base
        blocks = kv_tokens // EngineSettings.block_size
        kv_bytes = blocks * library.kv_block_bytes(base.struct)
        self.settings = EngineSettings(
            max_num_seqs=max_num_seqs, max_model_len=MODEL_LEN, kv_cache_bytes=kv_bytes
        )
        self.executor = NativeExecutor(
            base,
            library,
            block_size=self.settings.block_size,
            num_blocks=blocks,
            memory_bytes=kv_bytes + image_bytes,
            swap_slots=0,
            max_rows=self.settings.max_num_batched_tokens,
            max_wanted=self.settings.max_wanted,
            team=Team(THREADS),
        )
        self._waker, fetcher = Waker(), _fetcher(images, self.executor, image_bytes)
        self.residency = Residency(
            fetcher,
            budget_bytes=image_bytes,
            load=self.executor.add_image,
            unload=self.executor.remove_image,
            wake=self._waker.set,
        )
        tokenizer = Path(manifest.path) / "tokenizer.json"
        self._guides = Guides(tokenizer, manifest.vocab_size, manifest.eos_token_ids)
        self.engine = Engine(
            self.executor, self.residency, self._guides, self.settings, manifest, self._waker.set
        )
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, Finished] = {}
        self._count, self._random = 0, Random(0)

    def prompt(self, length: int) -> tuple[int, ...]:
        """Random tokens: no two prompts begin alike."""
        return tuple(self._random.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(length))

    def send(
        self, prompt: tuple[int, ...], tokens: int, image: str | None = None, tenant: str = ""
    ) -> str:
        """Ask for so many tokens; returns the request's id."""
        self._count += 1
        name = f"request-{self._count}"
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.engine.add(Generate(name, prompt, sampling, image, tenant, scope=tenant))
        return name

    def step(self) -> list[str]:
        """One step of the engine, or a wait; returns the requests that ended."""
        if not self.engine.has_work:
            select.select([self._waker], [], [], PATIENCE_S)
            self._waker.clear()
        events, now = self.engine.step(), time.perf_counter()
        ended = []
        for event in events:
            if isinstance(event, Chunk):
                self.times[event.request_id] += [now] * len(event.token_ids)
                self.tokens[event.request_id] += event.token_ids
            elif isinstance(event, Failed):
                raise SystemExit(f"a request failed: {event.message}")
            elif isinstance(event, Finished):
                self.finished[event.request_id] = event
                ended.append(event.request_id)
        return ended

    def run(self, *names: str) -> None:
        """Step until these requests have ended."""
        while not self.finished.keys() >= {*names}:
            self.step()

    def first_token_s(self, prompt: tuple[int, ...], image: str | None = None) -> float:
        """Seconds from the door to the first token of a request that is alone."""
        began = time.perf_counter()
        name = self.send(prompt, 1, image)
        self.run(name)
        return self.times[name][0] - began

    @property
    def last(self) -> Finished:
        """How the request that ended last ended."""
        return list(self.finished.values())[-1]

    def close(self) -> None:
        """End threads and free memory."""
        self.residency.close()
        self._guides.close()
        self.executor.close()
        self._waker.close()


@functools.cache
def packed(path: str) -> PackedBase:
    """The base, packed once for all engines of this process, of which one lives at a time."""
    directory, library = Path(path), load_library()
    precision = choose_precision(
        "auto", "none", stored_bf16=are_bf16(directory), activations=library.activations
    )
    weights, config = Checkpoint(directory), read_model_config(directory)
    base = pack_base(weights, config, precision, library, MODEL_LEN, THREADS)
    base.struct.block_size = EngineSettings.block_size
    return base


def _fetcher(images: Images, executor: NativeExecutor, limit_bytes: int) -> ImageFetcher:
    return ImageFetcher(
        images.store,
        Path("unused"),  # the store is local: nothing is copied
        images.base.fingerprint,
        limit_bytes=limit_bytes,
        prepare=executor.prepare_image,
        measure=executor.image_bytes,
    )
