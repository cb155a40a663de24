"""Which kernels this process computes with, chosen once: `triton`, `cpu` or `reference`.

`triton` needs a GPU that torch can use, `cpu` a C++ compiler for the native step; `reference` is
plain torch and runs anywhere. `LORAPLEX_BACKEND` overrides the choice. torch is imported only where
a GPU's device file is there. `python -m loraplex.kernels.dispatch` prints the choice and why.
"""

import functools
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from loraplex.kernels.cpu.build import BuildError, cache_folder, find_compiler
from loraplex.kernels.cpu.isa import IsaError, candidates

Name = Literal["triton", "cpu", "reference"]
VARIABLE = "LORAPLEX_BACKEND"
GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
OLDEST = (8, 0)  # compute capability: bf16 and asynchronous copies
LOSS = "prompts run about twice and decoding eight times slower than with the native step"


class BackendError(RuntimeError):
    """A backend was asked for that this machine cannot run; the message says why."""


@dataclass(frozen=True)
class Backend:
    """A backend, why it was chosen, and the set of instructions where it depends on one."""

    name: Name
    why: str
    isa: str = ""


class _Missing(Exception):
    """Why a backend cannot be had."""


@functools.cache
def choose(override: str | None = None) -> Backend:
    """The backend of this process; `override` and `LORAPLEX_BACKEND` name one to insist on.

    Raises `BackendError` when that one cannot be had.
    """
    wanted = override or os.environ.get(VARIABLE)
    if wanted:
        return _insist(wanted)
    reasons = []
    for name in get_args(Name):
        try:
            backend = _FINDERS[name]()
        except _Missing as missing:
            reasons.append(str(missing))
            continue
        return Backend(name, "; ".join([*reasons, backend.why]), backend.isa)
    raise AssertionError("the reference is always there")


def is_insisted_on() -> bool:
    """Whether the environment names the backend, so that another is no substitute."""
    return bool(os.environ.get(VARIABLE))


def _insist(wanted: str) -> Backend:
    names = get_args(Name)
    if wanted not in names:
        raise BackendError(f"{VARIABLE} is {wanted!r}; give one of {', '.join(names)}")
    try:
        backend = _FINDERS[cast(Name, wanted)]()
    except _Missing as missing:
        raise BackendError(f"{VARIABLE} is {wanted}, but {missing}") from missing
    return Backend(backend.name, f"{VARIABLE} asks for it", backend.isa)


def _triton() -> Backend:
    if not any(path.exists() for path in GPU_FILES):
        raise _Missing("no GPU was found")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise _Missing("TRITON_INTERPRET is set, so kernels would not run on the GPU")
    if importlib.util.find_spec("triton") is None:
        raise _Missing("triton is not installed")
    _check_launchers()
    import torch

    if not torch.cuda.is_available():
        raise _Missing("torch cannot use the GPU")
    if not torch.version.hip and torch.cuda.get_device_capability() < OLDEST:
        raise _Missing("the GPU's compute capability is below 8.0, which the kernels need")
    return Backend("triton", f"torch can use {torch.cuda.get_device_name()}")


def _check_launchers() -> None:
    """Triton compiles what launches a kernel in C, against Python's headers."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise _Missing("triton finds no C compiler, which it needs: install gcc, or set CC")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        raise _Missing("triton needs Python's headers: install python3-dev")


def _cpu() -> Backend:
    if not sys.platform.startswith("linux"):
        raise _Missing("the native step needs Linux")
    try:
        compiler, isa = find_compiler(), candidates()[0].name
        cache_folder()
    except BuildError as error:
        raise _Missing(str(error)) from error
    except IsaError as error:
        raise BackendError(str(error)) from error
    return Backend("cpu", f"{compiler.version} compiles the native step for {isa}", isa)


def _reference() -> Backend:
    return Backend("reference", LOSS)


_FINDERS: dict[Name, Callable[[], Backend]] = {
    "triton": _triton,
    "cpu": _cpu,
    "reference": _reference,
}


def main() -> int:
    """Print the choice; returns the exit code."""
    try:
        found = choose()
    except BackendError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{found.name}: {found.why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
