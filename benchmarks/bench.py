"""Tokens per second of the engine, through its process and its client: `make bench`.

Prefill is 8 prompts of 256 tokens at once; decode is 1, 8 or 32 sequences at once, each with one
token a step. Each is measured for the base alone, with one adapter and with eight (rank 16 on all
linears), as the median of three runs after one that warms up. Prints the machine, a table and, as
its last line, one JSON object. Knows the engine's protocol; refuses to know HTTP.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from adapters import make_images

from loraplex.engine.client.local import LocalEngine
from loraplex.engine.images import ImageStore
from loraplex.engine.protocol import Chunk, Failed, Finished, Generate, Ready, Sampling

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, PROMPT_TOKENS = 8, 256
DECODE_PROMPT, DECODE_TOKENS = 16, 48
ROWS, ADAPTERS = (1, 8, 32), (0, 1, 8)
START_S = 300.0
FIRST_TOKEN, LAST_TOKEN = 1_000, 30_000  # ids of ordinary words, in any base


@dataclass(frozen=True)
class Case:
    """What is measured: prefill or decode, over how many rows and distinct adapters."""

    phase: str
    rows: int
    adapters: int

    @property
    def label(self) -> str:
        """As a line of progress says it."""
        return f"{self.phase}: rows {self.rows}, adapters {self.adapters}"


CASES = [Case("prefill", PROMPTS, n) for n in ADAPTERS] + [
    Case("decode", rows, n) for rows in ROWS for n in ADAPTERS if n <= rows
]


class Requests:
    """Makes requests no two of which share a prompt, so that nothing can be cached."""

    def __init__(self, digests: Sequence[str]) -> None:
        self._digests, self._random, self._count = digests, random.Random(0), 0

    def make(self, case: Case) -> list[Generate]:
        """Return the requests of one run; row `i` runs under adapter `i` modulo their number."""
        prefill = case.phase == "prefill"
        length, tokens = (PROMPT_TOKENS, 1) if prefill else (DECODE_PROMPT, DECODE_TOKENS)
        return [self._one(i, case.adapters, length, tokens) for i in range(case.rows)]

    def _one(self, row: int, adapters: int, length: int, tokens: int) -> Generate:
        self._count += 1
        return Generate(
            request_id=f"bench-{self._count}",
            token_ids=tuple(self._random.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)),
            sampling=Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True),
            image=self._digests[row % adapters] if adapters else None,
        )


async def token_times(client: LocalEngine, request: Generate) -> list[float]:
    """Run a request; returns when each of its tokens came."""
    times: list[float] = []
    async for event in client.generate(request):
        if isinstance(event, Chunk):
            times += [time.perf_counter()] * len(event.token_ids)
        elif isinstance(event, Failed):
            raise SystemExit(f"a request failed: {event.message}")
        elif isinstance(event, Finished) and event.reason != "length":
            raise SystemExit(f"a request ended early: {event.reason}")
    return times


async def measure(client: LocalEngine, case: Case, requests: list[Generate]) -> float:
    """Run one case once; returns its tokens per second.

    Decode counts the tokens that came while every row was decoding: after the last row's first
    token and up to the first row's last one.
    """
    started = time.perf_counter()
    times = await asyncio.gather(*(token_times(client, request) for request in requests))
    if case.phase == "prefill":
        return PROMPTS * PROMPT_TOKENS / (max(row[-1] for row in times) - started)
    begin, end = max(row[0] for row in times), min(row[-1] for row in times)
    return sum(begin < moment <= end for row in times for moment in row) / (end - begin)


async def run_cases(client: LocalEngine, digests: list[str], repeat: int) -> dict[Case, float]:
    """Run every case; returns the medians."""
    requests, medians = Requests(digests), {}
    for case in CASES:
        await measure(client, case, requests.make(case))
        runs = [await measure(client, case, requests.make(case)) for _ in range(repeat)]
        medians[case] = statistics.median(runs)
        print(f"{case.label:34} {medians[case]:9.1f} tokens/s", flush=True)
    return medians


@contextmanager
def engine_process(
    base_file: Path, store: Path, folder: Path, flags: Sequence[str] = ()
) -> Iterator[str]:
    """Run an engine, with further `flags`, for as long as the block runs; gives its endpoint."""
    endpoint = f"ipc://{folder / 'engine.sock'}"
    command = [sys.executable, "-m", "loraplex.engine", "--base", str(base_file)]
    command += ["--endpoint", endpoint, "--images", str(store), "--cache", str(folder / "cache")]
    command += flags
    process = subprocess.Popen(command, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    try:
        yield endpoint
    finally:
        process.terminate()
        process.wait()


@asynccontextmanager
async def connected(endpoint: str) -> AsyncIterator[LocalEngine]:
    """Give a client that is ready."""
    client = LocalEngine(endpoint)
    await client.start()
    try:
        await client.wait_ready(START_S)
        yield client
    finally:
        await client.close()


def prepare_demo_base() -> Path:
    """Return the demo base's `base.json`, fetched and converted once under `build/`."""
    build = ROOT / "build"
    fetch = [sys.executable, str(ROOT / "examples/fetch_demo_base.py"), str(build / "gguf")]
    model = subprocess.run(fetch, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
    out = build / "demo-base"
    prepare = [sys.executable, "-m", "loraplex.engine.prepare", model, "--out", str(out)]
    subprocess.run(prepare, check=True)
    return out / "base.json"


def host(ready: Ready) -> dict[str, str | int | None]:
    """Return what a number is worth nothing without."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "loraplex": metadata.version("loraplex"),
        "executor": ready.executor,
        "device": ready.device,
        "dtype": ready.dtype,
    }


async def bench(base_file: Path, repeat: int) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as name:
        folder = Path(name)
        print(f"compiling {max(ADAPTERS)} adapters", flush=True)
        store = folder / "images"
        digests = make_images(base_file, ImageStore(str(store)), max(ADAPTERS), folder)
        with engine_process(base_file, store, folder) as endpoint:
            async with connected(endpoint) as client:
                facts = host(await client.wait_ready(START_S))
                print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", flush=True)
                medians = await run_cases(client, digests, repeat)
    results = [{**asdict(case), "tokens_per_s": round(value, 1)} for case, value in medians.items()]
    print_table(medians)
    print(json.dumps({"host": facts, "repeat": repeat, "results": results}))


def print_table(medians: dict[Case, float]) -> None:
    """Print tokens per second: a line for each number of rows, a column for each of adapters."""
    print(f"\n{'tokens/s':>16} {'base':>10} {'1 adapter':>10} {'8 adapters':>10}")
    for phase, rows in dict.fromkeys((case.phase, case.rows) for case in medians):
        cells = [medians.get(Case(phase, rows, n)) for n in ADAPTERS]
        shown = " ".join(f"{'–' if cell is None else f'{cell:.1f}':>10}" for cell in cells)
        print(f"{f'{phase}, {rows}':>16} {shown}")
    print()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the engine's tokens per second.")
    parser.add_argument("--base", type=Path, help="a base.json; by default the demo base's")
    parser.add_argument("--repeat", type=int, default=3, help="runs of which the median counts")
    options = parser.parse_args()
    base_file = options.base or prepare_demo_base()
    asyncio.run(bench(base_file.absolute(), options.repeat))


if __name__ == "__main__":
    main()
