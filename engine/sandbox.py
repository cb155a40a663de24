"""Confines the process that reads a stranger's files, before it reads the first.

Nothing here is needed for what the compiler does; each layer is there for the day it is wrong. What
the kernel or a container does not allow is left out, and `enter` says what holds.

This file knows limits, `prctl` and namespaces of Linux. It refuses to know what is to be confined.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from loraplex.engine import landlock

OPEN_FILES = 64
PROCESSES = 0  # no more threads and children of this user's than there are
MEMORY_BYTES = 2 << 30  # besides what the input explains
OUTPUT_BYTES = 64 << 20

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def enter(source: Path, target: Path, size: int, seconds: int) -> tuple[str, ...]:
    """Confine this process; returns the names of the layers that hold, in order.

    It writes below the folder `target` alone and starts no program where the kernel has Landlock.
    It may compute for `seconds` and live for twice as long. Memory and each file that it writes are
    bounded by what an input of `size` bytes explains: float32 doubles bf16, and one array at a time
    is in float64. It cannot gain privileges, be traced, reach a network or import from `source`. It
    ends with the thread that started it. Call it before there are threads.
    """
    layers: dict[str, Callable[[], bool]] = {
        "clock": lambda: _end_after(2 * seconds),
        "cpu": lambda: _limit(resource.RLIMIT_CPU, seconds),
        "memory": lambda: _limit(resource.RLIMIT_AS, MEMORY_BYTES + 8 * size),
        "file_size": lambda: _limit(resource.RLIMIT_FSIZE, OUTPUT_BYTES + 2 * size),
        "core": lambda: _limit(resource.RLIMIT_CORE, 0),
        "open_files": lambda: _limit(resource.RLIMIT_NOFILE, OPEN_FILES),
        "imports": lambda: _forget_imports(source),
        "not_dumpable": lambda: _prctl(_PR_SET_DUMPABLE, 0),
        "no_new_privs": lambda: _prctl(_PR_SET_NO_NEW_PRIVS, 1),
        "no_network": _leave_network,
        "no_writes_elsewhere": lambda: _keep_only(target),
        "processes": lambda: _limit(resource.RLIMIT_NPROC, PROCESSES),
        "parent": lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # new rights would undo it
    }
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    return tuple(name for name, apply in layers.items() if apply())


def _end_after(seconds: int) -> bool:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return True


def _limit(kind: int, most: int) -> bool:
    """Lower a limit for good: the hard one too, so that nothing here can raise it again."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    try:
        resource.setrlimit(kind, (most, most))
    except (OSError, ValueError):
        return False
    return True


def _forget_imports(source: Path) -> bool:
    """Let nothing be imported from the working directory or from below `source`."""
    cwd, source = Path.cwd(), source.resolve()
    places = [(entry, Path(entry).resolve()) for entry in sys.path if entry]
    sys.path[:] = [entry for entry, at in places if at != cwd and not at.is_relative_to(source)]
    return True


def _prctl(option: int, value: int) -> bool:
    return bool(_libc.prctl(option, value, 0, 0, 0) == 0)


def _keep_only(folder: Path) -> bool:
    try:
        return landlock.keep_only(folder)
    except OSError:  # it is no folder, and nothing will be written
        return False


def _leave_network() -> bool:
    """Move to a network of one's own, that has no interface up.

    Privileged processes may do so at once; others where the kernel lets them have a user namespace.
    """
    return any(_libc.unshare(f) == 0 for f in (_CLONE_NEWNET, _CLONE_NEWUSER | _CLONE_NEWNET))
