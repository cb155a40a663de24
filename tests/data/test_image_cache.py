"""The local cache of images from a remote store: what leaves it, and what stays."""

import os
from pathlib import Path

from loraplex.platform import images_kept


def test_the_cache_loses_what_was_used_longest_ago(tmp_path: Path) -> None:
    ages = {"a.safetensors": 500, "b.safetensors": 400, "c.safetensors": 300, "d.safetensors": 5}
    for name, age in (ages | {"e.part": 1000, "f.part": 10}).items():
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (10_000 - age,) * 2)
    assert images_kept.shrink_cache(tmp_path, 30, keep_s=60, now=10_000) == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "c.safetensors",
        "d.safetensors",
        "f.part",
    ]
    assert images_kept.shrink_cache(tmp_path, 0, keep_s=60, now=10_000) == 10  # never one in use
    assert images_kept.shrink_cache(tmp_path / "none", 0, keep_s=60, now=10_000) == 0
