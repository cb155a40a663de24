"""What every test may use: the demo base, prepared once, and the asyncio backend.

It also says how the suite is dealt out to workers (`pytest -n auto`): files stay whole, and those
of `tests/house` that share one running platform count as one.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are decorated
if "PYTEST_XDIST_WORKER" in os.environ:  # each would keep all cores busy
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import msgspec
import pytest
from filelock import FileLock
from xdist.scheduler import LoadFileScheduling

from loraplex.engine.cores import available_cores
from loraplex.engine.images import BaseManifest

ROOT = Path(__file__).resolve().parents[1]
MOST_WORKERS = 4
APART = {  # no test of these uses the shared platform
    *("test_compare.py", "test_drain.py", "test_faults.py", "test_knobs.py"),
    *("test_life.py", "test_supervise.py", "test_upload_death.py"),
}
LONGEST_FIRST = ("house", "engine", "kernels", "api", "data")

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


class Dealer(LoadFileScheduling):
    """Gives a worker a whole file, or the files of `tests/house` that are not `APART`."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        folder, _, name = file.rpartition("/")
        return folder if folder.endswith("tests/house") and name not in APART else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Dealer:
    return Dealer(config, log)


def pytest_xdist_auto_num_workers() -> int:
    return min(MOST_WORKERS, available_cores())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest folders come first, so that the workers end together."""
    items.sort(key=lambda item: _rank(item.path.relative_to(ROOT / "tests").parts[0]))


def _rank(folder: str) -> int:
    return (*LONGEST_FIRST, folder).index(folder)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def demo_base_file() -> Path:
    """`base.json` of the demo base, under `build/` so that it is fetched and converted once."""
    build = ROOT / "build"
    out = build / "demo-base"
    name = "SmolLM2-135M-Instruct"
    build.mkdir(exist_ok=True)
    with FileLock(build / "demo-base.lock"):
        fetched = _run(
            sys.executable, str(ROOT / "examples/fetch_demo_base.py"), str(build / "gguf")
        )
        gguf = fetched.strip().splitlines()[-1]
        prepare = ("-m", "loraplex.engine.prepare", gguf, "--out", str(out), "--name", name)
        _run(sys.executable, *prepare)
    return out / "base.json"


@pytest.fixture(scope="session")
def demo_base(demo_base_file: Path) -> BaseManifest:
    return msgspec.json.decode(demo_base_file.read_bytes(), type=BaseManifest)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
