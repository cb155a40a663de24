"""`loraplex adapters`: upload, list and remove a tenant's adapters, and move their aliases."""

from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex.platform.cli import adapter_terms, aliases, versions
from loraplex.platform.cli.client import Api, Role, asks, fail
from loraplex.platform.cli.sending import parts_of
from loraplex.platform.cli.sending import upload as send_upload

app = typer.Typer(help="Upload, list and remove adapters (tenant).", no_args_is_help=True)
app.add_typer(aliases.app, name="alias")
app.add_typer(versions.app, name="versions")
app.command("show")(adapter_terms.show)
app.command("change")(adapter_terms.change)
app.command("uses")(adapter_terms.uses)

COLUMNS = ("name", "version", "rank", "bytes", "digest", "created_at")


@app.command()
@asks(Role.TENANT, COLUMNS)
def upload(
    api: Api,
    name: Annotated[str, typer.Argument(help="The name that requests will use as their model.")],
    source: Annotated[
        Path, typer.Argument(help="A PEFT adapter: its directory, or a zip of it.", exists=True)
    ],
    alias: Annotated[
        str | None, typer.Option(help="Move this alias to the new version, such as `prod`.")
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="Make an image of this dtype, bf16 or int8; the first is its own."),
    ] = None,
) -> Any:
    """Upload an adapter; a name that exists gets its next version.

    A broken connection is taken up where it broke. Every check is told as it passes, and every
    reason with its fix.
    """
    wish = {"name": name, "alias": alias} | ({"variants": variant} if variant else {})
    done = send_upload(api, wish, parts_of(source))
    if done["state"] != "ready":
        reasons = [f"- {reason['message']}" for reason in done["reasons"]]
        fail("\n".join([f"The upload {done['id']} is {done['state']}.", *reasons]))
    number = done["version"].rpartition("@")[2]
    return api.call("GET", f"/v1/adapters/{name}/versions/{number}")


@app.command("list")
@asks(Role.TENANT, COLUMNS)
def list_adapters(api: Api) -> Any:
    """List the tenant's adapters, each with its newest version."""
    return api.list("/v1/adapters")


@app.command()
@asks(Role.TENANT)
def rm(api: Api, name: Annotated[str, typer.Argument(help="The adapter's name.")]) -> str:
    """Remove an adapter with all its versions."""
    api.call("DELETE", f"/v1/adapters/{name}")
    return f"{name} is removed"
