"""The benchmark of what a step costs beside the model stands in for one as the engine knows it."""

import runpy
from pathlib import Path

import pytest

from loraplex.engine.executor import Executor

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "overhead.py"


def test_the_stand_in_says_all_that_an_executor_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    stand_in = runpy.run_path(str(BENCHMARK))["BusyExecutor"]
    assert [name for name in Executor.__annotations__ if not hasattr(stand_in, name)] == []
