"""/healthz, /readyz and /metrics: for load balancers and for Prometheus.

The first two are public and say nothing but up or down, to HEAD as to GET. Metrics are for an
operator's key, or for a caller on the same machine, where a scraper that has no key usually runs.
"""

import contextlib
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

import anyio
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from sqlalchemy import func, select, text
from starlette.responses import JSONResponse, Response

from loraplex.platform.api.auth import Bearer, Header, Rule, operator, presented, public
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.db.models import Upload
from loraplex.platform.errors import Unavailable
from loraplex.platform.metrics import CONTENT_TYPE

CHECK_S = 2.0

router = APIRouter(tags=["health"])
log = logging.getLogger("loraplex.api")


class Health(BaseModel):
    """The process lives."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """Whether requests can be served, and which part is down where they cannot."""

    status: Annotated[Literal["ready", "not ready", "stopping"], Field(examples=["ready"])]
    parts: Annotated[dict[str, Literal["ok", "down"]], Field(examples=[{"redis": "ok"}])]


@router.head("/healthz", dependencies=[Depends(public)], include_in_schema=False)
@router.get("/healthz", dependencies=[Depends(public)])
async def get_health() -> Health:
    """Whether the process lives; nothing else is asked."""
    return Health()


@router.head("/readyz", dependencies=[Depends(public)], include_in_schema=False)
@router.get(
    "/readyz",
    dependencies=[Depends(public)],
    response_model=Readiness,
    responses={503: {"description": "A part is down, or the server stops.", "model": Readiness}},
)
async def get_readiness(ctx: Ctx) -> JSONResponse:
    """Whether each part that requests need is there; 503 when one is not, or it is stopping.

    Redis is told of, but its loss alone is no reason to send requests elsewhere.
    """
    if ctx.drain.begun:
        return JSONResponse({"status": "stopping", "parts": {}}, status_code=503)
    found = await check_parts(ctx)
    ready = all(found[name] == "ok" for name in NEEDED)
    body = {"status": "ready" if ready else "not ready", "parts": found}
    return JSONResponse(body, status_code=200 if ready else 503)


async def check_parts(ctx: Context) -> dict[str, str]:
    """Of each part that a request needs, whether it is "ok" or "down"."""
    found: dict[str, str] = {}
    async with anyio.create_task_group() as group:
        for name, check in CHECKS.items():
            group.start_soon(_check, ctx, name, check, found)
    return found


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


NEEDED = ("database", "engine")  # without Redis limits are held by each server alone
CHECKS = {"database": _check_database, "redis": _check_redis, "engine": _check_engine}


class Scraping(Rule):
    """Lets an operator in, and a caller on this machine that presents no key."""

    async def admit(self, request: Request) -> None:
        """Raise as for an operator's route, unless the caller is on this machine."""
        if presented(request) or not _is_local(request):
            await operator.admit(request)

    async def __call__(self, _: Bearer, __: Header) -> None:
        """Give the route nothing; the parameters tell OpenAPI of the two headers."""


def _is_local(request: Request) -> bool:
    """Whether the peer is this machine and speaks for itself, not for others as a proxy."""
    proxied = {"x-forwarded-for", "forwarded"} & {*request.headers.keys()}
    if request.client is None or proxied:
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


@router.get(
    "/metrics",
    response_class=Response,
    dependencies=[Depends(Scraping())],
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    openapi_extra={"security": [{}]},  # besides a key: none, on the same machine
)
async def get_metrics(ctx: Ctx) -> Response:
    """Prometheus' text format: requests, limits, uploads, and what the engine says of itself."""
    with contextlib.suppress(Unavailable):
        async with ctx.db.read(None) as session:
            counts = select(Upload.state, func.count()).group_by(Upload.state)
            by_state = dict((await session.execute(counts)).all())
        ctx.metrics.show_uploads(by_state)
    return Response(ctx.metrics.exposition(), media_type=CONTENT_TYPE)
