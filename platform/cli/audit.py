"""`loraplex audit`: who changed what, the newest first."""

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from loraplex.platform.cli.client import Api, Role, asks

COLUMNS = ("created_at", "tenant_id", "actor", "action", "target", "details")


@asks(Role.OPERATOR, COLUMNS)
def audit(
    api: Api,
    tenant: Annotated[str | None, typer.Option(help="Changes of this tenant's only.")] = None,
    action: Annotated[str | None, typer.Option(help="Such changes only: alias.moved.")] = None,
    actor: Annotated[str | None, typer.Option(help="By this key or user only, by id.")] = None,
    target: Annotated[str | None, typer.Option(help="Of this only: poet@prod.")] = None,
    since: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"], help="The earliest, in UTC."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 100,
) -> Any:
    """List changes, the newest first: all for an operator, its own for a tenant."""
    moment = since and since.replace(tzinfo=UTC).isoformat()
    wanted = {"tenant_id": tenant, "action": action, "actor": actor, "target": target}
    params = {key: value for key, value in [*wanted.items(), ("since", moment)] if value}
    return api.call("GET", "/v1/audit", params={"limit": limit, **params})["data"]
