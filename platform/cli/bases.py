"""`loraplex bases`: the base models that were served, and versions compiled for another one."""

from typing import Any

import typer

from loraplex.platform.cli.client import Api, Role, asks

app = typer.Typer(help="List served bases, and what was compiled for others.", no_args_is_help=True)

COLUMNS = ("name", "variant", "serving", "versions", "first_served_at", "last_served_at", "id")


@app.command("list")
@asks(Role.TENANT, COLUMNS)
def list_bases(api: Api) -> Any:
    """List the bases that were served here, each with how many versions were made for it."""
    return api.list("/v1/bases")


@app.command()
@asks(Role.TENANT, ("id", "base"))
def stale(api: Api) -> Any:
    """List versions that cannot be served, because they were compiled for another base."""
    return api.list("/v1/bases/stale")
