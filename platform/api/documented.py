"""The OpenAPI document: what FastAPI knows of the routes, completed by what all of them share.

Names operations, describes tags, and gives each route the errors that it can answer with. Reads
only what routes declare; refuses to know single routes.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from loraplex.platform.api.answer_schemas import ChatChunk
from loraplex.platform.api.error_schemas import MEANINGS, SAMPLE_ID, SAMPLES, Error, MessageError
from loraplex.platform.api.responses_schemas import ResponseEvent

Json = dict[str, Any]
REF: Final = "#/components/schemas/{model}"
TAGS: Final = {
    "generation": "OpenAI's API: chats, responses, completions. `model` names base or adapter.",
    "messages": "Anthropic's API, as a second face of the same path.",
    "models": "The names that `model` may have.",
    "uploads": "Publishing an adapter: in one request, or in parts that can be resumed.",
    "adapters": "Adapters and their immutable versions.",
    "aliases": "Names that move from version to version, at once or through a canary.",
    "bases": "The base models that are and were served.",
    "tenants": "Tenants and their limits.",
    "keys": "API keys.",
    "users": "People who sign in to the web interface.",
    "quota": "Limits, what is used of them, and which of them binds a request.",
    "usage": "The ledger of what was used.",
    "cache": "What each tenant has in the prefix cache.",
    "storage": "What images take on disk.",
    "audit": "Who changed what.",
    "health": "For load balancers and Prometheus.",
}
ALWAYS: Final = {400, 500, 503}
WITH_KEY: Final = {401, 403}
WITH_BODY: Final = {408, 409, 413}
GENERATING: Final = {404, 409, 429, 504}
PUBLISHING: Final = {422, 429, 507}
GENERATION: Final = {"generation", "messages"}  # tags
PUBLICATION: Final = {"uploads", "adapters"}
IDEMPOTENCY: Final[Json] = {
    "name": "idempotency-key",
    "in": "header",
    "description": "Any words, such as a UUID. Sent again with the same body within 24 hours, the "
    "same answer comes back and nothing is done twice; with another body, 409.",
    "schema": {"type": "string", "pattern": "^[ -~]{1,255}$"},
}


def operation_id(route: APIRoute) -> str:
    """Stable and readable: the route's first tag and its function's name."""
    return "_".join([*map(str, route.tags[:1]), route.name])


def install(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Have the app tell the completed document; it is made when it is first asked for.

    `routers` are those that the app includes, under their own prefixes.
    """
    routes = [route for router in routers for route in router.routes]

    def document() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, routes)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, routes: Iterable[BaseRoute]) -> Json:
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=app.description,
        routes=app.routes,
        tags=[{"name": name, "description": text} for name, text in TAGS.items()],
    )
    components = document["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    told = (Error, MessageError, ChatChunk, ResponseEvent)
    models = [(model, "serialization") for model in told]
    _, definitions = models_json_schema(models, ref_template=REF)  # type: ignore[arg-type]
    components.update(definitions["$defs"])
    for schema in components.values():
        _put_nulls_back(schema)
    for route, operation in _operations(routes, document["paths"]):
        _complete(route, operation)
    return document


def _put_nulls_back(schema: Json) -> None:
    """FastAPI drops the nulls of examples; those of fields that must be there are told."""
    for example in schema.get("examples", ()):
        for field in schema.get("required", ()) if isinstance(example, dict) else ():
            if {"type": "null"} in schema["properties"][field].get("anyOf", ()):
                example.setdefault(field, None)


def _operations(routes: Iterable[BaseRoute], paths: Json) -> Iterator[tuple[APIRoute, Json]]:
    for route in routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in route.methods or ():
                yield route, paths[route.path_format][method.lower()]


def _complete(route: APIRoute, operation: Json) -> None:
    """Give an operation its errors, in the shape that its route has, and its examples' nulls."""
    if "POST" in (route.methods or ()) and not GENERATION & {*operation["tags"]}:
        operation.setdefault("parameters", []).append(IDEMPOTENCY)
    for parameter in operation.get("parameters", ()):
        _forbid_null(parameter["schema"])
    responses = operation["responses"]
    for status, given in route.responses.items():
        for media, content in given.get("content", {}).items():
            if "example" in content:  # FastAPI drops its nulls
                responses[str(status)]["content"][media]["example"] = content["example"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    told = {int(status) for status in responses if status.isdecimal() and int(status) >= 400}
    for status in sorted(_statuses(operation) | told):
        meaning = {"description": MEANINGS.get(status, "An error.")}
        response = responses.setdefault(str(status), meaning)
        content = response.setdefault("content", {}).setdefault("application/json", {})
        if "schema" not in content:
            response["content"]["application/json"] = _error(route, status) | content
    operation["responses"] = dict(sorted(responses.items()))


def _forbid_null(schema: Json) -> None:
    """A parameter is left out, never null."""
    kinds = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    if len(kinds) == 1:
        del schema["anyOf"]
        schema.update(kinds[0])
    if None in schema.get("examples", ()):
        del schema["examples"]


def _statuses(operation: Json) -> set[int]:
    """The errors that an operation may end in, as far as its declaration tells."""
    found = set(ALWAYS)
    if operation.get("security"):
        found |= WITH_KEY
    if "requestBody" in operation:
        found |= WITH_BODY
    if GENERATION & {*operation["tags"]}:
        found |= GENERATING
    if PUBLICATION & {*operation["tags"]} and "requestBody" in operation:
        found |= PUBLISHING
    if parameters := operation.get("parameters"):
        found |= {404, 409} if IDEMPOTENCY in parameters else {404}
    return found


def _error(route: APIRoute, status: int) -> Json:
    shape, error = getattr(route, "error_body", None), SAMPLES.get(status)
    model = "MessageError" if shape else "Error"
    content: Json = {"schema": {"$ref": REF.format(model=model)}}
    if error is not None:
        content["example"] = shape(error, SAMPLE_ID) if shape else error.body
    return content
