"""Anthropic's shape of our errors; the statuses and headers are the same.

Refuses to know routes and requests.
"""

from typing import Any, Final

from loraplex.platform.errors import ApiError

TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message", "details"}, "request_id"}`.

    `details` has the code of the error under `error_code`, and the field at fault under `param`.
    """
    told = {
        "type": TYPES.get(error.status, "api_error"),
        "message": error.message,
        "details": {"error_code": error.code, "param": error.param},
    }
    return {"type": "error", "error": told, "request_id": request_id}
