"""What a step costs besides the model: µs a step of the engine's loop and of its client, by part.

    python benchmarks/overhead.py [--step-ms 5] [--steps 150]

A base without a model stands for the real one: its step keeps a core busy for a fixed time, since
one that slept is slow at first, and gives the same random logits. All else is real: the engine's
loop in a process of its own, the native draws on two threads, the socket, the client here. Rows
decode together, greedy or drawn (temperature 0.8, top-p 0.95; temperature 1).

Columns are wall time of the loop, without the model's, medians over the steps; `client` is the
processor time of this process, a mean. As last line it prints one JSON object.
"""

import argparse
import asyncio
import functools
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench import connected, token_times

from loraplex.engine import core, reader, stepper
from loraplex.engine.assembly import engine_on
from loraplex.engine.batch import Batch
from loraplex.engine.client.local import LocalEngine
from loraplex.engine.images import BaseManifest, ImageStore
from loraplex.engine.intake import Intake
from loraplex.engine.native.draws import draw_rows
from loraplex.engine.outcome import Outcome, outcome_of
from loraplex.engine.protocol import Generate, Sampling
from loraplex.engine.scheduler import Scheduler
from loraplex.engine.settings import EngineSettings
from loraplex.engine.waker import Waker
from loraplex.engine.worker import Worker
from loraplex.kernels.cpu.library import Model, load_library

VOCABULARY, MAX_ROWS, PROMPT = 49_152, 64, 16
THREADS = 2
WEIGHTS = 1 << 20  # fp32, more than a core's cache
MANIFEST = BaseManifest("none", "", "f" * 64, 1, 8, VOCABULARY, 8192, (0,), {"o_proj": (8, 8)})
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "all": {"temperature": 1.0},
}
ROWS = (1, 8, 32, MAX_ROWS)
PARTS = ("receive", "images", "schedule", "build", "sample", "events", "deliver", "rest")


class BusyExecutor:
    """An executor whose steps take `step_s` and whose logits are those of no model."""

    name, device, dtype = "none", "cpu", "float32"
    num_blocks, block_size, block_bytes, swap_slots = 4096, 16, 1, 0
    memory_bytes, weight_bytes = num_blocks, 0

    def __init__(self, step_s: float) -> None:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(MAX_ROWS, VOCABULARY, generator=generator)
        ranks = torch.argsort(torch.rand(MAX_ROWS, VOCABULARY, generator=generator)) + 1
        self._outcome = outcome_of(noise / 2 - 1.2 * ranks.log())  # Zipf's law, more or less
        library = load_library()
        model = Model(vocab=VOCABULARY, heads=1, kv_heads=1, head_dim=16, hidden=16, inner=16)
        handle = library.start(model, 1, 1, THREADS, ())
        self._draw = functools.partial(draw_rows, library, handle)
        self._step_s, self._weights = step_s, torch.ones(WEIGHTS)

    def set_blocks(self, count: int) -> None:
        """Nothing is kept, nor ever an image."""

    prepare_image = image_bytes = add_image = remove_image = copy_blocks = None

    def execute(self, batch: Batch) -> Outcome:
        """Read weights for a while; the first rows of what was drawn at the start."""
        end = time.perf_counter() + self._step_s
        while time.perf_counter() < end:
            self._weights.sum()
        rows, whole = len(batch.wanted), self._outcome
        parts = (whole.logits[:rows], whole.likeliest[:rows], whole.peak[:rows])
        return Outcome(*parts, self._draw)


class Clock:
    """Adds up the time of the loop's turns by part, for turns of equally many rows apart."""

    def __init__(self) -> None:
        self.turns: defaultdict[str, list[Counter[str]]] = defaultdict(list)
        self._turn: Counter[str] = Counter()
        self._case = ""

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Time all calls of `owner`'s function `name`."""
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments)
            self._turn[part] += time.perf_counter() - begin
            if part == "sample" and result:
                sampling = arguments[1][0].sampling
                self._case = f"{len(result)} {_name(sampling)}"
            if part == "turn":
                self._end_turn()
            return result

        setattr(owner, name, timed)

    def _end_turn(self) -> None:
        turn, case = self._turn, self._case
        self._turn, self._case = Counter(), ""
        if not case:
            return
        turn["events"] = turn["run"] - turn["build"] - turn["execute"] - turn["sample"]
        inner = sum(turn[part] for part in PARTS) + turn["execute"]
        turn["rest"] = turn["turn"] - inner
        self.turns[case].append(turn)

    def report(self) -> dict[str, dict[str, float]]:
        """µs a turn of each part, by case."""
        return {
            case: {part: statistics.median(turn[part] for turn in turns) * 1e6 for part in PARTS}
            for case, turns in self.turns.items()
        }


def _name(sampling: Sampling) -> str:
    return next(n for n, s in SAMPLINGS.items() if s["temperature"] == sampling.temperature)


def serve(endpoint: str, step_s: float) -> None:
    """Be the engine process; print the clock's report at its end."""
    torch.set_num_threads(1)
    clock = Clock()
    for owner, name, part in (
        (Worker, "_turn", "turn"), (Worker, "_receive", "receive"), (Worker, "_deliver", "deliver"),
        (Intake, "settle", "images"), (core.Engine, "_run", "run"),
        (Scheduler, "schedule", "schedule"), (stepper, "build", "build"),
        (reader, "sample", "sample"),
        (BusyExecutor, "execute", "execute"),
    ):  # fmt: skip
        clock.watch(owner, name, part)
    executor, waker = BusyExecutor(step_s), Waker()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        settings = EngineSettings(max_num_seqs=MAX_ROWS, max_num_batched_tokens=2048)
        store, cache = ImageStore(folder), Path(folder)
        stack.enter_context(closing(waker))
        engine = stack.enter_context(
            engine_on(executor, settings, MANIFEST, store, cache, waker.set)
        )
        worker = Worker(engine, endpoint, waker)
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())
        worker.run()
    print(json.dumps(clock.report()))


@dataclass
class Run:
    """What the client saw of one case."""

    case: str
    step_us: float  # wall time from step to step
    client_us: float  # processor time of this process a step


async def measure(client: LocalEngine, rows: int, sampling: str, steps: int) -> Run:
    """Decode `rows` rows for `steps` steps."""
    asked = Sampling(max_tokens=steps, ignore_eos=True, **SAMPLINGS[sampling])
    prompt = tuple(random.randrange(VOCABULARY) for _ in range(PROMPT))
    names = [f"{sampling}-{rows}-{i}" for i in range(rows)]
    used, begin = time.process_time(), time.perf_counter()
    await asyncio.gather(*(token_times(client, Generate(n, prompt, asked)) for n in names))
    wall, used = time.perf_counter() - begin, time.process_time() - used
    return Run(f"{rows} {sampling}", wall / steps * 1e6, used / steps * 1e6)


@asynccontextmanager
async def engine(step_s: float, report: dict[str, Any]) -> AsyncIterator[LocalEngine]:
    """A client of an engine process, whose clock's report is there at the end."""
    with tempfile.TemporaryDirectory(prefix="lpx") as folder:
        endpoint = f"ipc://{folder}/e"
        command = [sys.executable, __file__, "--serve", endpoint, "--step-ms", str(step_s * 1e3)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
        try:
            async with connected(endpoint) as client:
                yield client
        finally:
            process.terminate()
            report.update(json.loads(process.communicate()[0]))


async def bench(step_s: float, steps: int) -> None:
    """Measure and print."""
    runs: list[Run] = []
    report: dict[str, dict[str, float]] = {}
    async with engine(step_s, report) as client:
        await measure(client, MAX_ROWS, "greedy", 10)
        for sampling in SAMPLINGS:
            for rows in ROWS:
                runs.append(await measure(client, rows, sampling, steps))
    print(f"{'rows':>4} {'':8}", *(f"{name:>9}" for name in (*PARTS, "sum", "client")))
    for run in runs:
        parts = list(report[run.case].values())
        rows, name = run.case.split()
        print(f"{rows:>4} {name:8}", *(f"{us:9.0f}" for us in (*parts, sum(parts), run.client_us)))
        report[run.case] |= {"client": run.client_us, "step": run.step_us}
    figures = {run.case: {n: round(us) for n, us in report[run.case].items()} for run in runs}
    print(json.dumps({"step_ms": step_s * 1e3, "us_per_step": figures}))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure what a step costs besides the model.")
    parser.add_argument(
        "--step-ms", type=float, default=5.0, help="how long the model's part takes"
    )
    parser.add_argument("--steps", type=int, default=150, help="tokens of each row")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.step_ms / 1e3)
    else:
        asyncio.run(bench(options.step_ms / 1e3, options.steps))


if __name__ == "__main__":
    main()
