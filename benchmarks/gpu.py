"""Kernels and decode steps on one GPU: are they right, and how near to the roofline are they?

`python benchmarks/gpu.py [--out FILE]` takes under four minutes on a GPU. It needs torch, triton,
numpy, safetensors and fsspec, and no installed Loraplex. `--dry` runs the same code on tiny shapes
in Triton's interpreter, where times mean nothing. Errors come first; it exits with 1 when an
operator is wrong. Prints a line a result, and writes one JSON object with the device's name.
"""

import argparse
import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def map_rooms() -> None:
    """Make the rooms of this tree importable, and images plain records where msgspec is missing."""
    rooms = sys.modules["loraplex"] = ModuleType("loraplex")
    rooms.__path__ = [str(ROOT)]
    try:
        importlib.import_module("msgspec")
    except ImportError:
        records: Any = ModuleType("msgspec")
        records.Struct = Record
        sys.modules["msgspec"] = records


class Record:
    """Stands in for `msgspec.Struct`, without its coding."""

    def __init_subclass__(cls, frozen: bool) -> None:
        dataclass(frozen=frozen)(cls)


def main() -> int:
    """Run all; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny shapes, in the interpreter")
    parser.add_argument("--out", type=Path, help="default: results/gpu-DEVICE.json beside this")
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1" if options.dry else "0"  # read when kernels are decorated
    map_rooms()
    import torch

    from loraplex.engine.gpu import step_layout

    if not (options.dry or torch.cuda.is_available()):
        parser.error("there is no GPU here; --dry runs without one")
    if options.dry:
        step_layout.BUCKETS = (4,)  # inert rows take the interpreter as long as others
    from gpu_checks import check
    from gpu_times import DRY, FULL, measure

    started = time.monotonic()
    results: dict[str, Any] = {"device": device_name(options.dry), "dry": options.dry}
    results["versions"] = versions()
    results["errors"], wrong = check("cpu" if options.dry else "cuda")
    results |= {"wrong": wrong} | measure(DRY if options.dry else FULL)
    results["seconds"] = round(time.monotonic() - started, 1)
    name = "dry" if options.dry else results["device"].replace(" ", "-")
    out = options.out or ROOT / "benchmarks" / "results" / f"gpu-{name}.json"
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{out}: {results['seconds']} s", *(f"WRONG: {what}" for what in wrong), sep="\n")
    return 1 if wrong else 0


def device_name(dry: bool) -> str:
    """The GPU's name."""
    import torch

    return "interpreter" if dry else torch.cuda.get_device_name()


def versions() -> dict[str, str]:
    """Of what computes."""
    import torch
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__}


if __name__ == "__main__":
    sys.exit(main())
