"""`loraplex adapters`: upload, list and remove a tenant's adapters, and move their aliases."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex.platform.cli import adapter_terms, aliases, sending, versions
from loraplex.platform.cli.client import Api, Role, asks, fail

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
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The name that requests will use as their model.")],
    source: Annotated[
        Path, typer.Argument(help="A PEFT adapter: its directory, or a zip of it.", exists=True)
    ],
    alias: Annotated[
        str | None, typer.Option(help="Move this alias to the new version, such as `prod`.")
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="Make an image of this dtype, bf16 or int8; repeatable, the first is the default."
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Go on with this upload, which an earlier run began."),
    ] = None,
) -> Any:
    """Upload an adapter; a name that exists gets its next version.

    After a broken connection it goes on where it stopped. If the command ends too early, it prints
    the line that goes on later. Each check is printed as it passes, each reason with its fix.
    """
    if resume is not None and (alias or variant):
        fail("--resume goes on with an upload as it was begun: leave --alias and --variant out.")
    parts = sending.parts_of(source)
    if resume is None:
        wish = {"name": name, "alias": alias} | ({"variants": variant} if variant else {})
        begun = sending.begin(api, wish, parts)
    else:
        begun = sending.take_up(api, resume, name, parts)
    typer.echo(f"The upload is {begun['id']}.", err=True)
    again = f"To go on with it:\n  {_command(context, name, source, begun['id'])}"
    try:
        done = sending.send(api, begun, parts)
    except sending.Interrupted as error:
        fail(f"{error}\n{again}")
    except KeyboardInterrupt:
        typer.echo(again, err=True)
        raise
    if done["state"] != "ready":
        reasons = [f"- {reason['message']}" for reason in done["reasons"]]
        more = [again] if done["state"] == "uploading" else []
        fail("\n".join([f"The upload {done['id']} is {done['state']}.", *reasons, *more]))
    number = done["version"].rpartition("@")[2]
    return api.call("GET", f"/v1/adapters/{name}/versions/{number}")


def _command(context: typer.Context, name: str, source: Path, upload_id: str) -> str:
    """The command that goes on with an upload, with this one's own options but for its key."""
    words = ["loraplex", "adapters", "upload", name, str(source), "--resume", upload_id]
    options = {"url": "--url", "data_dir": "--data-dir", "api_key": "--api-key"}
    for field, option in options.items():
        origin = context.get_parameter_source(field)
        if origin is not None and origin.name == "COMMANDLINE":
            words += [option, "KEY" if field == "api_key" else str(context.params[field])]
    return shlex.join(words)


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
