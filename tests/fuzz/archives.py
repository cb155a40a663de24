"""Zips that strangers send: of good files, or with entries or bytes that are not as they should be.

Knows zip's records, and what has broken readers of them before. Refuses to know what the files
hold. Load it with `runpy.run_path`.
"""

import gzip
import io
import random
import stat
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Entries = list[tuple[zipfile.ZipInfo, bytes]]


def pack(rng: random.Random, files: dict[str, bytes], done: list[str]) -> bytes:
    """A zip of the files, with entries or bytes that are not as they should be."""
    entries: Entries = [(zipfile.ZipInfo(name), data) for name, data in files.items()]
    if rng.random() < 0.2:
        entries.append((zipfile.ZipInfo("README.md"), b"hello"))
    for info, _ in entries:
        info.compress_type = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    for _ in range(rng.randint(0, 2)):
        _apply(rng, ENTRY_FAULTS, done, entries)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a name is there twice
        for info, data in entries:
            opened.writestr(info, data, info.compress_type)
    content = packed.getvalue()
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        content = _apply(rng, BYTE_FAULTS, done, content)
    return content


def _entry_name(rng: random.Random, entries: Entries) -> None:
    names = (
        f"../{CONFIG}", f"/etc/{CONFIG}", f"C:{CONFIG}", f"a\\{CONFIG}", f"dir/{CONFIG}", "..", ".",
        CONFIG.upper(), f"{CONFIG} ", f"{CONFIG}\0.txt", "\u212Aelvin", "x" * 3000, "evil.py", "",
        "adapter_model.bin", f"./{WEIGHTS}", f"{WEIGHTS}/", "__MACOSX/._x", CONFIG, WEIGHTS,
    )  # fmt: skip
    made = zipfile.ZipInfo("x")
    made.filename = made.orig_filename = rng.choice(names)
    entries.insert(rng.randint(0, len(entries)), (made, rng.choice((b"", b"data"))))


def _entry_mode(rng: random.Random, entries: Entries) -> None:
    info, _ = rng.choice(entries)
    kinds = (stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFDIR)
    info.external_attr = (rng.choice(kinds) | 0o777) << 16


def _entry_bomb(rng: random.Random, entries: Entries) -> None:
    at = rng.randrange(len(entries))
    entries[at] = (entries[at][0], entries[at][1] + bytes(rng.choice((1 << 16, 3 << 20))))
    entries[at][0].compress_type = zipfile.ZIP_DEFLATED


def _entry_method(rng: random.Random, entries: Entries) -> None:
    rng.choice(entries)[0].compress_type = rng.choice((zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))


def _entry_many(rng: random.Random, entries: Entries) -> None:
    entries += [(zipfile.ZipInfo(f"f{i}"), b"") for i in range(rng.choice((5, 20)))]


def _entry_missing(rng: random.Random, entries: Entries) -> None:
    del entries[rng.randrange(len(entries))]


def _entry_nested(rng: random.Random, entries: Entries) -> None:
    at = rng.randrange(len(entries))
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as opened:
        opened.writestr(CONFIG, b"{}")
    entries[at] = (entries[at][0], inner.getvalue())


ENTRY_FAULTS = (
    _entry_name, _entry_mode, _entry_bomb, _entry_method, _entry_many, _entry_missing,
    _entry_nested,
)  # fmt: skip


def _flip(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content)) if content else 0
    return content[:at] + rng.randbytes(rng.randint(1, 4)) + content[at + rng.randint(0, 4) :]


def _field(rng: random.Random, content: bytes) -> bytes:
    """A number in a local header, a central one, or the end record: sizes, flags, CRC, disks."""
    signature = rng.choice((b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"))
    at = content.find(signature) + 4 + 2 * rng.randrange(9)
    value = rng.choice((b"\0\0", b"\1\0", b"\xff\xff", b"\x08\x00", b"\0\x80", rng.randbytes(2)))
    return content[:at] + value + content[at + 2 :]


def _cut(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _tail(rng: random.Random, content: bytes) -> bytes:
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, 0, 1)
    tails = (bytes(30), b"x" * 0x10000, b"PK\x05\x06" + bytes(18), locator, content)
    return content + rng.choice(tails)


def _comment(rng: random.Random, content: bytes) -> bytes:
    comment = rng.choice((b"c" * 0xFFFF, b"PK\x05\x06" + bytes(18), b"PK\x01\x02" * 20))
    return content[:-2] + struct.pack("<H", len(comment)) + comment


def _zip64(rng: random.Random, content: bytes) -> bytes:
    end = content[-22:]
    record = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 2, 2, 100, 0)
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, max(0, len(content) - 22), 1)
    return content[:-22] + record + locator + end[:8] + b"\xff" * 12 + end[20:]


def _head(rng: random.Random, content: bytes) -> bytes:
    return rng.choice((b"#!/bin/sh\n", bytes(100), b"MZ")) + content


def _other(rng: random.Random, content: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as opened:
        opened.addfile(tarfile.TarInfo(CONFIG))
    return rng.choice((packed.getvalue(), gzip.compress(content), b"", b"PK", b"Rar!\x1a\x07\0"))


BYTE_FAULTS = (_flip, _field, _field, _cut, _tail, _comment, _zip64, _head, _other)


def _apply(
    rng: random.Random, faults: tuple[Callable[..., Any], ...], done: list[str], on: Any
) -> Any:
    fault = rng.choice(faults)
    done.append(fault.__name__.lstrip("_"))
    return fault(rng, on)
