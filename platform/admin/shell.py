"""The frame of every page: tabs by role, and in words what was just done."""

from importlib.metadata import version
from typing import Final
from urllib.parse import urlencode

from fastapi import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from loraplex.platform.admin.visit import Visit
from loraplex.platform.errors import ApiError
from loraplex.platform.users import Role
from loraplex.web.contexts.shell import ErrorPage, Notice, Pager, Shell, Tab, Viewer
from loraplex.web.pages import Context, render

EVERYONE: Final[frozenset[Role]] = frozenset({"operator", "admin", "viewer"})
WRITERS: Final[frozenset[Role]] = frozenset({"operator", "admin"})
OPERATORS: Final[frozenset[Role]] = frozenset({"operator"})
TABS: Final[tuple[tuple[str, str, str, frozenset[Role]], ...]] = (
    ("now", "Overview", "/admin", EVERYONE),
    ("adapters", "Adapters", "/admin/adapters", EVERYONE),
    ("adapters", "Upload", "/admin/upload", WRITERS),
    ("adapters", "Playground", "/admin/playground", WRITERS),
    ("use", "API keys", "/admin/keys", WRITERS),
    ("use", "Usage", "/admin/usage", EVERYONE),
    ("house", "Tenants", "/admin/tenants", OPERATORS),
    ("house", "Users", "/admin/users", WRITERS),
    ("house", "Audit", "/admin/audit", WRITERS),
    ("house", "System", "/admin/system", OPERATORS),
)
DONE: Final = {
    "alias-moved": "The alias has moved.",
    "alias-promoted": "The canary is now the alias's version.",
    "alias-rolled-back": "The alias is where it was before.",
    "alias-removed": "The alias is gone; its history stays.",
    "adapter-saved": "Saved.",
    "adapter-deleted": "The adapter is deleted. Requests in flight finish.",
    "version-retired": "The version is retired: the bare name passes it over.",
    "version-restored": "The version is back.",
    "upload-cancelled": "The upload is cancelled.",
    "tenant-created": "The tenant is created. Set its limits, then make it a key.",
    "tenant-suspended": "The tenant is suspended; its keys open nothing.",
    "tenant-resumed": "The tenant is active again.",
    "limits-saved": "The limits hold from the next request on.",
    "key-revoked": "The key is revoked.",
    "user-disabled": "The user can no longer sign in.",
    "user-enabled": "The user can sign in again.",
    "password-set": "The password is set. Other sessions of yours have ended.",
}


def shell(request: Request, visit: Visit, tab: str, notice: Notice | None = None) -> Shell:
    """The frame, with `tab` as the current one and what `?done=` names, where it is known."""
    done = DONE.get(request.query_params.get("done", ""))
    return Shell(
        version=version("loraplex"),
        viewer=Viewer(
            visit.signed.user.name,
            visit.role,
            visit.signed.tenant.name if visit.signed.tenant else None,
        ),
        tabs=tuple(
            Tab(label, href, group, label == tab)
            for group, label, href, roles in TABS
            if visit.role in roles
        ),
        notice=notice or (Notice("good", done) if done else None),
    )


def page(context: Context, status: int = 200) -> HTMLResponse:
    """The answer that shows a page."""
    return HTMLResponse(render(context), status_code=status)


def pager(there: str, after: str, last: str | None, word: str = "after") -> Pager:
    """From a page of the list at `there`, which follows `after`: to its start, and past `last`."""
    mark = "&" if "?" in there else "?"
    following = f"{there}{mark}{urlencode({word: last})}" if last else None
    return Pager(there if after else None, following)


def go(path: str, done: str | None = None) -> RedirectResponse:
    """The answer to a form that worked: another page, which says what was done."""
    path, hash_mark, place = path.partition("#")
    mark = "&" if "?" in path else "?"
    told = f"{path}{mark}done={done}" if done else path
    return RedirectResponse(f"{told}{hash_mark}{place}", status_code=303)


def by_field(error: ApiError, **fields: str) -> dict[str, str]:
    """What is wrong with a form, under the field whose parameter it is, else under none: "".

    `fields` has the form's name of each parameter.
    """
    parameter = (error.param or "").partition(".")[0]
    return {fields.get(parameter, ""): error.message}


def error_page(request: Request, visit: Visit, error: ApiError) -> Response:
    """An error where a page was asked for."""
    titles = {403: "Not for your role", 404: "Not here", 503: "Not now"}
    context = ErrorPage(
        shell=shell(request, visit, ""),
        title=titles.get(error.status, "That did not work"),
        text=error.message,
    )
    return page(context, error.status)
