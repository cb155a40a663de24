"""Fuzzes the upload gate: thousands of adapters and archives, each spoiled as its seed decides.

    python tests/fuzz --cases 5000 --seed 7
    python tests/fuzz --only 7:1234

Each case goes through the gate's own functions, `archive.unpack` and `compile_adapter`, in this
process: it must end in an image or in typed reasons, within its time, without a file outside of its
folder; and what is taken must pass `judge.py`. The first that does not is shown with the seed that
makes it again, and the exit code is 1. The last line is JSON.

Knows how to run a case and watch it. Refuses to know what is in it.
"""

import argparse
import json
import os
import runpy
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from loraplex.engine.compile_adapter import compile_adapter
from loraplex.engine.images import BaseManifest, ImageDtype
from loraplex.engine.reasons import Rejected
from loraplex.platform import archive
from loraplex.platform.errors import AdapterRejected, TooLarge

HERE = Path(__file__).parent
HOSTILE = runpy.run_path(str(HERE / "hostile.py"))
JUDGE = runpy.run_path(str(HERE / "judge.py"))
MOST_SECONDS = 20.0
MAX_BYTES = 1 << 20
DTYPES: tuple[ImageDtype, ...] = ("bf16", "fp32", "int8")


class Hang(BaseException):
    """A case took longer than `MOST_SECONDS`; no handler of the gate's may catch it."""


class Gate:
    """Runs cases one after the other in a folder of their own, beside which nothing may change."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.case = scratch, scratch / "case"
        path = scratch / "base"
        path.mkdir()
        numbers, sizes = np.random.default_rng(0), HOSTILE["SIZES"]
        weights = {
            f"model.layers.{layer}.self_attn.{name}.weight": numbers.normal(size=size[::-1])
            for layer in range(HOSTILE["LAYERS"])
            for name, size in sizes.items()
        }
        floats = {name: each.astype(np.float32) for name, each in weights.items()}
        safetensors.numpy.save_file(floats, path / "model.safetensors")
        layers, vocab = HOSTILE["LAYERS"], HOSTILE["VOCAB"]
        self.base = BaseManifest("tiny", str(path), "f" * 64, layers, 8, vocab, 32, (2,), sizes)
        self.before = self.seen()

    def seen(self) -> dict[str, tuple[int, int, int]]:
        """Every file below the scratch folder but in the case's own: mode, size, time of change."""
        found = {}
        for folder, names, files in os.walk(self.scratch):
            if Path(folder) == self.scratch and "case" in names:
                names.remove("case")
            for name in files:
                status = os.lstat(os.path.join(folder, name))
                found[os.path.join(folder, name)] = (
                    status.st_mode, status.st_size, status.st_mtime_ns,
                )  # fmt: skip
        return found

    def run(self, case: Any) -> str:
        """ "accepted", or the codes of the reasons; raises what is wrong with the gate."""
        source, image = self.case / "source", self.case / "image"
        source.mkdir(parents=True)
        signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
        try:
            codes = self._pass(case, source, image)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        left = {str(p.relative_to(self.case)) for p in self.case.rglob("*") if not p.is_dir()}
        allowed = {"archive.zip", *(f"source/{name}" for name in archive.REQUIRED)}
        assert left <= allowed | ({"image"} if codes == "accepted" else set()), left
        assert not any(p.is_symlink() for p in self.case.rglob("*"))
        for path in self.case.rglob("*"):
            if not path.is_dir():
                path.unlink()
        source.rmdir()
        self.case.rmdir()
        return codes

    def _pass(self, case: Any, source: Path, image: Path) -> str:
        try:
            self._deliver(case, source)
            dtype = DTYPES[sum(map(len, case.files.values())) % 3]
            report = compile_adapter(source, self.base, image, dtype)
        except (Rejected, AdapterRejected) as rejected:
            codes = [_code(reason) for reason in rejected.reasons]
            assert codes
            assert "parity_failed" not in codes, "a fault of the compiler's"
            return ",".join(sorted(set(codes)))
        except TooLarge:
            return "too_large"
        JUDGE["accepted"](source, image, report.digest, self.base)
        assert report.parity.of_bound <= 1
        return "accepted"

    def _deliver(self, case: Any, source: Path) -> None:
        if case.archive is None:
            for name, content in case.files.items():
                (source / name).write_bytes(content)
            return
        packed = self.case / "archive.zip"
        packed.write_bytes(case.archive)
        archive.unpack(packed, source, MAX_BYTES)
        JUDGE["unpacked"](case.archive, source)


def _code(reason: Any) -> str:
    return str(reason["code"] if isinstance(reason, dict) else reason.code)


def _hang(*_: object) -> None:
    raise Hang


def fuzz(scratch: Path, seeds: list[str]) -> Counter[str]:
    """Run the cases of `seeds`; how often each code came. Raises `AssertionError` with the seed."""
    gate, codes = Gate(scratch), Counter[str]()
    before = signal.signal(signal.SIGALRM, _hang)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for seed in seeds:
                case = HOSTILE["make"](seed)
                try:
                    codes.update(gate.run(case).split(","))
                except (Exception, Hang) as error:
                    raise AssertionError(f"{seed} ({', '.join(case.done)}): {error!r}") from error
    finally:
        signal.signal(signal.SIGALRM, before)
    assert gate.seen() == gate.before, "something changed outside of the case's folder"
    return codes


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python tests/fuzz")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="SEED", help="the one case that a failure named")
    options = parser.parse_args()
    seeds = [f"{options.seed}:{i}" for i in range(options.cases)]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        codes = fuzz(Path(folder), [options.only] if options.only else seeds)
    for code, count in codes.most_common():
        print(f"{count:6} {code}")
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"cases": len(seeds), "accepted": codes["accepted"], "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
