"""Generating routes, whose errors tell how the caller's limits stand, as their answers do.

Knows that a request's key was checked and what it is held to; refuses to know what the route does.
A request that was let in brings its own numbers, so nothing is asked for it here.
"""

from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from loraplex.platform.api.buckets import own_buckets
from loraplex.platform.api.context import get_context
from loraplex.platform.api.failures import as_api_error
from loraplex.platform.api.json_body import JsonRoute
from loraplex.platform.errors import ApiError, LimiterDown

FAULTS: Final = (ApiError, HTTPException, RequestValidationError)


class LimitedRoute(JsonRoute):
    """A route whose every error after the key's check has `x-ratelimit-*`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, with the headers added to what it raises."""
        handle = super().get_route_handler()

        async def limited(request: Request) -> Response:
            try:
                return await handle(request)
            except FAULTS as fault:
                error = as_api_error(fault)
                error.add_headers(await _headers(request))
                raise error from fault

        return limited


async def _headers(request: Request) -> dict[str, str]:
    """How the tenant and the key stand; nothing for a stranger, and while Redis is away."""
    principal = getattr(request.state, "principal", None)
    if principal is None or principal.tenant_id is None:
        return {}
    buckets = own_buckets(principal, principal.tenant_id)
    try:
        standing = await get_context(request).limiter.look(principal.tenant_id, buckets)
    except LimiterDown:
        return {}
    return standing.headers
