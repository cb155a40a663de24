"""What every route allows, written by hand: a route that is missing here fails the tests.

Beside each route stand the query and the body that its own schema accepts, where they are needed
to get as far as the question whose row it is. The admin pages, which know users and no keys, have
a table of their own.
"""

from typing import Any, NamedTuple

PUBLIC = "public"
OPERATOR = "operator"
INFER, READ, WRITE, ADMIN = "infer", "adapters:read", "adapters:write", "admin"
CHAT = {"model": "victim", "messages": [{"role": "user", "content": "a"}]}
MESSAGE = CHAT | {"max_tokens": 1}


class Row(NamedTuple):
    """Who may use a route: the public, an operator, or a key with one of these scopes."""

    needs: frozenset[str]
    body: Any
    query: dict[str, str]


def to(*needs: str, body: Any = None, **query: str) -> Row:
    return Row(frozenset(needs), body, query)


TABLE: dict[tuple[str, str], Row] = {
    ("GET", "/"): to(PUBLIC),
    ("GET", "/healthz"): to(PUBLIC),
    ("HEAD", "/healthz"): to(PUBLIC),
    ("GET", "/readyz"): to(PUBLIC),
    ("HEAD", "/readyz"): to(PUBLIC),
    ("GET", "/openapi.json"): to(PUBLIC),
    ("HEAD", "/openapi.json"): to(PUBLIC),
    ("GET", "/static"): to(PUBLIC),
    ("GET", "/metrics"): to(OPERATOR),
    ("POST", "/v1/chat/completions"): to(INFER, body=CHAT),
    ("POST", "/v1/responses"): to(INFER, body={"model": "victim", "input": "a"}),
    ("POST", "/v1/responses/input_tokens"): to(INFER, body={"model": "victim", "input": "a"}),
    ("POST", "/v1/completions"): to(INFER, body={"model": "victim", "prompt": "a"}),
    ("POST", "/v1/messages"): to(INFER, body=MESSAGE),
    ("POST", "/v1/messages/count_tokens"): to(INFER, body=CHAT),
    ("GET", "/v1/models"): to(INFER, READ, ADMIN),
    ("GET", "/v1/models/{model:path}"): to(INFER, READ, ADMIN),
    ("GET", "/v1/bases"): to(INFER, READ, ADMIN),
    ("GET", "/v1/bases/stale"): to(READ),
    ("POST", "/v1/adapters"): to(WRITE),
    ("GET", "/v1/adapters"): to(READ),
    ("GET", "/v1/adapters/{name}"): to(READ),
    ("PATCH", "/v1/adapters/{name}"): to(WRITE, body={"description": "taken over"}),
    ("DELETE", "/v1/adapters/{name}"): to(WRITE),
    ("GET", "/v1/adapters/{name}/usage"): to(READ),
    ("GET", "/v1/adapters/{name}/versions"): to(READ),
    ("GET", "/v1/adapters/{name}/versions/{number}"): to(READ),
    ("POST", "/v1/adapters/{name}/versions/{number}/retire"): to(WRITE),
    ("POST", "/v1/adapters/{name}/versions/{number}/restore"): to(WRITE),
    ("DELETE", "/v1/adapters/{name}/versions/{number}"): to(WRITE),
    ("GET", "/v1/adapters/{name}/aliases"): to(READ),
    ("PUT", "/v1/adapters/{name}/aliases/{alias}"): to(WRITE, body={"version": 1, "revision": 0}),
    ("DELETE", "/v1/adapters/{name}/aliases/{alias}"): to(WRITE, revision="1"),
    ("POST", "/v1/adapters/{name}/aliases/{alias}/promote"): to(WRITE, body={"revision": 1}),
    ("POST", "/v1/adapters/{name}/aliases/{alias}/abort"): to(WRITE, body={"revision": 1}),
    ("POST", "/v1/adapters/{name}/aliases/{alias}/rollback"): to(WRITE, body={"revision": 1}),
    ("GET", "/v1/adapters/{name}/aliases/{alias}/history"): to(READ),
    ("POST", "/v1/uploads"): to(WRITE, body={"name": "mine"}),
    ("GET", "/v1/uploads"): to(READ),
    ("GET", "/v1/uploads/{upload_id}"): to(READ),
    ("DELETE", "/v1/uploads/{upload_id}"): to(WRITE),
    ("GET", "/v1/uploads/{upload_id}/parts/{part}"): to(READ),
    ("HEAD", "/v1/uploads/{upload_id}/parts/{part}"): to(READ),
    ("PUT", "/v1/uploads/{upload_id}/parts/{part}"): to(WRITE),
    ("POST", "/v1/uploads/{upload_id}/finish"): to(WRITE),
    ("POST", "/v1/load_lora_adapter"): to(WRITE),
    ("POST", "/v1/unload_lora_adapter"): to(WRITE, body={"lora_name": "victim"}),
    ("GET", "/v1/storage"): to(READ, ADMIN),
    ("POST", "/v1/storage/collect"): to(OPERATOR, body={"dry_run": True}),
    ("POST", "/v1/tenants"): to(OPERATOR),
    ("GET", "/v1/tenants"): to(OPERATOR),
    ("GET", "/v1/tenants/{tenant_id}"): to(OPERATOR),
    ("PATCH", "/v1/tenants/{tenant_id}"): to(OPERATOR, body={"weight": 9.0}),
    ("GET", "/v1/tenants/{tenant_id}/cache"): to(OPERATOR),
    ("POST", "/v1/keys"): to(ADMIN, body={"name": "mine", "scopes": [INFER]}),
    ("GET", "/v1/keys"): to(ADMIN),
    ("GET", "/v1/keys/{key_id}"): to(ADMIN),
    ("PATCH", "/v1/keys/{key_id}"): to(ADMIN, body={"name": "taken over"}),
    ("POST", "/v1/keys/{key_id}/rotate"): to(ADMIN, body={"overlap_s": 0}),
    ("DELETE", "/v1/keys/{key_id}"): to(ADMIN),
    ("POST", "/v1/users"): to(ADMIN, body={"name": "mine@acme", "role": "viewer"}),
    ("GET", "/v1/users"): to(ADMIN),
    ("GET", "/v1/users/{user_id}"): to(ADMIN),
    ("PATCH", "/v1/users/{user_id}"): to(ADMIN, body={"disabled": True}),
    ("PUT", "/v1/users/{user_id}/password"): to(ADMIN, body={"password": "a new password of mine"}),
    ("POST", "/v1/users/{user_id}/invitations"): to(ADMIN, body={"lasts_s": 60}),
    ("GET", "/v1/usage"): to(INFER, ADMIN),
    ("GET", "/v1/cache"): to(INFER, ADMIN),
    ("GET", "/v1/quota"): to(INFER, ADMIN),
    ("GET", "/v1/quota/refusals/{request_id}"): to(INFER, ADMIN),
    ("POST", "/v1/quota/explain"): to(INFER, ADMIN, body={"model": "victim", "prompt_tokens": 1}),
    ("GET", "/v1/audit"): to(ADMIN),
}
GUARDED = {route: row for route, row in TABLE.items() if PUBLIC not in row.needs}
