"""Admits a job to its tenant's limits and settles it, however it ends.

Knows the limiter and the usage ledger; refuses to know how a job runs and what it answers.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from starlette.requests import ClientDisconnect

from loraplex.platform.api.beside import beside
from loraplex.platform.api.context import Context
from loraplex.platform.api.forms import Usage
from loraplex.platform.api.generation import Generation
from loraplex.platform.api.job import Job
from loraplex.platform.db.models import UsageRecord
from loraplex.platform.errors import ApiError, LimiterDown, RateLimited
from loraplex.platform.limits import Admission
from loraplex.platform.usage import record

SETTLE_S = 10.0
GONE = "client_disconnected"

log = logging.getLogger("loraplex.api")


@asynccontextmanager
async def admitted(ctx: Context, job: Job, generation: Generation) -> AsyncIterator[Admission]:
    """Hold a lease for the block, with heartbeats; then charge what was generated, and record it.

    Raises `RateLimited` or `LimiterDown` before the block runs. Settling is shielded from
    cancellation, so that a disconnect or a shutdown leaks neither the lease nor the usage.
    """
    admission = await _admit(ctx, job)
    outcome = "cancelled"
    try:
        async with beside(lambda _: ctx.limiter.keep_alive(admission)):
            yield admission
        outcome = generation.outcome
    except ApiError as error:
        outcome = error.code or error.type
        raise
    except ClientDisconnect:
        outcome = GONE
        raise
    finally:
        with anyio.move_on_after(SETTLE_S, shield=True) as limit:
            await _settle(ctx, job, admission, outcome, _charge(generation, outcome))
        if limit.cancelled_caught:
            log.error("request %s could not be settled in time", job.caller.request_id)


async def _admit(ctx: Context, job: Job) -> Admission:
    caller = job.caller
    try:
        return await ctx.limiter.admit(caller.tenant_id, caller.principal.limits, job.estimate)
    except RateLimited as refusal:
        ctx.metrics.count_limited(refusal.kind)
        raise


def _charge(generation: Generation, outcome: str) -> Usage:
    """All of a finished job; only what was generated of one that failed.

    A caller who leaves pays for the prompt too, once a token shows that it was computed.
    """
    computed = outcome == generation.outcome or (outcome == GONE and generation.completion_tokens)
    prompt_tokens = generation.prompt_tokens if computed else 0
    return Usage(prompt_tokens, generation.completion_tokens, generation.cached_tokens)


async def _settle(ctx: Context, job: Job, admission: Admission, outcome: str, usage: Usage) -> None:
    try:
        await ctx.limiter.settle(admission, usage.total_tokens)
    except LimiterDown:
        log.warning("request %s is settled by its lease's end", job.caller.request_id)
    for run in job.runs:
        if run.finished is not None:
            ctx.prefixes.count(job.caller.tenant_id, run.finished)
    try:
        async with ctx.db.session(job.caller.tenant_id) as session:
            await record(session, _row(job, outcome, usage))
    except Exception:
        log.exception("usage of request %s is lost: %s", job.caller.request_id, usage)


def _row(job: Job, outcome: str, usage: Usage) -> UsageRecord:
    caller = job.caller
    return UsageRecord(
        tenant_id=caller.tenant_id,
        request_id=caller.request_id,
        key_id=caller.principal.key_id,
        adapter=caller.target.adapter,
        model=caller.target.model_id,
        digest=caller.target.digest,
        outcome=outcome,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
