"""Sends an adapter as an upload in parts: with progress, and on from where a connection broke.

Knows the routes of uploads; refuses to know commands and their options.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import typer

from loraplex.platform.cli.client import Api, error_message, fail

if TYPE_CHECKING:
    import httpx

FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
PIECE: Final = 8 << 20
PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)  # before each new attempt
POLL_S: Final = 0.3
OPEN: Final = ("uploading", "validating")
GONE: Final = "The server does not answer. `loraplex uploads list` shows what has come to it."


def parts_of(source: Path) -> dict[str, Path]:
    """The parts of a source: one archive, or a directory's two files; ends without them."""
    if source.is_file():
        return {"archive": source}
    missing = [name for name in FILES if not (source / name).is_file()]
    if missing:
        fail(f"{source} is no PEFT adapter: {' and '.join(missing)} not found in it.")
    return {name.partition(".")[0]: source / name for name in FILES}


def upload(api: Api, wish: Mapping[str, Any], parts: Mapping[str, Path]) -> dict[str, Any]:
    """Begin an upload, send its parts and finish it; returns it as it is once it is checked."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    sizes = {part: path.stat().st_size for part, path in parts.items()}
    begun = api.call("POST", "/v1/uploads", json={**wish, "sizes": sizes})
    here = f"/v1/uploads/{begun['id']}"
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("uploading", total=sum(sizes.values()))
        for part, path in parts.items():
            with path.open("rb") as file:
                _send(api, f"{here}/parts/{part}", file, lambda n: progress.advance(task, n))
    _again(lambda: api.send("POST", f"{here}/finish"))
    return follow(api, begun["id"])


def follow(api: Api, upload_id: str) -> dict[str, Any]:
    """Print each check of an upload as it is made; returns the upload once it is closed."""
    told = 0
    while True:
        shown = _again(lambda: api.send("GET", f"/v1/uploads/{upload_id}")).json()
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


def _send(api: Api, path: str, file: IO[bytes], advance: Callable[[int], None]) -> None:
    """Send a file piece by piece, each from where the server says that the part ends."""
    offset, size, pauses = 0, file.seek(0, 2), iter(PAUSES_S)
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
        fail(error_message(response))
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
            fail(error_message(response))
        _pause(pauses)


def _pause(pauses: Iterator[float]) -> None:
    """Wait before another attempt, or end when there were enough."""
    pause = next(pauses, None)
    if pause is None:
        fail(GONE)
    time.sleep(pause)


def _may_pass(response: "httpx.Response") -> bool:
    """Whether another attempt may fare better, at the part's true offset."""
    if response.status_code == 409:
        return "upload-offset" in response.headers or "retry-after" in response.headers
    return response.status_code >= 500 and response.headers.get("x-should-retry") != "false"
