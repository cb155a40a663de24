"""How many cores this process may use: its affinity, within its cgroup's quota.

This file knows /proc and /sys/fs/cgroup; it refuses to know what the cores are for.
"""

import math
import os
from pathlib import Path

from loraplex.engine.memory import own_groups


def available_cores(root: Path = Path("/")) -> int:
    """Cores that can be kept busy, at least one; `root` is where /proc and /sys are."""
    quotas = [*_cgroup_v2(root), *_cgroup_v1(root)]
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.floor, quotas)]))


def _cgroup_v2(root: Path) -> list[float]:
    files = (group / "cpu.max" for group in own_groups(root))
    return [quota for file in files for quota in _quota(_words(file))]


def _cgroup_v1(root: Path) -> list[float]:
    folder = root / "sys/fs/cgroup/cpu"
    return _quota([*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")])


def _quota(words: list[str]) -> list[float]:
    """Microseconds of time in each period, as cores; [] for no limit."""
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return []
    return [int(words[0]) / int(words[1])]


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
