"""What every test may use: the demo base, prepared once, and the asyncio backend."""

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are decorated

import msgspec
import pytest

from loraplex.engine.images import BaseManifest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def demo_base_file() -> Path:
    """`base.json` of the demo base, under `build/` so that it is fetched and converted once."""
    build = ROOT / "build"
    fetched = _run(sys.executable, str(ROOT / "examples/fetch_demo_base.py"), str(build / "gguf"))
    out = build / "demo-base"
    name = "SmolLM2-135M-Instruct"
    gguf = fetched.strip().splitlines()[-1]
    _run(sys.executable, "-m", "loraplex.engine.prepare", gguf, "--out", str(out), "--name", name)
    return out / "base.json"


@pytest.fixture(scope="session")
def demo_base(demo_base_file: Path) -> BaseManifest:
    return msgspec.json.decode(demo_base_file.read_bytes(), type=BaseManifest)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
