"""Takes a sample of the server's totals every few seconds, for the charts of the overview.

Knows where totals are; refuses to know what is made of them.
"""

import time
from typing import NoReturn

import anyio

from loraplex.platform.api.context import Context
from loraplex.platform.history import EVERY_S, Totals


async def keep_sampling(ctx: Context) -> NoReturn:
    """Sample until cancelled."""
    while True:
        take_sample(ctx)
        await anyio.sleep(EVERY_S)


def take_sample(ctx: Context) -> None:
    """Sample now, unless one was taken just before."""
    stats = ctx.engine.stats
    totals = Totals(
        generated=stats.generated_tokens,
        prompt=stats.prompt_tokens,
        cache_queried=stats.cache_queried_tokens,
        cache_hit=stats.cache_hit_tokens,
        running=stats.running,
        waiting=stats.waiting,
        first_token=ctx.metrics.first_tokens(),
    )
    ctx.history.take(time.time(), totals)
