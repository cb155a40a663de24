"""Builds the native step with the machine's compiler at first use, and keeps what it built.

One shared object per instruction set, in a folder of the user's own, named by a hash of all that
goes into it: sources, options, compiler. Of processes that need it at once one compiles, and the
others wait and find it. This file knows compilers and files; it refuses to know what the step
computes.
"""

import fcntl
import functools
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from loraplex.kernels.cpu.isa import Isa

SOURCES = Path(__file__).parent
OPTIONS = (
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno"),
)
LINK = ("-shared", "-pthread")
COMPILERS = ("g++", "clang++", "c++")
CACHE_VARIABLE = "LORAPLEX_CACHE"
TIMEOUT_S = 300.0

log = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """The native step cannot be built; the message says why."""


class NoCompiler(BuildError):
    """There is no C++ compiler."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its path, and the first line that it says of itself."""

    path: str
    version: str


@functools.cache
def find_compiler() -> Compiler:
    """The program in `CXX`, else the first of `COMPILERS` that is there; raises `NoCompiler`."""
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        path = shutil.which(name)
        version = path and _version(path)
        if path and version:
            return Compiler(path, version)
    if named:
        raise NoCompiler(f"CXX is {named!r}, which does not run")
    raise NoCompiler(f"no C++ compiler was found ({', '.join(COMPILERS)}); install g++, or set CXX")


def build(isa: Isa, sources: Path = SOURCES) -> Path:
    """The shared object for `isa`, compiled now unless it was before; raises `BuildError`."""
    compiler = find_compiler()
    options = (*OPTIONS, *isa.options)
    target = cache_folder() / f"step-{isa.name}-{_key(compiler, options, sources)}.so"
    if not target.exists():
        with _alone(target.parent):
            if not target.exists():
                started = time.monotonic()
                log.info("compiling the native step for %s with %s, once", isa.name, compiler.path)
                _compile(compiler, options, sources, target)
                log.info("compiled in %.1f s: %s", time.monotonic() - started, target)
    return target


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a folder against other builders; a file system without locks lets all build."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def cache_folder() -> Path:
    """The folder of built objects, which only its owner may write; raises `BuildError`."""
    folder = _cache_root() / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError) as error:
        raise BuildError(f"{folder} cannot be made: {error}; set {CACHE_VARIABLE}") from error
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"{folder} can be written by others; set {CACHE_VARIABLE} to a private one"
        )
    return folder


def _cache_root() -> Path:
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "loraplex"


def _key(compiler: Compiler, options: tuple[str, ...], sources: Path) -> str:
    digest = hashlib.sha256(repr((compiler, options, LINK)).encode())
    for path in sorted([*sources.glob("*.h"), *sources.glob("*.cpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _compile(compiler: Compiler, options: tuple[str, ...], sources: Path, target: Path) -> None:
    """Compile all parts, as many at once as there are processors, and link them."""
    parts = sorted(sources.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        objects = [folder / f"{part.stem}.o" for part in parts]
        with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="compile") as pool:
            list(pool.map(functools.partial(_make, compiler, (*options, "-c")), parts, objects))
        _make(compiler, (*LINK, *map(str, objects[1:])), objects[0], folder / target.name)
        (folder / target.name).replace(target)


def _make(compiler: Compiler, options: tuple[str, ...], source: Path, target: Path) -> None:
    command = [compiler.path, *options, str(source), "-o", str(target)]
    try:
        done = _run(command)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler.path} cannot be run: {error}") from error
    if done.returncode:
        log.debug("%s said:\n%s", compiler.path, done.stderr)
        raise BuildError(f"{compiler.path} cannot compile the native step: {_first_error(done)}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler, which says what is wrong in English."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        env=os.environ | {"LC_ALL": "C"},
    )


def _first_error(done: subprocess.CompletedProcess[str]) -> str:
    """The line that names a compiler's first error, and how many more there are."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line] or lines[:1]
    if not errors:
        return f"it ended with {done.returncode}"
    if len(errors) == 1:
        return errors[0]
    return f"{errors[0]} (and {len(errors) - 1} more, in the log at debug level)"


def _version(path: str) -> str:
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0]
