"""Runs a program that ends when its parent does: `python tether.py PARENT_PID PROGRAM ARGUMENT…`.

On Linux the kernel sends SIGTERM to the program when the parent's thread that started it ends, so
start it from the main thread. It needs nothing but the standard library and becomes the program.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then become the program."""
    parent, program = int(sys.argv[1]), sys.argv[2]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before it could be watched
        sys.exit(1)
    os.execv(program, sys.argv[2:])  # noqa: S606 (no shell is meant)


if __name__ == "__main__":
    main()
