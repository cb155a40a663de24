"""Loraplex against itself: what adapters, ranks and an int8 base cost, all measured in one run.

Two engines run, one with a bf16 base and one with an int8 one; whoever waits sleeps. Every line of
`SHARES` is a share of two rates, or a time over what its bytes take at the speed at which one row
reads the base.
"""

import argparse
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from adapters import make_images
from bench import Case, prepare_demo_base
from ours import Ours, flags, running
from peers.wire import tokens_per_s
from placement import read_gb_per_s
from workload import Prompts

from loraplex.engine.images import BaseManifest, ImageStore


@dataclass(frozen=True)
class Measure:
    """A decode rate: of which engine, over how many rows, under how many adapters of which kind."""

    rows: int
    adapters: int = 0
    rank: int = 16
    images: str = "bf16"
    base: str = "bf16"

    @property
    def name(self) -> str:
        """Such as `decode_8_lora8_r16_int8`, or `decode_1_base_int8` for an int8 base."""
        if self.adapters:
            return f"decode_{self.rows}_lora{self.adapters}_r{self.rank}_{self.images}"
        return f"decode_{self.rows}_base_{self.base}"


BASE = {rows: Measure(rows) for rows in (1, 8, 32)}
INT8_BASE = Measure(1, base="int8")
SHARES = {  # of base decode speed that is left, and how much is wanted
    Measure(8, 1): 0.92,
    Measure(8, 8): 0.72,
    Measure(8, 8, images="int8"): 0.82,
    Measure(32, 8): 0.85,
    Measure(32, 8, images="int8"): 0.85,
}
BYTES = {  # two measures of which the second reads more; it may cost what the bytes cost
    "rank_8_to_64": (Measure(8, 8, rank=8), Measure(8, 8, rank=64)),
    "distinct_1_to_32": (Measure(32, 1), Measure(32, 32)),
}
INT8_WANTED = 1.8
_MENTIONED = [*BASE.values(), INT8_BASE, *SHARES, *(m for pair in BYTES.values() for m in pair)]
MEASURES = list(dict.fromkeys(_MENTIONED))
Images = dict[tuple[int, str], list[str]]  # digests by rank and dtype


async def compare_with_self(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure everything in turn; returns the result, with shares in `ratios`."""
    base_file, store = prepare_demo_base().absolute(), folder / "images"
    images = make_all(base_file, store, folder)
    async with (
        running(base_file, store, flags(options, "none")) as plain,
        running(base_file, store, flags(options, "int8")) as int8,
    ):
        facts = plain.facts | {"read_gb_per_s": read_gb_per_s(len(os.sched_getaffinity(0)))}
        print(*(f"{name}: {value}" for name, value in facts.items()), sep="\n", flush=True)
        rates = await rounds({"bf16": plain, "int8": int8}, images, options)
    found = ratios(rates, image_bytes(store, images), base_bytes(base_file))
    print_ratios(found)
    ours = {"facts": facts} | {m.name: round(rate, 1) for m, rate in rates.items()}
    return {"peer": "self", "ours": ours, "theirs": {}, "ratios": found}


def make_all(base_file: Path, store: Path, folder: Path) -> Images:
    """Compile the adapters of every measure; those of one rank are the same in every dtype."""
    counts: dict[tuple[int, str], int] = {}
    for measure in (m for m in MEASURES if m.adapters):
        kind = measure.rank, measure.images
        counts[kind] = max(counts.get(kind, 0), measure.adapters)
    images = {}
    for (rank, dtype), count in counts.items():
        place = folder / f"adapters-{rank}-{dtype}"
        place.mkdir()
        made = make_images(base_file, ImageStore(str(store)), count, place, rank=rank, dtype=dtype)
        images[rank, dtype] = made
    return images


async def rounds(
    engines: dict[str, Ours], images: Images, options: argparse.Namespace
) -> dict[Measure, float]:
    """Tokens per second of every measure, the median over rounds that each run all of them."""
    prompts = Prompts(options.quick)
    runs: dict[Measure, list[float]] = {measure: [] for measure in MEASURES}
    for _ in range(options.repeat + 1):
        for measure, rates in runs.items():
            work = prompts.work(Case("decode", measure.rows, measure.adapters))
            digests = images.get((measure.rank, measure.images), [])
            rates.append(tokens_per_s(work, await engines[measure.base].run(work, digests)))
    medians = {measure: statistics.median(rates[1:]) for measure, rates in runs.items()}
    for measure, rate in medians.items():
        print(f"{measure.name:28} {rate:9.1f} tokens/s", flush=True)
    return medians


def image_bytes(store: Path, images: Images) -> dict[tuple[int, str], int]:
    """Size of one image of each kind."""
    sizes = {path.stem: path.stat().st_size for path in store.rglob("*.safetensors")}
    return {kind: sizes[digests[0]] for kind, digests in images.items()}


def base_bytes(base_file: Path) -> int:
    """Size of the base's weights."""
    path = msgspec.json.decode(base_file.read_bytes(), type=BaseManifest).path
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))


def ratios(
    rates: dict[Measure, float], sizes: dict[tuple[int, str], int], base_size: int
) -> dict[str, float]:
    """Shares of base speed, the int8 base over the bf16 one, and times over those of the bytes."""
    found = {m.name: rates[m] / rates[BASE[m.rows]] for m in SHARES}
    found["int8_base_1"] = rates[INT8_BASE] / rates[BASE[1]]
    s_per_byte = 1 / rates[BASE[1]] / base_size
    for name, (few, many) in BYTES.items():
        seconds = many.rows / rates[many] - few.rows / rates[few]
        more = _read(many, sizes) - _read(few, sizes)
        found[f"{name}_over_bytes"] = seconds / (more * s_per_byte)
    return {name: round(value, 3) for name, value in found.items()}


def _read(measure: Measure, sizes: dict[tuple[int, str], int]) -> int:
    """Bytes of images that a step of a measure reads."""
    return measure.adapters * sizes[measure.rank, measure.images]


def print_ratios(found: dict[str, float]) -> None:
    """Print each ratio beside what is wanted of it."""
    least = {m.name: wanted for m, wanted in SHARES.items()} | {"int8_base_1": INT8_WANTED}
    print()
    for name, value in found.items():
        wanted = f"at least {least[name]}" if name in least else "at most 1"
        print(f"{name:28} {value:9.3f}   wanted: {wanted}")
