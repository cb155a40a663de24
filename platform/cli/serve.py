"""`loraplex serve`: the whole platform on this machine, in the foreground."""

from pathlib import Path
from typing import Annotated

import typer

from loraplex.platform.cli.client import fail

CANNOT_START = 2
INTERRUPTED = 130


def serve(
    model: Annotated[
        str | None, typer.Option(help="Hugging Face id, model directory or .gguf file.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What the API calls the base; by default the model's name.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 for any.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of everything that must survive a restart.")
    ] = None,
) -> None:
    """Start the whole platform and print its keys.

    What is not given here comes from LORAPLEX_… variables; docs/settings.md lists them.
    """
    import asyncio

    from loraplex.platform.boot import StartError, read_settings
    from loraplex.platform.serve import run

    try:
        run(read_settings(model=model, host=host, port=port, data_dir=data_dir), name)
    except StartError as error:
        fail(str(error), CANNOT_START)
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise typer.Exit(INTERRUPTED) from None
