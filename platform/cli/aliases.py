"""`loraplex adapters alias`: move the names that mean one version of an adapter.

A command that moves an alias looks first at which revision it is, or is told with `--revision`
what its caller has seen; if somebody else moves it meanwhile, nothing happens.
"""

from typing import Annotated
from urllib.parse import quote

import typer

from loraplex.platform.cli.client import (
    DEFAULT_DATA_DIR,
    Api,
    ApiKey,
    DataDir,
    Json,
    Role,
    Url,
    connect,
    show,
)

app = typer.Typer(help="Move, roll back and list an adapter's aliases.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The adapter's name.")]
Alias = Annotated[str, typer.Argument(help="The alias, such as prod.")]
Revision = Annotated[
    int | None,
    typer.Option(
        min=0, help="Do it at this revision only (0: not there); by default at the one it has now."
    ),
]
COLUMNS = ("id", "version", "revision", "moved_at")
MOVES = ("revision", "version", "moved_by", "moved_at")


@app.command("set")
def set_alias(
    name: Name,
    alias: Alias,
    version: Annotated[int, typer.Argument(min=1, help="The version that it shall mean.")],
    revision: Revision = None,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: Json = False,
) -> None:
    """Let NAME@ALIAS mean a version; an alias that is not there is made."""
    api = connect(url, api_key, data_dir, Role.TENANT)
    body = {"version": version, "revision": _seen(api, name, alias, revision)}
    show(api.call("PUT", _path(name, alias), json=body), as_json, COLUMNS)


@app.command()
def rollback(
    name: Name,
    alias: Alias,
    revision: Revision = None,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: Json = False,
) -> None:
    """Take the last move of an alias back."""
    api = connect(url, api_key, data_dir, Role.TENANT)
    body = {"revision": _seen(api, name, alias, revision)}
    show(api.call("POST", f"{_path(name, alias)}/rollback", json=body), as_json, COLUMNS)


@app.command()
def history(
    name: Name,
    alias: Alias,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: Json = False,
) -> None:
    """List the moves of an alias, the newest first, also of one that was removed."""
    api = connect(url, api_key, data_dir, Role.TENANT)
    show(api.list(f"{_path(name, alias)}/history"), as_json, MOVES)


@app.command("list")
def list_aliases(
    name: Name,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: Json = False,
) -> None:
    """List an adapter's aliases."""
    api = connect(url, api_key, data_dir, Role.TENANT)
    show(api.list(_path(name)), as_json, COLUMNS)


@app.command()
def rm(
    name: Name,
    alias: Alias,
    revision: Revision = None,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Remove an alias; its history stays."""
    api = connect(url, api_key, data_dir, Role.TENANT)
    seen = _seen(api, name, alias, revision)
    api.call("DELETE", _path(name, alias), params={"revision": seen})
    typer.echo(f"{name}@{alias} is removed")


def _seen(api: Api, name: str, alias: str, given: int | None) -> int:
    """The revision to act at: the one given, else the one that the alias has now."""
    if given is not None:
        return given
    revisions = {row["alias"]: row["revision"] for row in api.list(_path(name))}
    return int(revisions.get(alias, 0))


def _path(name: str, *alias: str) -> str:
    return "/".join(
        ["/v1/adapters", quote(name, safe=""), "aliases", *(quote(a, "") for a in alias)]
    )
