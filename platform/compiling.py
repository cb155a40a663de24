"""Runs the adapter compiler in a process of its own: one at a time, bounded in time and output.

Knows the compiler's command line and its JSON; refuses to know PEFT, tensors, HTTP and tenants.
"""

import contextlib
import errno
import logging
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.abc
import msgspec

from loraplex.platform import tether
from loraplex.platform.errors import AdapterRejected, StorageFull

MODULE: Final = "loraplex.engine.compile_adapter"
REJECTED: Final = 3  # the compiler's exit code when the adapter is at fault
MAX_OUTPUT_BYTES: Final = 4 << 20
PASSED_ON: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")

log = logging.getLogger("loraplex.uploads")


class Compiled(msgspec.Struct, frozen=True):
    """What the compiler says of an image that it wrote; `bytes` is the file's size.

    `report` is all that it said, as plain JSON values.
    """

    digest: str
    bytes: int
    rank: int
    invocation: tuple[int, ...] = ()
    report: dict[str, Any] = {}


class _Reason(msgspec.Struct, frozen=True):
    code: str
    message: str


class _Rejection(msgspec.Struct, frozen=True):
    reasons: tuple[_Reason, ...]


class CompilerFailed(RuntimeError):
    """The compiler broke its contract: a fault of ours, not the adapter's."""


class AdapterCompiler:
    """Compiles PEFT directories to images for one base, whose `base.json` is `base_file`.

    Its process ends with this one, whatever becomes of it.
    """

    def __init__(
        self, base_file: Path, *, timeout_s: float, command: tuple[str, ...] | None = None
    ) -> None:
        """`command` is what runs the compiler, by default this Python's own."""
        self._base_file, self._timeout_s = base_file, timeout_s
        self._command = command or (sys.executable, "-I", "-m", MODULE)
        self._turn = anyio.Lock()

    async def compile(self, source: Path, image: Path, dtype: str = "bf16") -> Compiled:
        """Compile the adapter in `source` to the file `image`, when it is this one's turn.

        Raises `AdapterRejected` with every reason, `StorageFull`, or `CompilerFailed`. Cancelling
        it kills the process.
        """
        async with self._turn:
            with anyio.move_on_after(self._timeout_s) as limit:
                code, output = await self._run(source, image, dtype)
        if limit.cancelled_caught:
            raise AdapterRejected(
                [("too_slow", f"Checking the adapter took longer than {self._timeout_s:g} s.")]
            )
        return _read(code, output)

    async def _run(self, source: Path, image: Path, dtype: str) -> tuple[int, bytes]:
        command = [sys.executable, "-IS", tether.__file__, str(os.getpid()), *self._command]
        command += [str(source), "--base", str(self._base_file)]
        command += ["--out", str(image), "--dtype", dtype]
        command += ["--seconds", str(math.ceil(self._timeout_s))]
        with image.with_suffix(".log").open("w+b") as complaints:
            process = await anyio.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stderr=complaints,
                cwd=source,
                env=_environment(),
                start_new_session=True,
            )
            try:
                output = await _read_output(process)
                code = await process.wait()
            finally:
                await _end(process)
            if code not in (0, REJECTED):
                complaints.seek(-min(4096, complaints.tell()), os.SEEK_CUR)
                _complain(code, complaints.read())
        return code, output


def _complain(code: int, said: bytes) -> None:
    """Log how the compiler failed; raises `StorageFull` where it says that the disk is full."""
    log.error("the compiler ended with %d: %r", code, said)
    if any(os.strerror(number).encode() in said for number in (errno.ENOSPC, errno.EDQUOT)):
        raise StorageFull


def _environment() -> dict[str, str]:
    """No secrets: the compiler reads what strangers send."""
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return kept | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


async def _read_output(process: anyio.abc.Process) -> bytes:
    output = bytearray()
    if process.stdout is not None:
        async for part in process.stdout:
            output += part
            if len(output) > MAX_OUTPUT_BYTES:
                raise CompilerFailed("the compiler says too much")
    return bytes(output)


async def _end(process: anyio.abc.Process) -> None:
    """Kill the process, and what it may have started, unless it has ended."""
    with anyio.CancelScope(shield=True):
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.aclose()


def _read(code: int, output: bytes) -> Compiled:
    try:
        if code == 0:
            said = msgspec.json.decode(_last_line(output), type=dict[str, Any])
            return msgspec.convert(said | {"report": said}, Compiled)
        if code == REJECTED:
            found = msgspec.json.decode(_last_line(output), type=_Rejection)
            raise AdapterRejected([(reason.code, reason.message) for reason in found.reasons])
    except msgspec.DecodeError as error:
        raise CompilerFailed("the compiler's answer cannot be read") from error
    if code < 0:
        raise AdapterRejected(
            [("too_costly", "Checking the adapter took more time or memory than is allowed.")]
        )
    raise CompilerFailed(f"the compiler ended with exit code {code}")


def _last_line(output: bytes) -> bytes:
    lines = output.strip().splitlines()
    return lines[-1] if lines else b""
