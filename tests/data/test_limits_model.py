"""Limits against a model that just counts: any order of calls gives the same decisions."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from loraplex.platform.embedded_redis import EmbeddedRedis
from loraplex.platform.errors import BadRequest, BudgetSpent, RateLimited
from loraplex.platform.ids import new_id
from loraplex.platform.limit_standing import BUDGETS
from loraplex.platform.limits import Admission, Limiter, connect
from loraplex.platform.quotas import Bucket, Limits

CENTURY = 3.15e9  # seconds; in one period nothing comes back by itself
TOKENS = st.none() | st.integers(1, 200)
LIMITS = st.builds(
    Limits,
    requests_per_minute=st.none() | st.just(12),
    tokens_per_minute=TOKENS,
    max_concurrency=st.none() | st.integers(1, 4),
    tokens_per_day=TOKENS,
    tokens_per_month=TOKENS,
)
BUCKETS = st.tuples(
    st.builds(Bucket, st.just("tenant"), st.just("t"), LIMITS),
    st.builds(Bucket, st.just("key"), st.sampled_from("kl"), LIMITS),
    st.builds(Bucket, st.just("adapter"), st.sampled_from("ab"), LIMITS),
)


@dataclass
class Count:
    """What a bucket has seen; requests are only counted where they are limited."""

    requests: int = 0
    tokens: int = 0
    running: set[str] = field(default_factory=set)


class Counting(RuleBasedStateMachine):
    """Redis beside three numbers a bucket."""

    url: str
    runner: asyncio.Runner
    admissions = Bundle("admissions")
    settled = Bundle("settled")

    def __init__(self) -> None:
        super().__init__()
        self.client = connect(self.url, timeout_s=10.0)
        self.limiter = Limiter(self.client, period_s=CENTURY, lease_s=CENTURY)
        self.tenant = new_id("ten")
        self.counts: dict[tuple[str, str], Count] = {}
        self.where: dict[str, list[Count]] = {}

    def teardown(self) -> None:
        self.runner.run(self.client.aclose())

    def count(self, bucket: Bucket) -> Count:
        return self.counts.setdefault((bucket.kind, bucket.id), Count())

    @rule(target=admissions, buckets=BUCKETS, estimate=st.integers(0, 60))
    def admit(self, buckets: tuple[Bucket, ...], estimate: int) -> Admission | None:
        expected = {each for b in buckets for each in self.refusals(b, estimate)}
        try:
            admission = self.runner.run(self.limiter.admit(self.tenant, buckets, estimate))
        except (RateLimited, BudgetSpent) as error:
            assert (error.bucket, error.name) in expected
            assert isinstance(error, BudgetSpent) == any(name in BUDGETS for _, name in expected)
            return None
        except BadRequest:
            return None
        assert not expected
        for bucket in buckets:
            count = self.count(bucket)
            count.requests += bucket.limits.requests_per_minute is not None
            count.tokens += estimate
            count.running.add(admission.id)
        self.where[admission.id] = [self.count(bucket) for bucket in buckets]
        self.check_standing(admission)
        return admission

    def refusals(self, bucket: Bucket, estimate: int) -> set[tuple[str, str]]:
        count, limits = self.count(bucket), bucket.limits
        after = {
            "requests_per_minute": count.requests + 1,
            "tokens_per_minute": count.tokens + estimate,
            "max_concurrency": len(count.running) + 1,
            "tokens_per_day": count.tokens + estimate,
            "tokens_per_month": count.tokens + estimate,
        }
        known = ((name, use, getattr(limits, name)) for name, use in after.items())
        return {(bucket.kind, n) for n, use, limit in known if limit is not None and use > limit}

    def check_standing(self, admission: Admission) -> None:
        for use in admission.standing.uses:
            if use.limit is not None:
                count = self.count(use.bucket)
                is_of = {"requests_per_minute": count.requests, "max_concurrency": count.running}
                expected = is_of.get(use.name, count.tokens)
                assert use.used == (len(expected) if isinstance(expected, set) else expected)

    @rule(target=settled, admission=consumes(admissions), used=st.integers(0, 80))
    def settle(self, admission: Admission | None, used: int) -> Admission | None:
        if admission is not None:
            self.runner.run(self.limiter.settle(admission, used))
            for count in self.where[admission.id]:
                count.running.discard(admission.id)
                count.tokens += used - admission.estimate
        return admission

    @rule(admission=settled, used=st.integers(0, 80))
    def settle_again(self, admission: Admission | None, used: int) -> None:
        if admission is not None:
            self.runner.run(self.limiter.settle(admission, used))

    @rule(admission=admissions | settled)
    def beat(self, admission: Admission | None) -> None:
        if admission is not None:
            kept = self.runner.run(self.limiter.heartbeat(admission, 3))
            assert kept == (admission.id in self.where[admission.id][0].running)

    @invariant()
    def redis_holds_what_the_model_holds(self) -> None:
        assert self.runner.run(self.stored()) == self.expected()

    def expected(self) -> tuple[Counter[str], Counter[str], int]:
        tokens, running = Counter[str](), Counter[str]()
        for (kind, id), count in self.counts.items():
            name = kind if kind == "tenant" else f"{kind}:{id}"
            running[name] = len(count.running)
            for window in ("minute", "day", "month"):
                tokens[f"{name}:{window}"] = count.tokens
        return +tokens, +running, len(self.counts.get(("tenant", "t"), Count()).running)

    async def stored(self) -> tuple[Counter[str], Counter[str], int]:
        prefix = f"limits:{{{self.tenant}}}:"
        keys = [key.decode() async for key in self.client.scan_iter(f"{prefix}*")]
        tokens, running, reserved = Counter[str](), Counter[str](), 0
        for key in keys:
            name = key.removeprefix(prefix)
            if name.startswith("reserved:"):
                reserved += 1
            elif name.endswith(":leases"):
                running[name.removesuffix(":leases")] = await self.client.zcard(key)
            elif any(f":{window}:" in name for window in ("minute", "day", "month")):
                tokens[name.rpartition(":")[0]] += int(await self.client.get(key))
        return +tokens, +running, reserved


def test_any_order_of_calls(redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        machine = type("Machine", (Counting,), {"url": redis_server.url, "runner": runner})
        run_state_machine_as_test(
            machine,
            settings=settings(max_examples=10, stateful_step_count=20, deadline=None),
        )


@pytest.fixture(autouse=True)
def empty(redis_server: EmbeddedRedis) -> None:
    """Other tests' keys would only slow the scans down."""

    async def flush() -> None:
        client = connect(redis_server.url, timeout_s=10.0)
        await client.flushall()
        await client.aclose()

    asyncio.run(flush())
