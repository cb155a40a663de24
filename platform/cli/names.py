"""Names where the API takes ids: a command may say a tenant or a user as people know them.

Knows the lists that ids are found in; refuses to know what is done with them.
"""

from loraplex.platform.cli.client import Api, fail


def tenant_id(api: Api, told: str) -> str:
    """The id of a tenant; ends the command if there is none of this name."""
    return _id(api, "tenant", "ten_", told)


def user_id(api: Api, told: str) -> str:
    """The id of a user; ends the command if there is none of this name."""
    return _id(api, "user", "usr_", told)


def _id(api: Api, kind: str, prefix: str, told: str) -> str:
    if told.startswith(prefix):
        return told
    found = [str(row["id"]) for row in api.list(f"/v1/{kind}s") if row["name"] == told]
    if not found:
        fail(f"There is no {kind} {told!r}; `loraplex {kind}s list` shows those there are.")
    return found[0]
