"""Turns whatever a route raises into the one error shape of the API.

Knows FastAPI's and pydantic's errors and ours; refuses to put into an answer what a caller sent
(it may be a secret) or what the server is made of.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from loraplex.platform.errors import (
    ApiError,
    BadRequest,
    MethodNotAllowed,
    NotFound,
    TooLarge,
)

MAX_COMPLAINTS = 5


def install(app: FastAPI) -> None:
    """Answer every error of the app's routes, and the router's own, in the one shape."""
    app.add_exception_handler(ApiError, _handle)
    app.add_exception_handler(HTTPException, _handle)
    app.add_exception_handler(RequestValidationError, _handle)


def response_to(error: ApiError) -> JSONResponse:
    """The response that tells a caller of an error."""
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def _handle(request: Request, error: Exception) -> Response:
    return response_to(as_api_error(error))


def as_api_error(error: Exception) -> ApiError:
    """The same fault as one of ours; an unknown exception is raised again."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _from_validation(error.errors())
    if isinstance(error, HTTPException):
        return _from_http(error)
    raise error


def _from_http(error: HTTPException) -> ApiError:
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
