"""How much memory this process may still take: the machine's, within its cgroup's limit.

This file knows /proc and /sys/fs/cgroup; it refuses to know what the memory is for.
"""

from pathlib import Path

UNLIMITED = 1 << 62  # cgroup v1 writes a number of this size for no limit


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping; `root` is where /proc and /sys are."""
    machine = _field(root / "proc/meminfo", "MemAvailable:") * 1024
    return min([machine, *_cgroup_v2(root), *_cgroup_v1(root)])


def own_groups(root: Path) -> list[Path]:
    """Folders of the process's cgroup, of version 2, and of each one above it."""
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    groups = [top / own, *(top / own).parents]
    return [group for group in groups if group.is_relative_to(top)]


def _cgroup_v2(root: Path) -> list[int]:
    return [left for group in own_groups(root) for left in _left(group, *_V2)]


def _cgroup_v1(root: Path) -> list[int]:
    return _left(root / "sys/fs/cgroup/memory", *_V1)


_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left(group: Path, limit_name: str, used_name: str, cache_name: str) -> list[int]:
    """Limit less use, where use does not count file pages that can be dropped; [] for no limit."""
    try:
        limit = int((group / limit_name).read_text())
        used = int((group / used_name).read_text())
    except (OSError, ValueError):
        return []
    if limit >= UNLIMITED:
        return []
    return [max(0, limit - used + _field(group / "memory.stat", cache_name))]


def _field(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
