"""`engine.memory` on made-up /proc and /sys trees."""

from pathlib import Path

import pytest

from loraplex.engine.memory import available_bytes

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 1000 MiB available."""
    write(tmp_path / "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable:  {1000 * 1024} kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group_v2(folder: Path, limit: str, used: int, cache: int = 0) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{used * MIB}\n")
    write(folder / "memory.stat", f"anon 1\ninactive_file {cache * MIB}\n")


def test_machine_alone(root: Path) -> None:
    assert available_bytes(root) == 1000 * MIB


def test_limit_of_the_own_group(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    group_v2(root / "sys/fs/cgroup", str(600 * MIB), used=250, cache=50)
    assert available_bytes(root) == 400 * MIB


def test_limit_of_a_group_above(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/pod/engine\n")
    group_v2(root / "sys/fs/cgroup/pod/engine", "max", used=10)
    group_v2(root / "sys/fs/cgroup/pod", str(100 * MIB), used=90)
    assert available_bytes(root) == 10 * MIB


def test_limit_that_is_above_the_machine(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    group_v2(root / "sys/fs/cgroup", str(5000 * MIB), used=100)
    assert available_bytes(root) == 1000 * MIB


def test_limit_that_is_passed(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    group_v2(root / "sys/fs/cgroup", str(10 * MIB), used=20)
    assert available_bytes(root) == 0


@pytest.mark.parametrize(("limit", "left"), [(300 * MIB, 220 * MIB), (9223372036854771712, None)])
def test_version_1(root: Path, limit: int, left: int | None) -> None:
    folder = root / "sys/fs/cgroup/memory"
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{100 * MIB}\n")
    write(folder / "memory.stat", f"total_inactive_file {20 * MIB}\n")
    assert available_bytes(root) == (left or 1000 * MIB)


def test_this_machine() -> None:
    assert available_bytes() > 0
