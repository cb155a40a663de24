"""`loraplex adapters versions`: list, retire, restore and delete an adapter's versions."""

from typing import Annotated, Any
from urllib.parse import quote

import typer

from loraplex.platform.cli.client import Api, Role, asks

app = typer.Typer(help="List, retire, restore and delete versions.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The adapter's name.")]
Number = Annotated[int, typer.Argument(min=1, help="The version's number.")]
COLUMNS = ("id", "dtype", "rank", "bytes", "digest", "created_at", "created_by", "retired_at")


@app.command("list")
@asks(Role.TENANT, COLUMNS)
def list_versions(api: Api, name: Name) -> Any:
    """List an adapter's versions, the newest first."""
    return api.list(_path(name))


@app.command()
@asks(Role.TENANT, (*COLUMNS, "base"))
def show(api: Api, name: Name, number: Number) -> Any:
    """Show one version; --json has its upload's report too."""
    return api.call("GET", _path(name, number))


@app.command()
@asks(Role.TENANT, COLUMNS)
def retire(api: Api, name: Name, number: Number) -> Any:
    """Keep the bare NAME from meaning this version; NAME@NUMBER and its aliases go on."""
    return api.call("POST", f"{_path(name, number)}/retire")


@app.command()
@asks(Role.TENANT, COLUMNS)
def restore(api: Api, name: Name, number: Number) -> Any:
    """Undo retire: the bare NAME means this version again, if it is the newest."""
    return api.call("POST", f"{_path(name, number)}/restore")


@app.command()
@asks(Role.TENANT)
def rm(api: Api, name: Name, number: Number) -> str:
    """Delete one version, unless an alias means it."""
    api.call("DELETE", _path(name, number))
    return f"{name}@{number} is removed"


def _path(name: str, *number: int) -> str:
    return "/".join(["/v1/adapters", quote(name, safe=""), "versions", *map(str, number)])
