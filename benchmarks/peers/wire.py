"""What `compare.py` and a peer's script say to each other: lines of JSON over the script's stdio.

The script is started with the path of a JSON file, its `Setup`, and answers `{"facts": {…}}` when
it is ready. Then every line on its stdin is a `Work`, answered by `{"times": [[…], …]}`: for each
row, when each of its tokens came, in seconds since the work was handed over. Both sides of a
comparison give such times and `tokens_per_s` alone makes a rate of them.

Knows the standard library only, for it runs in every peer's environment; refuses to know who
decodes.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

Times = list[list[float]]
Facts = dict[str, str | int | float | None]

_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


@dataclass(frozen=True)
class Setup:
    """What a peer is started with."""

    model: str  # directory with config.json, *.safetensors and tokenizer.json
    gguf: str  # the GGUF file that the directory was converted from
    folder: str  # the peer's own, for what it converts
    adapters: tuple[str, ...]  # PEFT directories
    threads: int
    dtype: str  # "auto": the peer's best on this machine
    quantization: str  # "none" or "int8": of the base's weights
    max_rows: int
    max_len: int  # tokens of a prompt and its completion together
    max_rank: int


@dataclass(frozen=True)
class Work:
    """One run: prompts that start together, each under adapter `i` modulo `adapters`."""

    phase: str  # "prefill" or "decode"
    adapters: int
    tokens: int  # to make for each prompt
    prompts: tuple[tuple[int, ...], ...]

    def adapters_of_rows(self) -> list[int | None]:
        """Index of each row's adapter; None is the base."""
        return [row % self.adapters if self.adapters else None for row in range(len(self.prompts))]


def tokens_per_s(work: Work, times: Times) -> float:
    """The rate of a run.

    Prefill: prompt tokens over the time until every row had its first token. Decode: the tokens
    that came after every row had its first one, over the time from that moment to the last token.
    Raises `ValueError` when a row is not as long as was asked for.
    """
    if any(len(row) != work.tokens for row in times) or len(times) != len(work.prompts):
        raise ValueError(f"rows of {[len(row) for row in times]} tokens, {work.tokens} expected")
    begin = max(row[0] for row in times)
    if work.phase == "prefill":
        return sum(map(len, work.prompts)) / begin
    after = [moment for row in times for moment in row if moment > begin]
    return len(after) / (max(after) - begin)


def send_work(work: Work) -> str:
    """A line."""
    return json.dumps(asdict(work)) + "\n"


def serve(start: Callable[[Setup], tuple[Facts, Callable[[Work], Times]]]) -> None:
    """Run a peer's script: `start` makes it ready and returns its facts and what runs a work."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes to the log
    facts, run = start(Setup(**json.loads(Path(sys.argv[1]).read_text())))
    print(json.dumps({"facts": facts}), file=answers)
    for line in sys.stdin:
        print(json.dumps({"times": run(_work(line))}), file=answers)


def _work(line: str) -> Work:
    fields = json.loads(line)
    return Work(**{**fields, "prompts": tuple(map(tuple, fields["prompts"]))})


def end_with_parent() -> None:
    """Ask the kernel to kill this process, stopped or not, when the one that started it ends."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def has_cpu_flag(*names: str) -> bool:
    """Whether the processor has one of these features, as /proc/cpuinfo spells them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return any(name in flags for name in names)


def best_dtype(asked: str) -> str:
    """`asked`, or where that is "auto" bfloat16 on a processor that multiplies it, else float32."""
    if asked != "auto":
        return asked
    return "bfloat16" if has_cpu_flag("avx512_bf16", "amx_bf16") else "float32"


def versions(packages: Sequence[str]) -> Facts:
    """Versions of installed packages."""
    return {package: metadata.version(package) for package in packages}
