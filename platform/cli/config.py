"""`loraplex config`: the settings in force, and where each came from."""

from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex.platform.cli.client import Json, fail

app = typer.Typer(help="Show the settings of `serve`.", no_args_is_help=True)


@app.callback()
def config() -> None:
    """Show the settings of `serve`."""


@app.command("show")
def show(
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file of settings.", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print every setting with its source: an option, a variable, the file, or its default.

    Secrets, and passwords in URLs, are hidden.
    """
    import json

    from loraplex.platform.boot import StartError, read_settings
    from loraplex.platform.config_file import origins
    from loraplex.platform.settings import Settings

    given = {} if config is None else {"config": config}
    try:
        settings = read_settings(**given)
    except StartError as error:
        fail(str(error))
    sources = origins(Settings, given)
    rows = [
        {"setting": name, "value": value, "from": sources.get(name, "default")}
        for name, value in _values(settings).items()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max(len(row["setting"]) for row in rows)
    values = max(len(str(row["value"])) for row in rows)
    for row in rows:
        shown = "–" if row["value"] is None else str(row["value"])
        typer.echo(f"{row['setting']:{width}}  {shown:{values}}  {row['from']}".rstrip())


def _values(settings: Any) -> dict[str, Any]:
    """All settings by name, as they may be shown; the engine's one by one."""
    from loraplex.platform.redaction import Redactor

    redact = Redactor(*settings.given_secrets)
    values = settings.model_dump(mode="json")
    knobs = values.pop("engine")
    values |= {f"engine.{name}": value for name, value in knobs.items()}
    return {
        name: redact(value) if isinstance(value, str) else value for name, value in values.items()
    }
