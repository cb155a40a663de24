"""Admits a job to its limits and settles it, however it ends.

Knows the limiter and the books; refuses to know how a job runs and what it answers.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect

from loraplex.platform.api.context import Context
from loraplex.platform.api.forms import Usage
from loraplex.platform.api.generation import Generation
from loraplex.platform.api.job import Job
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import ApiError, BudgetSpent, RateLimited
from loraplex.platform.limits import Admission
from loraplex.platform.logs import note
from loraplex.platform.usage import Entry

GONE = "client_disconnected"
COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")
NOTED = ("model", "arm", "outcome", *COUNTS, "queue_ms", "load_ms", "first_token_ms")


@dataclass
class Lease:
    """An admitted job, and what the ledger is to say of it: at its end, all."""

    admission: Admission
    entry: Entry


@asynccontextmanager
async def admitted(ctx: Context, job: Job, generation: Generation) -> AsyncIterator[Lease]:
    """Hold a lease for the block, with heartbeats; then charge what was generated, and record it.

    Raises what `Limiter.admit` raises before the block runs. Every error of the block tells how the
    limits stand. Settling is no part of what may be cancelled, so that a disconnect or a shutdown
    leaks neither the lease nor the usage.
    """
    entry, began = _entry(job), time.monotonic()
    with ctx.traces.step("admission"):
        admission = await _admit(ctx, job, entry)
    lease = Lease(admission, msgspec.structs.replace(entry, created_at=admission.at))
    outcome = "cancelled"
    try:
        with ctx.limiter.kept_alive(admission, lambda: generation.completion_tokens):
            yield lease
        outcome = generation.outcome
    except ApiError as error:
        outcome = error.code or error.type
        error.add_headers(admission.headers)
        raise
    except ClientDisconnect:
        outcome = GONE
        raise
    finally:
        usage = _charge(generation, outcome)
        times = _times(generation, time.monotonic() - began)
        told = {"outcome": outcome} | vars(usage) | times
        lease.entry = msgspec.structs.replace(lease.entry, **told)
        with ctx.traces.step("settle"):
            await ctx.books.settle(admission, lease.entry)


async def _admit(ctx: Context, job: Job, entry: Entry) -> Admission:
    caller = job.caller
    try:
        return await ctx.limiter.admit(
            caller.tenant_id,
            caller.buckets,
            job.estimate,
            request_id=caller.request_id,
            note=entry.encoded(),
        )
    except (RateLimited, BudgetSpent) as refusal:
        ctx.metrics.count_limited(refusal.bucket, refusal.name)
        raise


def _charge(generation: Generation, outcome: str) -> Usage:
    """All of a finished job; only what was generated of one that failed.

    A caller who leaves pays for the prompt too, once a token shows that it was computed.
    """
    computed = outcome == generation.outcome or (outcome == GONE and generation.completion_tokens)
    prompt_tokens = generation.prompt_tokens if computed else 0
    return Usage(prompt_tokens, generation.completion_tokens, generation.cached_tokens)


def count(ctx: Context, job: Job, entry: Entry) -> None:
    """Tell the metrics, the access line and the tenant's prefix state how a request ended."""
    ctx.metrics.count_generation(entry)
    note(**{name: value for name in NOTED if (value := getattr(entry, name)) is not None})
    for run in job.runs:
        if run.finished is not None:
            ctx.prefixes.count(job.caller.tenant_id, run.finished)


def _entry(job: Job) -> Entry:
    """What is known of a request before it runs."""
    caller = job.caller
    return Entry(
        tenant_id=caller.tenant_id,
        request_id=caller.request_id,
        key_id=caller.principal.key_id,
        adapter=caller.target.adapter,
        model=caller.target.model_id,
        arm=caller.target.arm,
        digest=caller.target.digest,
        created_at=utc_now(),
    )


def _times(generation: Generation, total_s: float) -> dict[str, Any]:
    """Milliseconds: what the engine tells of the first prompt, and all of it since admission."""
    times = {"total_ms": total_s * 1000}
    if (finished := generation.runs[0].finished) is not None:
        times |= {
            "queue_ms": finished.queue_s * 1000,
            "load_ms": finished.load_s * 1000,
            "first_token_ms": finished.first_token_s * 1000,
        }
    return times
