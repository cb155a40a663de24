"""`loraplex uploads`: what became of a tenant's uploads."""

from typing import Annotated, Any

import typer

from loraplex.platform.cli.client import Api, Role, asks
from loraplex.platform.cli.sending import check_lines

app = typer.Typer(help="List, show and cancel uploads (tenant).", no_args_is_help=True)

COLUMNS = ("id", "name", "state", "version", "created_at")
Id = Annotated[str, typer.Argument(help="The upload's id.", metavar="ID")]


@app.command("list")
@asks(Role.TENANT, COLUMNS)
def list_uploads(
    api: Api,
    state: Annotated[
        str | None, typer.Option(help="Only those in this state, such as ready or rejected.")
    ] = None,
) -> Any:
    """List uploads in the order they were begun."""
    return api.list("/v1/uploads", **({"state": state} if state else {}))


@app.command()
@asks(Role.TENANT, COLUMNS)
def show(api: Api, upload: Id) -> Any:
    """Show an upload: each check, and every reason with its fix."""
    shown = api.call("GET", f"/v1/uploads/{upload}")
    lines = [*check_lines(shown["checks"]), *(f"- {r['message']}" for r in shown["reasons"])]
    for line in lines:
        typer.echo(line, err=True)
    return shown


@app.command()
@asks(Role.TENANT)
def cancel(api: Api, upload: Id) -> str:
    """Cancel an upload that is not published yet."""
    api.call("DELETE", f"/v1/uploads/{upload}")
    return f"{upload} is cancelled"
