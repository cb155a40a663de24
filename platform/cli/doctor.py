"""`loraplex doctor`: prints what was found, what is wrong and how to mend it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from loraplex.platform.cli.client import DEFAULT_DATA_DIR, DataDir, Json, fail

if TYPE_CHECKING:
    from loraplex.platform.findings import Finding

MARKS = {
    "ok": ("✓", typer.colors.GREEN),
    "warning": ("!", typer.colors.YELLOW),
    "wrong": ("✗", typer.colors.RED),
}


def doctor(data_dir: DataDir = DEFAULT_DATA_DIR, as_json: Json = False) -> None:
    """Say what was found, what is wrong and how to mend it.

    The exit code is 1 if something is wrong without which the platform cannot start.
    """
    import asyncio
    import json
    from dataclasses import asdict

    from loraplex.platform.boot import StartError, read_settings
    from loraplex.platform.doctor import examine

    try:
        findings = asyncio.run(examine(read_settings(data_dir=data_dir)))
    except StartError as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.state == "wrong" for finding in findings):
        raise typer.Exit(1)


def _print(findings: "Sequence[Finding]") -> None:
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        mark, colour = MARKS[finding.state]
        typer.secho(f"{mark} ", fg=colour, nl=False)
        typer.echo(f"{finding.what:{width}}  {finding.found}")
        if finding.mend:
            typer.echo(f"  {'':{width}}  → {finding.mend}")
