"""`loraplex tenants`: the operator's view of tenants and their limits."""

import math
from typing import Annotated, Any

import typer

from loraplex.platform.cli.client import Api, Role, asks
from loraplex.platform.cli.limit_options import LIMITS, limit_option, takes_limits
from loraplex.platform.cli.names import tenant_id

app = typer.Typer(
    help="Create tenants, set their limits and suspend them (operator).", no_args_is_help=True
)


def _ratio(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise typer.BadParameter(f"{text!r} is not a number")
    return number


def _share(name: str, what: str) -> Any:
    return typer.Option(name, parser=_ratio, metavar="X", help=what)


SHARES = {
    "weight": _share(
        "--weight", "Its weight where tenants share the engine: 2 gets twice what 1 gets."
    ),
    "max_running": limit_option("max_running", "Sequences that the engine runs at once."),
    "kv_share": _share("--kv-share", "The largest part of the KV cache that it may hold (1: all)."),
    "resident_bytes": limit_option("resident_bytes", "Bytes of its images in the engine's memory."),
    "storage_bytes": limit_option(
        "storage_bytes", "Bytes of its stored images, each counted once."
    ),
    "max_adapters": limit_option("max_adapters", "Adapters that it may have."),
}
OPTIONS = LIMITS | SHARES
COLUMNS = ("id", "name", "suspended", *OPTIONS)
Tenant = Annotated[str, typer.Argument(help="The tenant, by name or id.")]


@app.command()
@asks(Role.OPERATOR, COLUMNS)
@takes_limits(OPTIONS)
def create(
    api: Api,
    name: Annotated[str, typer.Argument(help="A name of its own.")],
    limits: dict[str, Any],
) -> Any:
    """Create a tenant; a limit that is not given is none, and its weight is 1."""
    return api.call("POST", "/v1/tenants", json={"name": name, **limits})


@app.command("list")
@asks(Role.OPERATOR, COLUMNS)
def list_tenants(api: Api) -> Any:
    """List the tenants."""
    return api.list("/v1/tenants")


@app.command("limits")
@asks(Role.OPERATOR, COLUMNS)
@takes_limits(OPTIONS)
def set_limits(api: Api, tenant: Tenant, limits: dict[str, Any]) -> Any:
    """Show a tenant's limits, or change those that are given."""
    path = f"/v1/tenants/{tenant_id(api, tenant)}"
    return api.call("PATCH", path, json=limits) if limits else api.call("GET", path)


@app.command()
@asks(Role.OPERATOR)
def suspend(api: Api, tenant: Tenant) -> str:
    """Suspend a tenant: its keys open nothing until it is resumed."""
    api.call("PATCH", f"/v1/tenants/{tenant_id(api, tenant)}", json={"suspended": True})
    return f"{tenant} is suspended"


@app.command()
@asks(Role.OPERATOR)
def resume(api: Api, tenant: Tenant) -> str:
    """Resume a suspended tenant."""
    api.call("PATCH", f"/v1/tenants/{tenant_id(api, tenant)}", json={"suspended": False})
    return f"{tenant} is resumed"
