"""The page at `/`, for people who open the server's address in a browser."""

from importlib.metadata import version

from fastapi import APIRouter, Depends, Request
from starlette.responses import HTMLResponse

from loraplex.platform.api.auth import public
from loraplex.platform.api.context import Ctx
from loraplex.web.pages import Welcome, render

router = APIRouter(include_in_schema=False)


@router.get("/", response_class=HTMLResponse, dependencies=[Depends(public)])
async def get_welcome(request: Request, ctx: Ctx) -> HTMLResponse:
    """What this server is, and how to ask it something."""
    ready = ctx.engine.info
    page = Welcome(
        version=version("loraplex"),
        base=ctx.base.name,
        url=str(request.base_url).rstrip("/"),
        context_tokens=ctx.context_tokens,
        engine=ready.device if ready else None,
    )
    return HTMLResponse(render(page))
