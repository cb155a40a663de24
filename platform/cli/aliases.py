"""`loraplex adapters alias`: move the names that mean one version of an adapter.

A command that moves an alias looks first at which revision it is, or is told with `--revision`
what its caller has seen; if somebody else moves it meanwhile, nothing happens.
"""

from typing import Annotated, Any
from urllib.parse import quote

import typer

from loraplex.platform.cli.client import Api, Role, asks, fail

app = typer.Typer(
    help="Move, split, roll back and list an adapter's aliases.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="The adapter's name.")]
Alias = Annotated[str, typer.Argument(help="The alias, such as prod.")]
Revision = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Only if the alias is at this revision (0: not there); without it, whatever it is at.",
    ),
]
COLUMNS = ("id", "version", "canary", "revision", "moved_at")
MOVES = ("revision", "version", "canary", "moved_by", "moved_at")


@app.command("set")
@asks(Role.TENANT, COLUMNS)
def set_alias(
    api: Api,
    name: Name,
    alias: Alias,
    version: Annotated[int, typer.Argument(min=1, help="The version that the alias is to mean.")],
    canary: Annotated[
        int | None, typer.Option(min=1, help="A version for some of the conversations.")
    ] = None,
    percent: Annotated[
        float | None, typer.Option(help="How many of a hundred conversations get the canary.")
    ] = None,
    revision: Revision = None,
) -> Any:
    """Make NAME@ALIAS mean a version; an alias that is not there is created.

    With --canary and --percent, part of the conversations get another version.
    """
    if (canary is None) != (percent is None):
        fail("--canary and --percent go together.")
    split = None if canary is None else {"version": canary, "percent": percent}
    body = {"version": version, "canary": split, "revision": _seen(api, name, alias, revision)}
    return api.call("PUT", _path(name, alias), json=body)


@app.command()
@asks(Role.TENANT, COLUMNS)
def promote(api: Api, name: Name, alias: Alias, revision: Revision = None) -> Any:
    """Make the canary what NAME@ALIAS means to all."""
    return _move(api, name, alias, "promote", revision)


@app.command()
@asks(Role.TENANT, COLUMNS)
def abort(api: Api, name: Name, alias: Alias, revision: Revision = None) -> Any:
    """Drop the canary of an alias."""
    return _move(api, name, alias, "abort", revision)


@app.command()
@asks(Role.TENANT, COLUMNS)
def rollback(api: Api, name: Name, alias: Alias, revision: Revision = None) -> Any:
    """Take the last move of an alias back."""
    return _move(api, name, alias, "rollback", revision)


@app.command()
@asks(Role.TENANT, MOVES)
def history(api: Api, name: Name, alias: Alias) -> Any:
    """List the moves of an alias, the newest first, also of one that was removed."""
    return api.list(f"{_path(name, alias)}/history")


@app.command("list")
@asks(Role.TENANT, COLUMNS)
def list_aliases(api: Api, name: Name) -> Any:
    """List an adapter's aliases."""
    return api.list(_path(name))


@app.command()
@asks(Role.TENANT)
def rm(api: Api, name: Name, alias: Alias, revision: Revision = None) -> str:
    """Remove an alias; its history stays."""
    seen = _seen(api, name, alias, revision)
    api.call("DELETE", _path(name, alias), params={"revision": seen})
    return f"{name}@{alias} is removed"


def _move(api: Api, name: str, alias: str, verb: str, revision: int | None) -> Any:
    body = {"revision": _seen(api, name, alias, revision)}
    return api.call("POST", f"{_path(name, alias)}/{verb}", json=body)


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
