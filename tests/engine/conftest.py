"""What tests of the engine share: a base without a model, and the demo base with its own."""

import functools
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loraplex.engine.images import BaseManifest
from loraplex.kernels.cpu.isa import runnable

STAND_IN = Path(__file__).with_name("stand_in.py")


@pytest.fixture(scope="session")
def stand_in() -> ModuleType:
    """The module `stand_in.py`."""
    return _load("engine_stand_in", STAND_IN)


@pytest.fixture(scope="session")
def schedules() -> ModuleType:
    """The module `schedules.py`."""
    return _load("engine_schedules", STAND_IN.with_name("schedules.py"))


@pytest.fixture(scope="session")
def stand_in_file() -> Path:
    return STAND_IN


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A ZeroMQ endpoint whose path is short enough for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="lpx") as folder:
        yield f"ipc://{folder}/e"


@pytest.fixture
def rig(stand_in: ModuleType) -> Callable[..., Any]:
    """Makes a `Rig`: an engine in the hands of a test, without a process."""
    return stand_in.Rig


@pytest.fixture
def served(stand_in: ModuleType, endpoint: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a `Served` at `endpoint`; its options are those of `Worker`."""
    started = []

    def start(**options: Any) -> Any:
        started.append(stand_in.Served(endpoint, tmp_path, **options))
        return started[-1]

    yield start
    for one in started:
        one.stop()
        one.engine.check_integrity()


@pytest.fixture(scope="session")
def torch_kit() -> ModuleType:
    """The module `torch_kit.py`."""
    return _load("engine_torch_kit", STAND_IN.with_name("torch_kit.py"))


@pytest.fixture(scope="session")
def native_kit() -> ModuleType:
    """The module `native_kit.py`."""
    return _load("engine_native_kit", STAND_IN.with_name("native_kit.py"))


@pytest.fixture(scope="session", params=[isa.name for isa in runnable()])
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set of this machine that the native step has a body for."""
    return request.param


@pytest.fixture(scope="session")
def demo_executor(torch_kit: ModuleType, demo_base: BaseManifest) -> Callable[[str, str], Any]:
    """Loads the demo base into an executor, by its name and dtype; once each."""
    return functools.cache(lambda name, dtype: torch_kit.LOAD[name](Path(demo_base.path), dtype))


@pytest.fixture(scope="module", params=["torch", "native"])
def executor_name(request: pytest.FixtureRequest) -> str:
    """Each of the executors that a CPU has."""
    return request.param


@pytest.fixture(scope="module")
def demo_runner(
    torch_kit: ModuleType, demo_executor: Callable[[str, str], Any], executor_name: str
) -> Callable[[str], Any]:
    """Makes a `torch_kit.Runner` of the demo base in the given dtype."""
    return lambda dtype="float32": torch_kit.Runner(demo_executor(executor_name, dtype))


def _load(name: str, path: Path) -> ModuleType:
    """Import a file by its path: test folders are not on the import path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
