"""`loraplex adapters`: upload, list and remove a tenant's adapters, and move their aliases."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from loraplex.platform.cli import aliases
from loraplex.platform.cli.client import (
    DEFAULT_DATA_DIR,
    UPLOAD_TIMEOUT_S,
    ApiKey,
    DataDir,
    Json,
    Role,
    Url,
    connect,
    fail,
    show,
)

app = typer.Typer(help="Upload, list and remove adapters (tenant).", no_args_is_help=True)
app.add_typer(aliases.app, name="alias")

COLUMNS = ("name", "version", "rank", "bytes", "digest", "created_at")
FILES = ("adapter_config.json", "adapter_model.safetensors")


@app.command()
def push(
    name: Annotated[str, typer.Argument(help="The name that requests will use as their model.")],
    source: Annotated[
        Path, typer.Argument(help="A PEFT adapter: its directory, or a zip of it.", exists=True)
    ],
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: Json = False,
) -> None:
    """Upload an adapter; a name that exists gets its next version."""
    api = connect(url, api_key, data_dir, Role.TENANT)
    with _sending(source) as files:
        answer = api.call(
            "POST", "/v1/adapters", data={"name": name}, files=files, timeout=UPLOAD_TIMEOUT_S
        )
    show(answer, as_json, COLUMNS)


@contextmanager
def _sending(source: Path) -> Iterator[list[tuple[str, Any]]]:
    """The multipart files of a source, whose reading moves a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    paths = _paths(source)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress, ExitStack() as stack:
        task = progress.add_task("uploading", total=sum(p.stat().st_size for p in paths.values()))

        def advance(count: int) -> None:
            progress.advance(task, count)
            if progress.finished:
                progress.update(task, description="checking and compiling")

        opened = {part: stack.enter_context(path.open("rb")) for part, path in paths.items()}
        yield [(part, (paths[part].name, Counted(file, advance))) for part, file in opened.items()]


class Counted:
    """A binary file that tells how many bytes were read of it."""

    def __init__(self, file: IO[bytes], advance: Callable[[int], None]) -> None:
        self._file, self._advance = file, advance

    def fileno(self) -> int:
        """The file's descriptor, by which its size is found."""
        return self._file.fileno()

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes and count them."""
        data = self._file.read(size)
        self._advance(len(data))
        return data


def _paths(source: Path) -> dict[str, Path]:
    """The upload's parts by their form name: one archive, or the directory's two files."""
    if source.is_file():
        return {"archive": source}
    missing = [name for name in FILES if not (source / name).is_file()]
    if missing:
        fail(f"{source} is no PEFT adapter: {' and '.join(missing)} not found in it.")
    return {name.partition(".")[0]: source / name for name in FILES}


@app.command("list")
def list_adapters(
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: Json = False,
) -> None:
    """List the tenant's adapters, each with its newest version."""
    api = connect(url, api_key, data_dir, Role.TENANT)
    show(api.list("/v1/adapters"), as_json, COLUMNS)


@app.command()
def rm(
    name: Annotated[str, typer.Argument(help="The adapter's name.")],
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Remove an adapter with all its versions."""
    connect(url, api_key, data_dir, Role.TENANT).call("DELETE", f"/v1/adapters/{name}")
    typer.echo(f"{name} is removed")
