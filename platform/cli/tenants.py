"""`loraplex tenants`: the operator's view of tenants and their limits."""

import math
from typing import Annotated, Any

import typer

from loraplex.platform.cli.client import Api, Role, asks
from loraplex.platform.cli.limit_options import (
    LIMITS,
    Concurrency,
    DayTokens,
    MonthTokens,
    Requests,
    Tokens,
    limit_option,
    limits_given,
)

app = typer.Typer(
    help="Create tenants, set their limits and suspend them (operator).", no_args_is_help=True
)

SHARES = (
    "weight",
    "max_running",
    "kv_share",
    "resident_bytes",
    "storage_bytes",
    "max_adapters",
)
COLUMNS = ("id", "name", "suspended", *LIMITS, *SHARES)


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


Tenant = Annotated[str, typer.Argument(help="The tenant's id.")]
Weight = Annotated[Any, _share("--weight", "Of its share of the engine.")]
Running = Annotated[Any, limit_option("max_running", "Sequences that the engine runs at once.")]
KvShare = Annotated[Any, _share("--kv-share", "Of the KV cache, at most; 1: all.")]
Resident = Annotated[Any, limit_option("resident_bytes", "Of images in the engine's memory.")]
Storage = Annotated[Any, limit_option("storage_bytes", "Of stored images, each counted once.")]
Adapters = Annotated[Any, limit_option("max_adapters", "Adapters.")]


@app.command()
@asks(Role.OPERATOR, COLUMNS)
def create(
    api: Api,
    name: Annotated[str, typer.Argument(help="A name of its own.")],
    requests: Requests = None,
    tokens: Tokens = None,
    concurrency: Concurrency = None,
    day_tokens: DayTokens = None,
    month_tokens: MonthTokens = None,
    weight: Weight = None,
    running: Running = None,
    kv_share: KvShare = None,
    resident: Resident = None,
    storage: Storage = None,
    adapters: Adapters = None,
) -> Any:
    """Create a tenant; a limit that is not given is none, and its weight is 1."""
    given = limits_given(requests, tokens, concurrency, day_tokens, month_tokens)
    shares = (weight, running, kv_share, resident, storage, adapters)
    given |= limits_given(*shares, fields=SHARES)
    return api.call("POST", "/v1/tenants", json={"name": name, **given})


@app.command("list")
@asks(Role.OPERATOR, COLUMNS)
def list_tenants(api: Api) -> Any:
    """List the tenants."""
    return api.list("/v1/tenants")


@app.command()
@asks(Role.OPERATOR, COLUMNS)
def limits(
    api: Api,
    tenant: Tenant,
    requests: Requests = None,
    tokens: Tokens = None,
    concurrency: Concurrency = None,
    day_tokens: DayTokens = None,
    month_tokens: MonthTokens = None,
    weight: Weight = None,
    running: Running = None,
    kv_share: KvShare = None,
    resident: Resident = None,
    storage: Storage = None,
    adapters: Adapters = None,
) -> Any:
    """Show a tenant's limits, or change those that are given."""
    given = limits_given(requests, tokens, concurrency, day_tokens, month_tokens)
    shares = (weight, running, kv_share, resident, storage, adapters)
    given |= limits_given(*shares, fields=SHARES)
    path = f"/v1/tenants/{tenant}"
    return api.call("PATCH", path, json=given) if given else api.call("GET", path)


@app.command()
@asks(Role.OPERATOR)
def suspend(api: Api, tenant: Tenant) -> str:
    """Suspend a tenant: its keys open nothing until it is resumed."""
    api.call("PATCH", f"/v1/tenants/{tenant}", json={"suspended": True})
    return f"{tenant} is suspended"


@app.command()
@asks(Role.OPERATOR)
def resume(api: Api, tenant: Tenant) -> str:
    """Resume a suspended tenant."""
    api.call("PATCH", f"/v1/tenants/{tenant}", json={"suspended": False})
    return f"{tenant} is resumed"
