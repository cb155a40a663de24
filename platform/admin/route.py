"""Admin routes answer errors with pages: a sign-in, a form's own page, or an error's.

Knows how errors look to people; refuses to know which page it is.
"""

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

from loraplex.platform.admin.shell import error_page
from loraplex.platform.admin.visit import SignInFirst, Visit
from loraplex.platform.errors import ApiError

SIGN_IN = "/admin/sign-in"


class PageRoute(APIRoute):
    """A route whose errors are for people."""

    @staticmethod
    def error_response(error: ApiError, request: Request) -> Response:
        """The answer to a request that failed; scripts of ours get JSON, as they ask for."""
        if isinstance(error, SignInFirst):
            return _to_sign_in(error, request)
        if "application/json" in request.headers.get("accept", ""):
            return JSONResponse(error.body, error.status, error.headers)
        visit: Visit | None = getattr(request.state, "visit", None)
        if visit is None and error.status == 403:
            return PlainTextResponse(error.message, 403)
        if visit is None:
            return _to_sign_in(SignInFirst(""), request)
        return error_page(request, visit, error)


def _to_sign_in(error: SignInFirst, request: Request) -> Response:
    """A redirect that works for links, forms, and parts that a script of the page asks for."""
    target = f"{SIGN_IN}?onward={error.onward}" if error.onward else SIGN_IN
    if "hx-request" in request.headers:
        return Response(status_code=401, headers={"hx-redirect": target})
    if "application/json" in request.headers.get("accept", ""):
        return JSONResponse(error.body, 401)
    return RedirectResponse(target, status_code=303)
