"""The usual generating request, by a shorter way than FastAPI's.

FastAPI works a route's dependencies out anew for each request, a tenth of what a request costs. So
a body of JSON that passes, with headers that pass, is guarded, read and checked here, and every
other request is left to FastAPI: no complaint is worded here, and what the route is given is the
same. Knows what the app demands of a generating route; refuses to know what the route does.
"""

import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, cast

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from loraplex.platform.api.auth import guard, identify
from loraplex.platform.api.context import get_context, get_request_id, while_open

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
DEMANDS: Final = (while_open, guard)  # by every generating route, beside its own parameters
UNREADABLE: Final = (ValueError, RecursionError)


class ShortRoute(APIRoute):
    """A route that takes `principal`, `ctx`, `request_id`, a `body`, and headers with defaults."""

    def get_route_handler(self) -> Handler:
        """FastAPI's handler, for the requests that cannot go the short way."""
        handle, body_field = super().get_route_handler(), self.body_field
        if body_field is None or self.response_field is not None:  # an answer for FastAPI to check
            return handle

        async def shortly(request: Request) -> Response:
            given = await self._given(request, body_field)
            return await handle(request) if given is None else await self._answer(request, given)

        return shortly

    async def _given(self, request: Request, body_field: Any) -> dict[str, Any] | None:
        """Body and headers, checked as FastAPI would; None where it would complain."""
        get_context(request).drain.check_open()
        await guard(request)
        said = None
        if _is_json(request.headers.get("content-type", "")):
            with contextlib.suppress(*UNREADABLE):
                said = await request.json()
        if said is None:
            return None
        given = {"body": (body_field, said)}
        for field in self.dependant.header_params:
            if (value := request.headers.get(field.alias)) is not None:
                given[field.name] = (field, value)
        return _checked(given)

    async def _answer(self, request: Request, given: Mapping[str, Any]) -> Response:
        ctx, request_id = get_context(request), get_request_id(request)
        principal = await identify(request)
        answer = self.endpoint(principal=principal, ctx=ctx, request_id=request_id, **given)
        return cast("Response", await answer)


def _checked(given: Mapping[str, tuple[Any, Any]]) -> dict[str, Any] | None:
    """Each field's value as FastAPI reads it; None where it complains of one."""
    read = {name: field.validate(value, {}, loc=(name,)) for name, (field, value) in given.items()}
    if any(complaints for _, complaints in read.values()):
        return None
    return {name: value for name, (value, _) in read.items()}


def _is_json(content_type: str) -> bool:
    """Whether it surely is; of a stranger spelling FastAPI has the last word."""
    return content_type.partition(";")[0].rstrip() == "application/json"
