"""`loraplex users`: who signs in to the pages."""

import sys
from typing import Annotated, Any

import typer

from loraplex.platform.cli.client import Api, Role, asks
from loraplex.platform.cli.names import tenant_id, user_id

app = typer.Typer(
    help="Create, invite, disable and list who signs in to the admin pages (operator).",
    no_args_is_help=True,
)

COLUMNS = ("id", "name", "role", "tenant_id", "has_password", "signed_in_at", "disabled_at")
DAY_S = 86_400

User = Annotated[str, typer.Argument(help="The user, by name or id.")]
Tenant = Annotated[
    str | None,
    typer.Option("--tenant", help="A tenant, by name or id; without it, an operator."),
]


OfTenant = Annotated[
    str | None, typer.Option("--tenant", help="A tenant, by name or id; without it, all.")
]


@app.command()
@asks(Role.OPERATOR, COLUMNS)
def create(
    api: Api,
    name: Annotated[str, typer.Argument(help="What they sign in as, such as an address.")],
    tenant: Tenant = None,
    role: Annotated[
        str | None,
        typer.Option("--role", help="admin or viewer of a tenant, or operator."),
    ] = None,
) -> Any:
    """Create a user: without a role, a viewer of the tenant, or an operator. Then invite them."""
    body = {"name": name, "role": role or ("viewer" if tenant else "operator")}
    body |= {"tenant_id": tenant_id(api, tenant)} if tenant else {}
    return api.call("POST", "/v1/users", json=body)


@app.command("list")
@asks(Role.OPERATOR, COLUMNS)
def list_users(api: Api, tenant: OfTenant = None) -> Any:
    """List the users of a tenant, or all."""
    params = {"tenant_id": tenant_id(api, tenant)} if tenant else {}
    return api.list("/v1/users", **params)


@app.command()
@asks(Role.OPERATOR, COLUMNS)
def role(
    api: Api, user: User, role: Annotated[str, typer.Argument(help="admin or viewer.")]
) -> Any:
    """Give a user another role of its tenant."""
    return api.call("PATCH", f"/v1/users/{user_id(api, user)}", json={"role": role})


@app.command()
@asks(Role.OPERATOR)
def disable(api: Api, user: User) -> str:
    """Keep a user from signing in."""
    api.call("PATCH", f"/v1/users/{user_id(api, user)}", json={"disabled": True})
    return f"{user} is disabled"


@app.command()
@asks(Role.OPERATOR)
def enable(api: Api, user: User) -> str:
    """Let a user sign in again."""
    api.call("PATCH", f"/v1/users/{user_id(api, user)}", json={"disabled": False})
    return f"{user} is enabled"


@app.command()
@asks(Role.OPERATOR, ("user_id", "secret", "expires_at"))
def invite(
    api: Api,
    user: User,
    lasts_s: Annotated[
        int, typer.Option("--lasts-s", min=1, help="Seconds for which the code works.")
    ] = DAY_S,
) -> Any:
    """Print a one-time code that signs a user in; it is shown this once only."""
    return api.call(
        "POST", f"/v1/users/{user_id(api, user)}/invitations", json={"lasts_s": lasts_s}
    )


@app.command()
@asks(Role.OPERATOR)
def password(api: Api, user: User) -> str:
    """Set a user's password: asked for on a terminal, else read from the first line of input."""
    whose = user_id(api, user)
    if sys.stdin.isatty():
        chosen = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        chosen = sys.stdin.readline().rstrip("\r\n")
    api.call("PUT", f"/v1/users/{whose}/password", json={"password": chosen})
    return f"the password of {user} is set"
