"""`engine.cores` on made-up /sys trees."""

import os
from pathlib import Path

import pytest

from loraplex.engine.cores import available_cores


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may use eight cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_no_group(tmp_path: Path) -> None:
    assert available_cores(tmp_path) == 8


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("300000 100000", 3), ("350000 100000", 3), ("50000 100000", 1)],
)
def test_quota_of_the_own_group(quota: str, cores: int, tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/pod/engine\n")
    write(tmp_path / "sys/fs/cgroup/pod/engine/cpu.max", f"{quota}\n")
    assert available_cores(tmp_path) == cores


def test_quota_of_a_group_above(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/pod/engine\n")
    write(tmp_path / "sys/fs/cgroup/pod/engine/cpu.max", "600000 100000\n")
    write(tmp_path / "sys/fs/cgroup/pod/cpu.max", "200000 100000\n")
    assert available_cores(tmp_path) == 2


@pytest.mark.parametrize(("quota", "cores"), [(-1, 8), (250000, 2), (9900000, 8)])
def test_version_1(quota: int, cores: int, tmp_path: Path) -> None:
    folder = tmp_path / "sys/fs/cgroup/cpu"
    write(folder / "cpu.cfs_quota_us", f"{quota}\n")
    write(folder / "cpu.cfs_period_us", "100000\n")
    assert available_cores(tmp_path) == cores
