"""/healthz, /readyz and /metrics: for load balancers and for Prometheus.

The first two are public and say nothing but up or down. Metrics are for an operator's key, or for
a caller on the same machine, where a scraper that has no key usually runs.
"""

import ipaddress
import logging
from collections.abc import Awaitable, Callable
from typing import Annotated

import anyio
from fastapi import APIRouter, Depends, Request
from sqlalchemy import text
from starlette.responses import JSONResponse, Response

from loraplex.platform.api.auth import Bearer, Header, authenticated, operator
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.metrics import CONTENT_TYPE

CHECK_S = 2.0

router = APIRouter(tags=["health"])
log = logging.getLogger("loraplex.api")


@router.get("/healthz")
async def get_health() -> dict[str, str]:
    """Whether the process lives."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"description": "A part is down."}})
async def get_readiness(ctx: Ctx) -> JSONResponse:
    """Whether each part that a request needs is there; 503 when one is not."""
    found: dict[str, str] = {}
    async with anyio.create_task_group() as group:
        for name, check in CHECKS.items():
            group.start_soon(_check, ctx, name, check, found)
    ready = all(state == "ok" for state in found.values())
    body = {"status": "ready" if ready else "not ready", "parts": found}
    return JSONResponse(body, status_code=200 if ready else 503)


async def _check(
    ctx: Context, name: str, check: Callable[[Context], Awaitable[None]], found: dict[str, str]
) -> None:
    found[name] = "down"
    try:
        with anyio.move_on_after(CHECK_S):
            await check(ctx)
            found[name] = "ok"
    except Exception as error:
        log.warning("%s is down: %s", name, type(error).__name__)


async def _check_database(ctx: Context) -> None:
    async with ctx.db.read(None) as session:
        await session.execute(text("SELECT 1"))


async def _check_redis(ctx: Context) -> None:
    await ctx.limiter.ping()


async def _check_engine(ctx: Context) -> None:
    if ctx.engine.info is None:
        raise ConnectionError


CHECKS = {"database": _check_database, "redis": _check_redis, "engine": _check_engine}


async def may_see_metrics(request: Request, ctx: Ctx, bearer: Bearer, header: Header) -> None:
    """Let an operator in, and a caller on this machine; raises as `authenticated` does."""
    if bearer is None and header is None and _is_local(request):
        return
    await operator(await authenticated(ctx, bearer, header))


def _is_local(request: Request) -> bool:
    """Whether the peer is this machine and speaks for itself, not for others as a proxy."""
    proxied = {"x-forwarded-for", "forwarded"} & {*request.headers.keys()}
    if request.client is None or proxied:
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


@router.get("/metrics", response_class=Response)
async def get_metrics(_: Annotated[None, Depends(may_see_metrics)], ctx: Ctx) -> Response:
    """Prometheus' text format."""
    return Response(ctx.metrics.exposition(), media_type=CONTENT_TYPE)
