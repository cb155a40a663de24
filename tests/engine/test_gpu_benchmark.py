"""`benchmarks/gpu.py` runs dry, without Loraplex installed and without what a GPU machine lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
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
    assert {"tiny attention", "tiny step", "tiny company of row 2", "tiny draws"} <= set(
        found["errors"]
    )
    assert max(found["errors"].values()) < 1e-4
    assert {"1 rows, 0 adapters, graph", "3 rows, 2 adapters, launches"} <= set(found["decode"])
    assert {"project qkv, 3 rows, 2 adapters", "attend, 1 rows, 0 adapters"} <= set(
        found["operators"]
    )
    assert set(found["prefill"]) == {"base", "adapter"}
    assert {"1 rows, likeliest, in turn", "3 rows, drawn, ahead"} <= set(found["choices"])
