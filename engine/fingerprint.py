"""SHA-256 of large files, remembered by size and modification time; and of a base as a whole.

This file knows files and digests. It refuses to know what a model is.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

VOLATILE_KEYS = frozenset({"transformers_version"})


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """What tells one content of a path from another without reading it."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "Stamp":
        """The stamp of a file as it is now; raises `OSError`."""
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns)


class Known(msgspec.Struct, frozen=True, array_like=True):
    """A digest and the stamp that the file had when it was read."""

    stamp: Stamp
    sha256: str


def file_digest(path: Path, known: Known | None, report: Callable[[str], None]) -> Known:
    """Digest of `path`, taken from `known` when the file has not changed since."""
    stamp = Stamp.of(path)
    if known is not None and known.stamp == stamp:
        return known
    report(f"hashing {path.name} ({stamp.size / 2**20:.0f} MiB)")
    with path.open("rb") as file:
        return Known(stamp, hashlib.file_digest(file, "sha256").hexdigest())


def fingerprint(config: Mapping[str, object], weights: Mapping[str, str]) -> str:
    """SHA-256 that names a base: its configuration, and its weight files' digests by file name.

    Keys that say who wrote the configuration, and not what it is, do not count.
    """
    kept = {k: v for k, v in config.items() if not k.startswith("_") and k not in VOLATILE_KEYS}
    text = json.dumps([kept, dict(weights)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
