"""`loraplex bases`: the base models that were served, and versions compiled for another one."""

from typing import Any

import typer

from loraplex.platform.cli.client import Api, Role, asks

app = typer.Typer(
    help="List the bases served here, and versions compiled for another one.", no_args_is_help=True
)

COLUMNS = ("name", "variant", "serving", "versions", "first_served_at", "last_served_at", "id")


@app.command("list")
@asks(Role.TENANT, COLUMNS)
def list_bases(api: Api) -> Any:
    """List the bases served here, and how many versions were compiled for each."""
    return api.list("/v1/bases")


@app.command()
@asks(Role.TENANT, ("id", "base"))
def stale(api: Api) -> Any:
    """List versions that were compiled for another base and cannot be served."""
    return api.list("/v1/bases/stale")
