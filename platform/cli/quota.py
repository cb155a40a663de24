"""`loraplex quota`: what limits a tenant's requests, how much is left, and why one was refused."""

from typing import Annotated, Any

import typer

from loraplex.platform.cli.client import Api, Role, asks
from loraplex.platform.cli.names import tenant_id

app = typer.Typer(help="Show limits as they stand, and explain refusals.", no_args_is_help=True)

COLUMNS = ("bucket", "id", "limit", "of", "used", "remaining", "reset_s")
ANSWER = ("admitted", "explanation", "tokens", "max_tokens", "retry_after_s")
REFUSAL = ("request_id", "at", "kind", "id", "name", "tokens", "retry_after_s")

Tenant = Annotated[
    str | None, typer.Option("--tenant", help="For operators: a tenant, by name or id.")
]
Key = Annotated[str | None, typer.Option("--key", help="For admins: another key's id, key_….")]


def _named(api: Api, tenant: str | None, key: str | None = None, **more: Any) -> dict[str, Any]:
    """Of the query's parameters, those that were given."""
    named = {"tenant_id": tenant_id(api, tenant) if tenant else None, "key_id": key, **more}
    return {name: value for name, value in named.items() if value}


def _rows(quota: dict[str, Any]) -> list[dict[str, Any]]:
    """A line for each limit that there is."""
    rows = [
        {
            "bucket": bucket["kind"],
            "id": bucket["id"],
            "limit": use["name"],
            "of": use["limit"],
            "used": use["used"],
            "remaining": use["remaining"],
            "reset_s": round(use["reset_s"], 1),
        }
        for bucket in quota["buckets"]
        for use in bucket["limits"]
        if use["limit"] is not None
    ]
    kept = (("storage_bytes", quota["storage_bytes"]), ("max_adapters", quota["adapters"]))
    return rows + [
        {
            "bucket": "tenant",
            "id": quota["tenant_id"],
            "limit": name,
            "of": amount["limit"],
            "used": amount["used"],
            "remaining": max(0, amount["limit"] - amount["used"]),
        }
        for name, amount in kept
        if amount["limit"] is not None
    ]


@app.command("show")
@asks(Role.TENANT, COLUMNS)
def show_quota(
    api: Api,
    adapters: Annotated[
        list[str] | None,
        typer.Option("--adapter", help="An adapter whose limits to show too; repeatable."),
    ] = None,
    tenant: Tenant = None,
    key: Key = None,
) -> Any:
    """Show every limit, how much of it is used, and when it is whole again."""
    return _rows(api.call("GET", "/v1/quota", params=_named(api, tenant, key, adapter=adapters)))


@app.command()
@asks(Role.TENANT, ANSWER)
def explain(
    api: Api,
    model: Annotated[str, typer.Argument(help="The model, as a request would name it.")],
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")],
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the answer; without it, as many as fit.")
    ] = None,
    choices: Annotated[int, typer.Option("--n", min=1, help="Answers to the prompt.")] = 1,
    tenant: Tenant = None,
    key: Key = None,
) -> Any:
    """Say whether a request would be let in now, and which limit binds; nothing is charged."""
    body = {"model": model, "prompt_tokens": prompt_tokens, "n": choices, "max_tokens": max_tokens}
    return api.call("POST", "/v1/quota/explain", json=body, params=_named(api, tenant, key))


@app.command()
@asks(Role.TENANT, REFUSAL)
def why(
    api: Api,
    request: Annotated[str, typer.Argument(help="The id in the header x-request-id, req_….")],
    tenant: Tenant = None,
) -> Any:
    """Say which limit refused a request."""
    return api.call("GET", f"/v1/quota/refusals/{request}", params=_named(api, tenant))
