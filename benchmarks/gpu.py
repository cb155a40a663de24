"""Kernels and decode steps on one GPU: are they right, and how near to the roofline are they?

`python benchmarks/gpu.py [--out FILE]` takes under four minutes on a GPU; times are of an 8B model
and need 40 GiB of its memory, checks 4. It needs torch, triton, numpy, safetensors and fsspec, and
no installed Loraplex. `--dry` runs the same code on tiny shapes in Triton's interpreter, where
times mean nothing. Checks come first, each a line that says "pass" or "FAIL" and the error found;
it exits with 1 when one fails. Then a line a time. All of it goes to one JSON file with the
device's name.
"""

import argparse
import importlib
import json
import math
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
        even_products()
    from gpu_checks import check
    from gpu_times import DRY, FULL, measure

    started = time.monotonic()
    device = device_name(options.dry)
    name = "dry" if options.dry else device.replace(" ", "-")
    out = options.out or ROOT / "benchmarks" / "results" / f"gpu-{name}.json"
    results = {"device": device, "dry": options.dry, "versions": versions()}
    checks = check("cpu" if options.dry else "cuda")
    results["checks"] = [entry(each) for each in checks]
    save(out, results)  # in case that there is no memory for what follows
    results |= measure(DRY if options.dry else FULL)
    results["seconds"] = round(time.monotonic() - started, 1)
    save(out, results)
    wrong = [each.what for each in checks if not each.passes]
    print(f"{out}: {results['seconds']} s, {len(checks) - len(wrong)} checks of {len(checks)} pass")
    for what in wrong:
        print(f"FAIL  {what}")
    return 1 if wrong else 0


def even_products() -> None:
    """Have the interpreter treat rows alike, as a device does; a BLAS looks at their place."""
    import numpy as np

    np.matmul = lambda a, b, dtype: (a[:, :, None] * b[None]).sum(1, dtype=dtype)


def save(out: Path, results: dict[str, Any]) -> None:
    """Write what is known so far."""
    out.write_text(json.dumps(results, indent=1) + "\n")


def entry(check: Any) -> dict[str, Any]:
    """A check as JSON, which knows no NaN."""
    error = None if math.isnan(check.error) else check.error
    return {"what": check.what, "error": error, "limit": check.limit, "passes": check.passes}


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
