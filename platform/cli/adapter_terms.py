"""`loraplex adapters show`, `change` and `uses`: who may use an adapter, how much, and who does."""

from datetime import datetime
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from loraplex.platform.cli.client import Api, Role, asks
from loraplex.platform.cli.limit_options import LIMITS, takes_limits

COLUMNS = ("name", "version", "visibility", "shared_with", "description", *LIMITS)
USES = ("id", "tenant", "requests", "prompt_tokens", "completion_tokens", "cached_tokens")
Name = Annotated[str, typer.Argument(help="The adapter's name.")]
Day = Annotated[datetime | None, typer.Option(formats=["%Y-%m-%d"], help="A UTC day.")]


@asks(Role.TENANT, COLUMNS)
def show(api: Api, name: Name) -> Any:
    """Show one adapter: who may use it, and how much."""
    return api.call("GET", _path(name))


@asks(Role.TENANT, COLUMNS)
@takes_limits()
def change(
    api: Api,
    name: Name,
    visibility: Annotated[
        Literal["private", "shared", "public"] | None,
        typer.Option(help="private: you alone; shared: the tenants named too; public: all."),
    ] = None,
    share: Annotated[
        list[str] | None,
        typer.Option(
            "--share",
            help="A tenant to share it with, by name or id; repeatable, and replaces those before.",
        ),
    ] = None,
    description: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    *,
    limits: dict[str, Any],
    lift: Annotated[
        list[str] | None,
        typer.Option(
            "--lift", help="What to take away: shared-with, description or a limit; repeatable."
        ),
    ] = None,
) -> Any:
    """Change what is given of an adapter; the rest stays. Other tenants name it OWNER/NAME.

    Its limits hold for each tenant that uses it.
    """
    given = {"visibility": visibility, "description": description, "shared_with": share or None}
    body: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    body |= limits
    for word in lift or ():
        field = word.replace("-", "_")
        body[field] = [] if field == "shared_with" else None
    return api.call("PATCH", _path(name), json=body)


@asks(Role.TENANT, USES)
def uses(api: Api, name: Name, since: Day = None, until: Day = None) -> Any:
    """List who uses an adapter: requests and tokens of each tenant."""
    days = {"since": since, "until": until}
    params = {key: f"{day:%Y-%m-%d}" for key, day in days.items() if day is not None}
    return api.list(f"{_path(name)}/usage", **params)


def _path(name: str) -> str:
    return f"/v1/adapters/{quote(name, safe='')}"
