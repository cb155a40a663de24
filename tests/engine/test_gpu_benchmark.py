"""`benchmarks/gpu.py` runs dry, without Loraplex installed and without what a GPU machine lacks."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex.engine.checkpoint import tensor_shapes

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
CHECKS = {
    "tiny attention",
    "tiny step",
    "tiny company, image row",
    "tiny chunks",
    "tiny graph",
    "tiny, int8 KV int8 codes",
    "tiny, int8 KV attention",
    "tiny, int8 KV images added and removed, then images' rows",
    "tiny, int8 KV images moved, then base rows",
    "tiny, int8 KV images' scratch replaced, then images' rows",
    "tiny, int8 KV blocks swapped",
    "tiny, int8 KV tokens ahead",
    "tiny, int8 KV tokens ahead, images moving",
    "all draws of 61 tokens",
}
PROGRAM = """
import runpy, sys
sys.modules |= dict.fromkeys(("msgspec", "zmq", "fastapi", "sqlalchemy"))
script, out = sys.argv[1:]
sys.argv = ["gpu.py", "--dry", "--out", out]
runpy.run_path(script, run_name="__main__")
"""


def test_dry_run(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(SCRIPT), str(out)],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())
    assert found["device"] == "interpreter"
    checks = {check["what"]: check for check in found["checks"]}
    assert {check["passes"] for check in checks.values()} == {True}
    assert max(check["error"] for check in checks.values()) < 1e-4
    assert checks.keys() >= CHECKS
    assert {"2 rows, 0 adapters, graph", "2 rows, 2 adapters, launches"} <= set(found["decode"])
    assert {"project qkv, 2 rows, 2 adapters", "attend, 2 rows, 0 adapters"} <= set(
        found["operators"]
    )
    assert set(found["prefill"]) == {"base", "adapter"}
    assert {"2 rows, likeliest, in turn", "2 rows, drawn, ahead"} <= set(found["choices"])


def test_what_is_compared_with_the_cpu_has_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones are drawn where they lie, and are others there."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    checks, model = map(importlib.import_module, ("gpu_checks", "gpu_model"))
    for config, _ in checks.models("cuda").values():
        assert max(math.prod(shape) for _, shape in tensor_shapes(config)) <= model.LARGE
