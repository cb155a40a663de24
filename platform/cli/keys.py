"""`loraplex keys`: API keys of a tenant, or of the operator."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from loraplex.platform.cli.client import (
    DEFAULT_DATA_DIR,
    ApiKey,
    DataDir,
    Json,
    Role,
    Url,
    connect,
    show,
)

app = typer.Typer(help="Create, list and revoke API keys (operator).", no_args_is_help=True)

COLUMNS = ("id", "name", "tenant_id", "scopes", "redacted", "expires_at", "revoked_at")
DEFAULT_SCOPES = ["infer", "adapters:read"]

Tenant = Annotated[
    str | None,
    typer.Option("--tenant", help="The tenant's id; without it, those of all and the operator's."),
]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    tenant: Tenant = None,
    scopes: Annotated[
        list[str] | None,
        typer.Option("--scope", help="infer, adapters:read, adapters:write, admin; repeatable."),
    ] = None,
    days: Annotated[
        int | None, typer.Option("--days", min=1, help="Days until it expires.")
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: Json = False,
) -> None:
    """Create a key and print its secret, which is shown this once only."""
    api = connect(url, api_key, data_dir, Role.OPERATOR)
    body = {"name": name, "scopes": scopes or (DEFAULT_SCOPES if tenant else ["admin"])}
    if tenant:
        body["tenant_id"] = tenant
    if days:
        body["expires_at"] = (datetime.now(UTC) + timedelta(days=days)).isoformat()
    show(api.call("POST", "/v1/keys", json=body), as_json, ("id", "name", "scopes", "secret"))


@app.command("list")
def list_keys(
    tenant: Tenant = None,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: Json = False,
) -> None:
    """List keys without their secrets: a tenant's, or all of them."""
    api = connect(url, api_key, data_dir, Role.OPERATOR)
    params = {"tenant_id": tenant} if tenant else {}
    show(api.list("/v1/keys", **params), as_json, COLUMNS)


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="The key's id, key_….")],
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Revoke a key; requests with it are refused from now on."""
    connect(url, api_key, data_dir, Role.OPERATOR).call("DELETE", f"/v1/keys/{key}")
    typer.echo(f"{key} is revoked")
