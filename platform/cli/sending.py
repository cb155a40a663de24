"""Sends an adapter as an upload in parts: with progress, and on from where a connection broke.

An upload that could not be sent to its end is `Interrupted`: another run of the command goes on.

Knows the routes of uploads; refuses to know commands and their options.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import quote

import typer

from loraplex.platform.cli.client import Api, Row, error_message, fail

if TYPE_CHECKING:
    import httpx

FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
PIECE: Final = 8 << 20
PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)  # before each new attempt
POLL_S: Final = 0.3
OPEN: Final = ("uploading", "validating")
GONE: Final = "The server does not answer."
CLOSED: Final = (404, 409, 413)  # statuses after which nothing more can be sent


class Interrupted(Exception):
    """Not all could be sent, but it may be later; the message says why."""


def parts_of(source: Path) -> dict[str, Path]:
    """The parts of a source: one archive, or a directory's two files; ends without them."""
    if source.is_file():
        return {"archive": source}
    missing = [name for name in FILES if not (source / name).is_file()]
    if missing:
        fail(f"{source} is no PEFT adapter: {' and '.join(missing)} not found in it.")
    return {name.partition(".")[0]: source / name for name in FILES}


def begin(api: Api, wish: Mapping[str, Any], parts: Mapping[str, Path]) -> Row:
    """Begin an upload, and tell what its parts will be; returns it."""
    sizes = {part: path.stat().st_size for part, path in parts.items()}
    sha256 = {part: _digest(path) for part, path in parts.items()}
    begun: Row = api.call("POST", "/v1/uploads", json={**wish, "sizes": sizes, "sha256": sha256})
    return begun


def take_up(api: Api, upload_id: str, name: str, parts: Mapping[str, Path]) -> Row:
    """An upload that was begun before; ends unless it is of this name, and of these files."""
    shown: Row = api.call("GET", f"/v1/uploads/{quote(upload_id, safe='')}")
    if shown["name"] != name:
        fail(f"The upload {upload_id} is of the adapter {shown['name']!r}, not of {name!r}.")
    if shown["state"] == "uploading":
        for part, path in parts.items():
            told = api.call("GET", f"/v1/uploads/{upload_id}/parts/{part}")
            if not _is_the_same(path, told):
                fail(
                    f"{path} is not the file that the upload {upload_id} was begun with. Upload it "
                    "without --resume."
                )
    return shown


def send(api: Api, upload: Row, parts: Mapping[str, Path]) -> dict[str, Any]:
    """Send what an upload lacks of its parts and finish it; returns it once it is checked.

    Raises `Interrupted`.
    """
    here = f"/v1/uploads/{upload['id']}"
    if upload["state"] == "uploading":
        _send_all(api, here, parts, {part["part"]: part["offset"] for part in upload["parts"]})
        _again(lambda: api.send("POST", f"{here}/finish"))
    return follow(api, here)


def _send_all(api: Api, here: str, parts: Mapping[str, Path], offsets: Mapping[str, int]) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        total, there = sum(p.stat().st_size for p in parts.values()), sum(offsets.values())
        task = progress.add_task("uploading", total=total, completed=there)
        for part, path in parts.items():
            with path.open("rb") as file:
                at = offsets.get(part, 0)
                _send(api, f"{here}/parts/{part}", file, at, lambda n: progress.advance(task, n))


def _is_the_same(path: Path, told: Row) -> bool:
    """Whether a file may be the one of which the server has a part."""
    size = path.stat().st_size
    if told["size"] not in (None, size) or told["offset"] > size:
        return False
    return told["sha256"] in (None, _digest(path))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def follow(api: Api, here: str) -> dict[str, Any]:
    """Print each check of an upload as it is made; returns the upload once it is closed."""
    told = 0
    while True:
        shown = _again(lambda: api.send("GET", here)).json()
        for line in check_lines(shown["checks"][told:]):
            typer.echo(line, err=True)
        told = len(shown["checks"])
        if shown["state"] not in OPEN or (shown["state"] == "uploading" and shown["reasons"]):
            return dict(shown)
        time.sleep(POLL_S)


def check_lines(checks: list[Mapping[str, Any]]) -> Iterator[str]:
    """Checks as lines to read."""
    for check in checks:
        yield f"{check['name']}: {check['state']} ({check['seconds']:.1f} s)"


def _send(
    api: Api, path: str, file: IO[bytes], offset: int, advance: Callable[[int], None]
) -> None:
    """Send a file from `offset` on, each piece from where the server says that the part ends."""
    size, pauses = file.seek(0, 2), iter(PAUSES_S)
    while True:
        file.seek(offset)
        before, offset = offset, _put(api, path, file.read(PIECE), offset)
        advance(offset - before)
        if offset >= size:
            return
        if offset > before:
            pauses = iter(PAUSES_S)
        else:
            _pause(pauses)


def _put(api: Api, path: str, piece: bytes, offset: int) -> int:
    """Send one piece, and return where the part ends now: it may have come to less."""
    import httpx

    headers = {"upload-offset": str(offset), "content-type": "application/octet-stream"}
    try:
        response = api.send("PUT", path, content=piece, headers=headers)
    except httpx.TransportError:
        response = None
    if response is not None and response.is_success:
        return int(response.headers["upload-offset"])
    if response is not None and not _may_pass(response):
        _stop(response)
    return int(_again(lambda: api.send("GET", path)).headers["upload-offset"])


def _again(send: Callable[[], "httpx.Response"]) -> "httpx.Response":
    """Send a request that may be sent twice, again and again while that may help."""
    import httpx

    pauses = iter(PAUSES_S)
    while True:
        try:
            response = send()
        except httpx.TransportError:
            response = None
        if response is not None and response.is_success:
            return response
        if response is not None and not _may_pass(response):
            _stop(response)
        _pause(pauses)


def _pause(pauses: Iterator[float]) -> None:
    """Wait before another attempt; raises `Interrupted` when there were enough."""
    pause = next(pauses, None)
    if pause is None:
        raise Interrupted(GONE)
    time.sleep(pause)


def _stop(response: "httpx.Response") -> NoReturn:
    """End the command, or raise `Interrupted` where another run may go on."""
    if response.status_code in CLOSED:
        fail(error_message(response))
    raise Interrupted(error_message(response))


def _may_pass(response: "httpx.Response") -> bool:
    """Whether another attempt may fare better, at the part's true offset."""
    if response.status_code == 409:
        return "upload-offset" in response.headers or "retry-after" in response.headers
    return response.status_code >= 500 and response.headers.get("x-should-retry") != "false"
