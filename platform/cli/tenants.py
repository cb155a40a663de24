"""`loraplex tenants`: the operator's view of tenants and their limits."""

import math
from typing import Annotated, Any

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

app = typer.Typer(help="Create tenants and set their limits (operator).", no_args_is_help=True)

LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrency",
    "weight",
    "max_running",
    "kv_share",
)
COLUMNS = ("id", "name", *LIMITS)
UNLIMITED = "unlimited"


def _limit(text: str) -> int | str:
    if text == UNLIMITED:
        return UNLIMITED
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is neither a number nor '{UNLIMITED}'")
    return int(text)


def _ratio(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise typer.BadParameter(f"{text!r} is not a number")
    return number


def _option(name: str, what: str) -> Any:
    return typer.Option(name, parser=_limit, metavar=f"N|{UNLIMITED}", help=what)


Requests = Annotated[Any, _option("--requests-per-minute", "Requests in any minute.")]
Tokens = Annotated[Any, _option("--tokens-per-minute", "Tokens, in and out, in a minute.")]
Concurrency = Annotated[Any, _option("--max-concurrency", "Requests at the same time.")]
Weight = Annotated[
    Any, typer.Option("--weight", parser=_ratio, metavar="X", help="Of its share of the engine.")
]
Running = Annotated[Any, _option("--max-running", "Sequences that the engine runs at once.")]
KvShare = Annotated[
    Any,
    typer.Option(
        "--kv-share", parser=_ratio, metavar="X", help="Of the KV cache, at most; 1: all."
    ),
]


def _limits(*given: Any) -> dict[str, Any]:
    """Of `LIMITS`, those that were given, as the API takes them: null for none."""
    return {
        name: None if value == UNLIMITED else value
        for name, value in zip(LIMITS, given, strict=True)
        if value is not None
    }


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="A name of its own.")],
    requests: Requests = None,
    tokens: Tokens = None,
    concurrency: Concurrency = None,
    weight: Weight = None,
    running: Running = None,
    kv_share: KvShare = None,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: Json = False,
) -> None:
    """Create a tenant; a limit that is not given is none, and its weight is 1."""
    api = connect(url, api_key, data_dir, Role.OPERATOR)
    given = _limits(requests, tokens, concurrency, weight, running, kv_share)
    show(api.call("POST", "/v1/tenants", json={"name": name, **given}), as_json, COLUMNS)


@app.command("list")
def list_tenants(
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: Json = False,
) -> None:
    """List the tenants."""
    api = connect(url, api_key, data_dir, Role.OPERATOR)
    show(api.list("/v1/tenants"), as_json, COLUMNS)


@app.command()
def limits(
    tenant: Annotated[str, typer.Argument(help="The tenant's id.")],
    requests: Requests = None,
    tokens: Tokens = None,
    concurrency: Concurrency = None,
    weight: Weight = None,
    running: Running = None,
    kv_share: KvShare = None,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: Json = False,
) -> None:
    """Show a tenant's limits, or change those that are given."""
    api = connect(url, api_key, data_dir, Role.OPERATOR)
    changes = _limits(requests, tokens, concurrency, weight, running, kv_share)
    path = f"/v1/tenants/{tenant}"
    answer = api.call("PATCH", path, json=changes) if changes else api.call("GET", path)
    show(answer, as_json, COLUMNS)
