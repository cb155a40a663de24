"""What must hold before the platform starts, each failure as one sentence that says what to do.

Knows the data directory, the port and the model as a user names them; refuses to know what is
built on them.
"""

import asyncio
import errno
import fcntl
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
from pydantic import ValidationError

from loraplex.engine.images import BaseManifest
from loraplex.platform.config_file import ConfigFileError, origins
from loraplex.platform.console import Report
from loraplex.platform.settings import DataDirError, Settings

LOCK_NAME = "serve.lock"
BASE_NAME = "base.json"
ENGINE_SOCKET = "engine.sock"


class StartError(Exception):
    """The platform cannot start; the message is for whoever typed the command."""


def read_settings(**given: Any) -> Settings:
    """Return the settings of file and environment, with those given (and not None) in their place.

    Raises `StartError` for the first that cannot be.
    """
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ConfigFileError as error:
        raise StartError(str(error)) from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = _named(tuple(map(str, first["loc"])), given)
        raise StartError(f"{where} cannot be used: {first['msg']}.") from error


def _named(path: tuple[str, ...], given: Mapping[str, Any]) -> str:
    """A setting as its source calls it: an option's variable, or a key of the file."""
    source = origins(Settings, given)[path[0]]
    if source in ("option", "default") or source.startswith("LORAPLEX_"):
        return f"LORAPLEX_{'__'.join(path).upper()}"
    return f"{path[0]} of {source}"


@contextmanager
def claim(settings: Settings) -> Iterator[None]:
    """Create the data directory and hold it for one server; raises `StartError`.

    The kernel drops the lock with the process, so a crash leaves nothing to clean up.
    """
    try:
        settings.open_data_dir()
    except DataDirError as error:
        raise StartError(str(error)) from error
    with _lock_file(settings).open("a") as lock:
        if not _take(lock):
            raise StartError(
                f"Another `loraplex serve` is running on {settings.data_dir}; "
                "stop it, or choose another with --data-dir or DATA_DIR."
            )
        yield


def is_served(settings: Settings) -> bool:
    """Whether a server holds the data directory now."""
    try:
        with _lock_file(settings).open() as lock:
            return not _take(lock)
    except OSError:
        return False


def base_dir(settings: Settings) -> Path:
    """Return the folder of the prepared base, absolute."""
    return settings.data_dir.expanduser().absolute() / "base"


def _lock_file(settings: Settings) -> Path:
    return settings.data_dir.expanduser() / LOCK_NAME


def _take(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """Take the port, so that a conflict is seen before the long steps; raises `StartError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"The host {host} cannot be listened on: {error.strerror}.") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise StartError(_bind_error(host, port, error)) from error
        yield listener


def _bind_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} is in use; stop what uses it, or choose another with --port or PORT."
    if error.errno == errno.EACCES:
        return f"Port {port} needs root; choose one above 1023 with --port or PORT."
    return f"{host} port {port} cannot be listened on: {error.strerror}."


def choose_model(settings: Settings, out: Path) -> tuple[str, str | None]:
    """Return the model to prepare and its name: the one asked for, or that of an earlier start.

    The name is None where the model's own is meant. Raises `StartError` when there is no model.
    """
    if settings.model:
        return settings.model, None
    try:
        kept = read_base(out)
    except (OSError, msgspec.DecodeError):
        raise StartError(
            "No model is chosen: give --model, LORAPLEX_MODEL or MODEL a Hugging Face id, "
            "a model directory or a .gguf file (`make serve` fetches a demo base)."
        ) from None
    return kept.path, kept.name


def read_base(folder: Path) -> BaseManifest:
    """Read what `prepare` wrote; raises `OSError` or `msgspec.DecodeError`."""
    return msgspec.json.decode((folder / BASE_NAME).read_bytes(), type=BaseManifest)


async def prepare(model: str, out: Path, name: str | None, report: Report) -> BaseManifest:
    """Fetch, convert and check the base in a process of its own; raises `StartError`."""
    command = [sys.executable, "-m", "loraplex.engine.prepare", model, "--out", str(out)]
    command += ["--name", name] if name else []
    process = await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.PIPE, start_new_session=True
    )
    lines: list[str] = []
    try:
        while process.stderr and (raw := await process.stderr.readline()):
            lines.append(raw.decode(errors="replace").rstrip())
            report(lines[-1])
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        raise StartError(f"The model cannot be prepared: {_last(lines, code)}.")
    return read_base(out)


def _last(lines: list[str], code: int) -> str:
    return lines[-1].rstrip(".") if lines else f"exit code {code}"
