"""`loraplex keys`: API keys of a tenant, or of the operator."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from loraplex.platform.cli.client import Api, Role, asks
from loraplex.platform.cli.limit_options import LIMITS, takes_limits
from loraplex.platform.cli.names import tenant_id

app = typer.Typer(
    help="Create, list, change, rotate and revoke API keys (operator).", no_args_is_help=True
)

COLUMNS = ("id", "name", "tenant_id", "scopes", "adapters", "redacted", "expires_at", "revoked_at")
DETAILS = (*COLUMNS, "last_used_at", "rotated_from")
SECRET = ("id", "name", "scopes", "secret")
DEFAULT_SCOPES = ["infer", "adapters:read"]
DAY_S = 86_400

Key = Annotated[str, typer.Argument(help="The key's id, key_….")]
Tenant = Annotated[
    str | None,
    typer.Option("--tenant", help="A tenant, by name or id; without it, the operator."),
]
OfTenant = Annotated[
    str | None, typer.Option("--tenant", help="A tenant, by name or id; without it, all.")
]
Days = Annotated[int | None, typer.Option("--days", min=1, help="Days until it expires.")]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter", help="An adapter that it may use, or the base by its name; repeatable."
    ),
]


def _terms(days: int | None, adapters: list[str] | None) -> dict[str, Any]:
    """Of a key's expiry and adapters, what was given."""
    expiry = (datetime.now(UTC) + timedelta(days=days)).isoformat() if days else None
    terms = {"expires_at": expiry, "adapters": adapters or None}
    return {name: value for name, value in terms.items() if value is not None}


@app.command()
@asks(Role.OPERATOR, SECRET)
@takes_limits()
def create(
    api: Api,
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    tenant: Tenant = None,
    scopes: Annotated[
        list[str] | None,
        typer.Option("--scope", help="infer, adapters:read, adapters:write, admin; repeatable."),
    ] = None,
    days: Days = None,
    adapters: Adapters = None,
    *,
    limits: dict[str, Any],
) -> Any:
    """Create a key and print its secret, which is shown this once only.

    Without --scope a tenant's key gets infer and adapters:read, or infer alone if it is bound to
    adapters; an operator's gets admin.
    """
    default = (["infer"] if adapters else DEFAULT_SCOPES) if tenant else ["admin"]
    body = {"name": name, "scopes": scopes or default}
    body |= _terms(days, adapters) | limits
    body |= {"tenant_id": tenant_id(api, tenant)} if tenant else {}
    return api.call("POST", "/v1/keys", json=body)


@app.command("list")
@asks(Role.OPERATOR, COLUMNS)
def list_keys(api: Api, tenant: OfTenant = None) -> Any:
    """List keys without their secrets, the newest first: a tenant's, or all of them."""
    params = {"tenant_id": tenant_id(api, tenant)} if tenant else {}
    return api.list("/v1/keys", **params)


@app.command()
@asks(Role.OPERATOR, DETAILS)
def show(api: Api, key: Key) -> Any:
    """Show one key without its secret."""
    return api.call("GET", f"/v1/keys/{key}")


@app.command()
@asks(Role.OPERATOR, (*COLUMNS, *LIMITS))
@takes_limits()
def change(
    api: Api,
    key: Key,
    name: Annotated[str | None, typer.Option("--name", help="A new name.")] = None,
    days: Days = None,
    adapters: Adapters = None,
    *,
    limits: dict[str, Any],
    lift: Annotated[
        list[str] | None,
        typer.Option(
            "--lift", help="What to take away: adapters, expires-at or a limit; repeatable."
        ),
    ] = None,
) -> Any:
    """Change what is given of a key; the rest stays."""
    body = _terms(days, adapters) | limits
    body |= {word.replace("-", "_"): None for word in lift or ()}
    body |= {"name": name} if name is not None else {}
    return api.call("PATCH", f"/v1/keys/{key}", json=body)


@app.command()
@asks(Role.OPERATOR, SECRET)
def rotate(
    api: Api,
    key: Key,
    overlap_s: Annotated[
        int, typer.Option("--overlap-s", min=0, help="Seconds for which the old one still works.")
    ] = DAY_S,
) -> Any:
    """Replace a key by a new one, whose secret is shown this once only."""
    return api.call("POST", f"/v1/keys/{key}/rotate", json={"overlap_s": overlap_s})


@app.command()
@asks(Role.OPERATOR)
def revoke(api: Api, key: Key) -> str:
    """Revoke a key; requests with it are refused from now on."""
    api.call("DELETE", f"/v1/keys/{key}")
    return f"{key} is revoked"
