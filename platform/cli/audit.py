"""`loraplex audit`: who changed what, the newest first."""

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from loraplex.platform.cli.client import Api, Role, asks
from loraplex.platform.cli.names import tenant_id

COLUMNS = ("created_at", "tenant_id", "actor", "action", "target", "details")


@asks(Role.OPERATOR, COLUMNS)
def audit(
    api: Api,
    tenant: Annotated[
        str | None, typer.Option(help="Only changes of this tenant, by name or id.")
    ] = None,
    action: Annotated[
        str | None, typer.Option(help="Only changes of this kind, such as alias.moved.")
    ] = None,
    actor: Annotated[
        str | None, typer.Option(help="Only changes by this key or user, by id.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Only changes of this, such as poet@prod.")
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"], help="Only changes since then, in UTC."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 100,
) -> Any:
    """List who changed what, the newest first.

    An operator's key sees all changes, a tenant's key those of its tenant.
    """
    moment = since and since.replace(tzinfo=UTC).isoformat()
    whose = tenant_id(api, tenant) if tenant else None
    wanted = {"tenant_id": whose, "action": action, "actor": actor, "target": target}
    params = {key: value for key, value in [*wanted.items(), ("since", moment)] if value}
    return api.call("GET", "/v1/audit", params={"limit": limit, **params})["data"]
