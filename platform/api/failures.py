"""Turns whatever a route raises into the one error shape of the API, or into its own.

A route has a shape of its own where its class has an `error_body`, or an answer of its own where it
has an `error_response`. Knows FastAPI's and pydantic's
errors and ours; refuses to put into an answer what a caller sent (it may be a secret) or what the
server is made of.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from loraplex.platform.errors import (
    ApiError,
    BadRequest,
    MethodNotAllowed,
    NotFound,
    TooLarge,
)

MAX_COMPLAINTS = 5
Body = TypeVar("Body", bound=BaseModel)


def install(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Answer every error of the app's routes, and the router's own, in the one shape.

    `routers` are those that the app includes, under their own prefixes.
    """
    methods = _methods(routers)

    async def handle(request: Request, error: Exception) -> Response:
        told = as_api_error(error)
        if isinstance(told, MethodNotAllowed):
            told = MethodNotAllowed(told.message, headers={"allow": methods[_path(request)]})
        return response_to(told, request.scope)

    app.add_exception_handler(ApiError, handle)
    app.add_exception_handler(HTTPException, handle)
    app.add_exception_handler(RequestValidationError, handle)


def _methods(routers: Iterable[APIRouter]) -> Mapping[str, str]:
    """By path template, all methods that some route has; Starlette tells of one route alone."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for router in routers:
        for route in router.routes:
            found[_template(route)] |= getattr(route, "methods", None) or {"GET"}
    return defaultdict(
        lambda: "GET, HEAD", {path: ", ".join(sorted(m)) for path, m in found.items()}
    )


def _path(request: Request) -> str:
    return _template(request.scope.get("route"))


def _template(route: Any) -> str:
    return str(getattr(route, "path", ""))


def response_to(error: ApiError, scope: Scope) -> Response:
    """The response that tells a caller of an error, in the shape of the route that matched."""
    route = scope.get("route")
    if make := getattr(route, "error_response", None):
        return cast("Response", make(error, Request(scope)))
    shape = getattr(route, "error_body", None)
    body = shape(error, scope["state"]["request_id"]) if shape else error.body
    return JSONResponse(body, status_code=error.status, headers=error.headers)


def as_api_error(error: Exception) -> ApiError:
    """The same fault as one of ours; an unknown exception is raised again."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _from_validation(error.errors())
    if isinstance(error, HTTPException):
        return _from_http(error)
    raise error


def checked(body: type[Body], said: Mapping[str, Any]) -> Body:
    """A route's body, made here of what somebody said elsewhere: in a form, or another API's words.

    Raises `BadRequest` as the route itself would.
    """
    try:
        return body.model_validate(said)
    except ValidationError as error:
        complaints = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise _from_validation(complaints) from error


def _from_http(error: HTTPException) -> ApiError:
    if isinstance(error.__cause__, ApiError):
        return error.__cause__
    headers = dict(error.headers or {})
    match error.status_code:
        case 400:
            return BadRequest("The body cannot be read; is it complete, and UTF-8 JSON?")
        case 405:
            return MethodNotAllowed("This path does not have this method.", headers=headers)
        case 413:
            return TooLarge(str(error.detail), headers=headers)
        case _:
            return NotFound("There is nothing here. GET /openapi.json lists all routes.")


def _from_validation(complaints: Sequence[Mapping[str, Any]]) -> BadRequest:
    first = complaints[0]
    if first["type"] == "json_invalid":
        return BadRequest(
            f"The body is not JSON ({first['ctx']['error']} at character {first['loc'][1]})."
        )
    if tuple(first["loc"]) == ("body",):
        return BadRequest("The body must be a JSON object, with content-type application/json.")
    sentences = [_sentence(complaint) for complaint in complaints[:MAX_COMPLAINTS]]
    return BadRequest(" ".join(sentences), param=_field(first))


def _field(complaint: Mapping[str, Any]) -> str:
    return ".".join(str(part)[:64] for part in complaint["loc"][1:])


def _sentence(complaint: Mapping[str, Any]) -> str:
    field, message = _field(complaint), complaint["msg"].removeprefix("Value error, ")
    if complaint["type"] == "extra_forbidden":
        return f"Unrecognized field {field}."
    if complaint["type"] == "missing":
        return f"The field {field} is required."
    return f"Invalid {field}: {message[:1].lower()}{message[1:]}."
