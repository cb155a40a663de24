"""The command line: `loraplex serve`, `doctor`, and thin clients of the REST API.

Knows commands and their options; refuses to know what they do beyond calling it. What a command
needs is imported when it runs.
"""

from importlib import metadata

import typer

from loraplex.platform.cli import (
    adapters,
    audit,
    bases,
    config,
    doctor,
    keys,
    quota,
    serve,
    storage,
    tenants,
    uploads,
    users,
)

app = typer.Typer(
    help="Serves thousands of LoRA adapters for many tenants on one base model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("serve")(serve.serve)
app.add_typer(tenants.app, name="tenants")
app.add_typer(keys.app, name="keys")
app.add_typer(users.app, name="users")
app.add_typer(adapters.app, name="adapters")
app.add_typer(uploads.app, name="uploads")
app.add_typer(quota.app, name="quota")
app.add_typer(storage.app, name="storage")
app.add_typer(bases.app, name="bases")
app.command("audit")(audit.audit)
app.add_typer(config.app, name="config")
app.command("doctor")(doctor.doctor)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(metadata.version("loraplex"))


def main() -> None:
    """The entry point of the console script."""
    app()
