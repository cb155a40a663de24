"""`loraplex tenants`: the operator's view of tenants and their limits."""

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

COLUMNS = ("id", "name", "requests_per_minute", "tokens_per_minute", "max_concurrency")
UNLIMITED = "unlimited"


def _limit(text: str) -> int | str:
    if text == UNLIMITED:
        return UNLIMITED
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is neither a number nor '{UNLIMITED}'")
    return int(text)


def _option(name: str, what: str) -> Any:
    return typer.Option(name, parser=_limit, metavar=f"N|{UNLIMITED}", help=what)


Requests = Annotated[Any, _option("--requests-per-minute", "Requests in any minute.")]
Tokens = Annotated[Any, _option("--tokens-per-minute", "Tokens, in and out, in a minute.")]
Concurrency = Annotated[Any, _option("--max-concurrency", "Requests at the same time.")]


def _limits(requests: Any, tokens: Any, concurrency: Any) -> dict[str, int | None]:
    """The limits that were given, as the API takes them: null for none."""
    given = {
        "requests_per_minute": requests,
        "tokens_per_minute": tokens,
        "max_concurrency": concurrency,
    }
    return {
        name: None if value == UNLIMITED else value
        for name, value in given.items()
        if value is not None
    }


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="A name of its own.")],
    requests: Requests = None,
    tokens: Tokens = None,
    concurrency: Concurrency = None,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: Json = False,
) -> None:
    """Create a tenant; a limit that is not given is none."""
    api = connect(url, api_key, data_dir, Role.OPERATOR)
    body = {"name": name, **_limits(requests, tokens, concurrency)}
    show(api.call("POST", "/v1/tenants", json=body), as_json, COLUMNS)


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
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: Json = False,
) -> None:
    """Show a tenant's limits, or change those that are given."""
    api = connect(url, api_key, data_dir, Role.OPERATOR)
    path, changes = f"/v1/tenants/{tenant}", _limits(requests, tokens, concurrency)
    answer = api.call("PATCH", path, json=changes) if changes else api.call("GET", path)
    show(answer, as_json, COLUMNS)
