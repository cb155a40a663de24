"""Limits without Redis: a share of each in one process; and the breaker that says when."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from limit_kit import of_all, of_tenant

from loraplex.platform.breaker import Breaker
from loraplex.platform.degraded import Degraded
from loraplex.platform.quotas import Bucket, Limits

MINUTE = 60_000_000
RATES = st.builds(
    Limits,
    requests_per_minute=st.none() | st.integers(1, 9),
    tokens_per_minute=st.none() | st.integers(1, 99),
    max_concurrency=st.none() | st.integers(1, 5),
)


class Alone(RuleBasedStateMachine):
    """Every decision against the whole history of those before it."""

    @initialize(limits=st.tuples(RATES, RATES), replicas=st.integers(1, 4), now=st.integers(0, 9))
    def begin(self, limits: tuple[Limits, Limits], replicas: int, now: int) -> None:
        self.replicas, self.now, self.next = replicas, now * MINUTE, 0
        self.buckets = of_all(*limits)
        self.alone = Degraded(replicas, MINUTE)
        self.moments: list[int] = []
        self.tokens: dict[str, tuple[int, int]] = {}  # id: minute, tokens charged
        self.running: set[str] = set()

    def share(self, limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // self.replicas)

    @rule(estimate=st.integers(0, 30), wait=st.integers(0, 40_000_000))
    def admit(self, estimate: int, wait: int) -> None:
        self.now, self.next = self.now + wait, self.next + 1
        id = str(self.next)
        standing = self.alone.admit("t", id, self.buckets, estimate, self.now)
        if standing.refused_by is not None:
            assert standing.wait_s > 0
            return
        self.moments.append(self.now)
        self.tokens[id] = (self.now // MINUTE, estimate)
        self.running.add(id)
        for bucket in self.buckets:
            self.check(bucket.limits)

    def check(self, limits: Limits) -> None:
        requests = self.share(limits.requests_per_minute)
        if requests is not None:  # GCRA: a burst, then one a step
            step = -(-MINUTE // requests)
            for first in range(len(self.moments)):
                within = self.now - self.moments[first]
                assert len(self.moments) - first <= requests + within // step
        minute = self.now // MINUTE
        tokens = self.share(limits.tokens_per_minute)
        charged = sum(count for when, count in self.tokens.values() if when == minute)
        assert tokens is None or charged <= tokens
        at_once = self.share(limits.max_concurrency)
        assert at_once is None or len(self.running) <= at_once

    @rule(choice=st.randoms(use_true_random=False), used=st.integers(0, 30))
    def settle(self, choice: object, used: int) -> None:
        if not self.running:
            return
        id = choice.choice(sorted(self.running))  # type: ignore[attr-defined]
        minute, estimate = self.tokens[id]
        used = min(used, estimate)
        for _ in range(2):
            self.alone.settle(id, used, self.now)
        self.running.remove(id)
        self.tokens[id] = (minute, used)


def test_a_process_alone_never_exceeds_its_share() -> None:
    run_state_machine_as_test(Alone, settings=settings(max_examples=30, deadline=None))


@pytest.mark.parametrize(("replicas", "expected"), [(1, 12), (3, 4), (5, 2), (99, 1)])
def test_each_replica_lets_its_share_through(replicas: int, expected: int) -> None:
    for limits in (Limits(12), Limits(None, 12), Limits(None, None, 12)):
        alone = Degraded(replicas, MINUTE)
        buckets = (Bucket("tenant", "t", limits),)
        answers = [alone.admit("t", str(i), buckets, 1, 5) for i in range(30)]
        assert sum(answer.refused_by is None for answer in answers) == expected


def test_what_is_used_comes_back_with_time() -> None:
    alone, buckets = Degraded(1, MINUTE), of_tenant(2, 50)
    for i in range(2):
        assert alone.admit("t", str(i), buckets, 20, 0).refused_by is None
        alone.settle(str(i), 25, 0)
    refused = alone.admit("t", "2", buckets, 1, 1000)
    assert refused.refused_by.name == "tokens_per_minute"
    assert refused.wait_s == pytest.approx(60 - 0.001)
    assert alone.admit("t", "3", buckets, 50, MINUTE).refused_by is None


def test_tenants_and_buckets_are_told_apart() -> None:
    alone, buckets = Degraded(1, MINUTE), of_all(Limits(1), Limits(1))
    assert alone.admit("t", "1", buckets, 0, 0).refused_by is None
    assert alone.admit("u", "2", buckets, 0, 0).refused_by is None
    assert alone.admit("t", "3", buckets, 0, 0).refused_by is not None


def test_more_than_a_share_can_never_be_held() -> None:
    assert Degraded(2, MINUTE).can_ever_hold(of_tenant(None, 100), 50)
    assert not Degraded(2, MINUTE).can_ever_hold(of_tenant(None, 100), 51)
    assert Degraded(2, MINUTE).can_ever_hold(of_tenant(), 10**9)


def test_the_breaker_opens_probes_and_closes() -> None:
    breaker = Breaker(failures=2, cool_s=1.0)
    for _ in range(2):
        assert breaker.allows(0.0)
        breaker.failed(0.0)
    assert not breaker.is_well
    assert [breaker.allows(0.9), breaker.allows(1.0), breaker.allows(1.1)] == [False, True, False]
    breaker.failed(1.5)
    assert [breaker.allows(2.4), breaker.allows(2.5)] == [False, True]
    breaker.succeeded()
    assert breaker.is_well
    assert all(breaker.allows(2.5) for _ in range(9))
