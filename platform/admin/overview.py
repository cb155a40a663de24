"""The first screen: what the server does now, and has done in the last minutes.

An operator sees the whole server; others see their tenant's counts of the day beside the server's
speed, which is theirs too. Knows totals; refuses to know how they are counted.
"""

from collections.abc import Iterator
from datetime import UTC, datetime

from fastapi import APIRouter, Request
from sqlalchemy import func, select
from starlette.responses import Response

from loraplex.engine.protocol import Ready, Stats
from loraplex.platform.admin.route import PageRoute
from loraplex.platform.admin.sampling import take_sample
from loraplex.platform.admin.shell import page, shell
from loraplex.platform.admin.visit import PATH, Visit, Visiting
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.db.models import Adapter, UsageRecord
from loraplex.platform.db.types import utc_now
from loraplex.platform.history import Span
from loraplex.web.contexts.overview import Chart, Overview, OverviewLive, Sample, Share, Tile
from loraplex.web.words import of_count, of_seconds

router = APIRouter(prefix=PATH, route_class=PageRoute, include_in_schema=False)
SHOWN = 120  # samples: ten minutes


@router.get("")
async def show_overview(request: Request, ctx: Ctx, visit: Visiting) -> Response:
    """The screen."""
    return page(await _shown(Overview, request, ctx, visit))


@router.get("/overview/live")
async def show_live(request: Request, ctx: Ctx, visit: Visiting) -> Response:
    """The part that changes by itself."""
    return page(await _shown(OverviewLive, request, ctx, visit))


async def _shown(kind: type[Overview], request: Request, ctx: Context, visit: Visit) -> Overview:
    take_sample(ctx)
    spans = [*ctx.history.spans()][-SHOWN:]
    ready, stats = ctx.engine.info, ctx.engine.stats
    requests, tokens = await _today(ctx, visit)
    adapters = await _count_adapters(ctx, visit)
    refused = ctx.metrics.refusals() if visit.tenant_id is None else {}
    shares, total, free = memory(ready, stats)
    return kind(
        shell=shell(request, visit, "Overview"),
        base=ctx.base.name,
        engine=f"{ready.device} ({ready.executor}, {ready.dtype})" if ready else None,
        live=f"{PATH}/overview/live",
        tiles=(
            Tile("Requests", of_count(requests), "today"),
            Tile("Tokens", of_count(tokens), "today"),
            *_speed(spans[-1] if spans else None, stats),
            Tile("Adapters", of_count(adapters), f"{stats.images_resident} in memory"),
        ),
        charts=tuple(_charts(spans)),
        refusals=tuple(sorted(refused.items(), key=lambda each: -each[1])),
        memory=shares,
        memory_total=total,
        memory_free=free,
        adapters=adapters,
        first_steps=visit.can_write and requests == 0 and await _is_new(ctx, visit),
    )


def _speed(span: Span | None, stats: Stats) -> Iterator[Tile]:
    rate = span.rate("generated") if span else 0.0
    first, hits = (span.first_token_s, span.hit_share) if span else (None, None)
    yield Tile("Speed", of_count(round(rate, 1)), "tokens a second")
    yield Tile("First token", "–" if first is None else of_seconds(first), "median")
    yield Tile("Prefix hits", "–" if hits is None else f"{hits:.0%}", "of prompt tokens")
    yield Tile("Running", of_count(stats.running), f"{stats.waiting} waiting")


def _charts(spans: list[Span]) -> Iterator[Chart]:
    def chart(name: str, title: str, unit: str, **series: list[float | None]) -> Chart:
        moments = (datetime.fromtimestamp(span.at, UTC) for span in spans)
        columns = zip(*series.values(), strict=True)
        samples = tuple(map(Sample, moments, columns))
        return Chart(name, title, unit, tuple(each.replace("_", " ") for each in series), samples)

    yield chart(
        "tokens",
        "Tokens",
        "a second",
        generated=[round(span.rate("generated"), 1) for span in spans],
        prompt=[round(span.rate("prompt"), 1) for span in spans],
    )
    yield chart(
        "queue",
        "Requests",
        "at once",
        running=[span.after.running for span in spans],
        waiting=[span.after.waiting for span in spans],
    )
    yield chart(
        "first-token",
        "Time to first token",
        "ms, median",
        first_token=[_scaled(span.first_token_s, 1000) for span in spans],
    )
    yield chart(
        "hits",
        "Prefix hits",
        "% of prompt tokens",
        prefix_hits=[_scaled(span.hit_share, 100) for span in spans],
    )


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else round(value * factor, 1)


def memory(ready: Ready | None, stats: Stats) -> tuple[tuple[Share, ...], int, int]:
    """How the engine's memory is used: weights, KV and adapters; all of it, and what is free."""
    if ready is None or not ready.memory_bytes:
        return (), 0, 0
    total = ready.weight_bytes + ready.memory_bytes
    parts = {
        "weights": ready.weight_bytes,
        "KV": stats.kv_blocks_used * ready.block_bytes,
        "adapters": stats.image_bytes,
    }
    shares, start = [], 0.0
    for label, size in parts.items():
        width = round(100 * size / total, 3)
        shares.append(Share(label, size, round(start, 3), width))
        start += width
    return tuple(shares), total, max(0, total - sum(parts.values()))


async def _today(ctx: Context, visit: Visit) -> tuple[int, int]:
    tokens = func.sum(UsageRecord.prompt_tokens + UsageRecord.completion_tokens)
    statement = select(func.count(), tokens).select_from(UsageRecord)
    await ctx.books.flush()
    async with ctx.db.read(visit.tenant_id) as session:
        found = await session.execute(statement.where(UsageRecord.day == utc_now().date()))
        requests, total = found.one()
    return requests, int(total or 0)


async def _is_new(ctx: Context, visit: Visit) -> bool:
    """Whether nobody has asked anything yet."""
    async with ctx.db.read(visit.tenant_id) as session:
        return await session.scalar(select(UsageRecord.day).limit(1)) is None


async def _count_adapters(ctx: Context, visit: Visit) -> int:
    async with ctx.db.read(visit.tenant_id) as session:
        count = select(func.count(Adapter.id)).where(Adapter.deleted_at.is_(None))
        return int(await session.scalar(count) or 0)
