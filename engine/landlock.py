"""Landlock: rights that a process gives up for good, by the kernel's three calls (Linux 5.13).

After `keep_only(folder)` it writes below that folder alone, starts no program, opens no TCP
connection and reaches no abstract socket or signal outside, each as far as the kernel's version
knows it (https://docs.kernel.org/userspace-api/landlock.html). Files that are open stay open, and
reading is free. This file knows those calls; it refuses to know why.
"""

import ctypes
import os
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, the same on all architectures
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE = 1 << 0
_WRITES = 1 << 1 | sum(1 << bit for bit in range(4, 13))  # files, folders, links, sockets, devices
_SINCE = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}  # renaming across folders, truncating, ioctl
_TCP_SINCE, _TCP = 4, 0b11  # binding and connecting
_SCOPES_SINCE, _SCOPES = 6, 0b11

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def keep_only(folder: Path) -> bool:
    """Give all else up; says whether the kernel could do that.

    Raises `OSError` when `folder` is none. Call it when no new privileges can be had.
    """
    version = _libc.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return False
    writes = _WRITES | sum(right for since, right in _SINCE.items() if version >= since)
    rights = _Ruleset(
        _EXECUTE | writes,
        _TCP if version >= _TCP_SINCE else 0,
        _SCOPES if version >= _SCOPES_SINCE else 0,
    )
    size = 24 if version >= _SCOPES_SINCE else 16 if version >= _TCP_SINCE else 8
    rules = _libc.syscall(_CREATE, ctypes.byref(rights), ctypes.c_size_t(size), 0)
    if rules < 0:
        return False
    try:
        return _allow(rules, folder, writes) and _libc.syscall(_RESTRICT, rules, 0) == 0
    finally:
        os.close(rules)


def _allow(rules: int, folder: Path, rights: int) -> bool:
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        rule = _Beneath(rights, opened)
        return bool(_libc.syscall(_ADD, rules, _PATH_BENEATH, ctypes.byref(rule), 0) == 0)
    finally:
        os.close(opened)
