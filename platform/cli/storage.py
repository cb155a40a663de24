"""`loraplex storage`: what tenants' images take, and the removal of those that nobody needs."""

from typing import Annotated, Any

import typer

from loraplex.platform.cli.client import Api, Role, asks

app = typer.Typer(help="Show and clear the store of adapter images.", no_args_is_help=True)

COLUMNS = ("id", "name", "bytes", "storage_bytes", "images", "adapters", "max_adapters")
COLLECTED = ("dry_run", "images", "parts", "bytes")


@app.command("show")
@asks(Role.OPERATOR, COLUMNS)
def show_storage(api: Api) -> Any:
    """Show what each tenant's images take (operator), or the key's own tenant's."""
    return api.list("/v1/storage")


@app.command()
@asks(Role.OPERATOR, COLLECTED)
def collect(
    api: Api,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    unnamed: Annotated[
        bool,
        typer.Option(
            "--unnamed",
            help="Also images that this database never knew. Not if another platform uses the "
            "same store.",
        ),
    ] = False,
) -> Any:
    """Remove images that no version needs any more. Servers also do so by themselves."""
    return api.call("POST", "/v1/storage/collect", json={"dry_run": dry_run, "unnamed": unnamed})
