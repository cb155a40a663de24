"""Limits against a model that just counts: any order of calls gives the same decisions."""

import asyncio
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
from loraplex.platform.errors import BadRequest, RateLimited
from loraplex.platform.ids import new_id
from loraplex.platform.limits import Admission, Limiter, connect
from loraplex.platform.quotas import TenantLimits

CENTURY = 3.15e9  # seconds; in one period nothing comes back by itself
LIMITS = st.builds(
    TenantLimits,
    requests_per_minute=st.none() | st.just(12),
    tokens_per_minute=st.none() | st.integers(1, 200),
    max_concurrency=st.none() | st.integers(1, 4),
)


class Counting(RuleBasedStateMachine):
    """Redis beside three numbers: requests counted, tokens charged, requests running."""

    url: str
    runner: asyncio.Runner
    admissions = Bundle("admissions")
    settled = Bundle("settled")

    def __init__(self) -> None:
        super().__init__()
        self.client = connect(self.url, timeout_s=10.0)
        self.limiter = Limiter(self.client, period_s=CENTURY, lease_s=CENTURY)
        self.tenant = new_id("ten")
        self.requests, self.tokens, self.running = 0, 0, set()

    def teardown(self) -> None:
        self.runner.run(self.client.aclose())

    @rule(target=admissions, limits=LIMITS, estimate=st.integers(0, 60))
    def admit(self, limits: TenantLimits, estimate: int) -> Admission | None:
        expected = self.expected_refusals(limits, estimate)
        try:
            admission = self.runner.run(self.limiter.admit(self.tenant, limits, estimate))
        except RateLimited as error:
            assert error.kind in expected
            return None
        except BadRequest:
            assert estimate > limits.tokens_per_minute
            return None
        assert not expected
        self.requests += limits.requests_per_minute is not None
        self.tokens += estimate
        self.running.add(admission.id)
        self.check_standing(admission, limits)
        return admission

    def expected_refusals(self, limits: TenantLimits, estimate: int) -> set[str]:
        asked = {
            "requests": (self.requests + 1, limits.requests_per_minute),
            "tokens": (self.tokens + estimate, limits.tokens_per_minute),
            "concurrency": (len(self.running) + 1, limits.max_concurrency),
        }
        return {kind for kind, (use, limit) in asked.items() if limit is not None and use > limit}

    def check_standing(self, admission: Admission, limits: TenantLimits) -> None:
        standing = admission.standing
        assert standing.running == len(self.running)
        if limits.requests_per_minute is not None:
            assert standing.requests.remaining == limits.requests_per_minute - self.requests
        if limits.tokens_per_minute is not None:
            assert standing.tokens.remaining == limits.tokens_per_minute - self.tokens

    @rule(target=settled, admission=consumes(admissions), used=st.integers(0, 80))
    def settle(self, admission: Admission | None, used: int) -> Admission | None:
        if admission is not None:
            self.runner.run(self.limiter.settle(admission, used))
            self.running.discard(admission.id)
            self.tokens += used - admission.estimate
        return admission

    @rule(admission=settled, used=st.integers(0, 80))
    def settle_again(self, admission: Admission | None, used: int) -> None:
        if admission is not None:
            self.runner.run(self.limiter.settle(admission, used))

    @rule(admission=admissions | settled)
    def beat(self, admission: Admission | None) -> None:
        if admission is not None:
            kept = self.runner.run(self.limiter.heartbeat(admission))
            assert kept == (admission.id in self.running)

    @invariant()
    def redis_holds_what_the_model_holds(self) -> None:
        prefix = f"limits:{{{self.tenant}}}"

        async def stored() -> tuple[set[str], int, int]:
            leases = await self.client.zrange(f"{prefix}:leases", 0, -1)
            keys = [key async for key in self.client.scan_iter(f"{prefix}:*")]
            counters = [key for key in keys if b":tokens:" in key]
            tokens = sum([int(await self.client.get(key)) for key in counters])
            reserved = [key for key in keys if b":reserved:" in key]
            return {lease.decode() for lease in leases}, tokens, len(reserved)

        running = len(self.running)
        assert self.runner.run(stored()) == (self.running, self.tokens, running)


def test_any_order_of_calls(redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        machine = type("Machine", (Counting,), {"url": redis_server.url, "runner": runner})
        run_state_machine_as_test(
            machine,
            settings=settings(max_examples=15, stateful_step_count=25, deadline=None),
        )


@pytest.fixture(autouse=True)
def empty(redis_server: EmbeddedRedis) -> None:
    """Other tests' keys would only slow the scans down."""

    async def flush() -> None:
        client = connect(redis_server.url, timeout_s=10.0)
        await client.flushall()
        await client.aclose()

    asyncio.run(flush())
