"""Prefix-cache state against plain sets and sums: any order of events, losses and restarts."""

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from loraplex.engine.client.fake import FakeEngine
from loraplex.engine.protocol import CacheEvent, CacheEvents, Finished
from loraplex.platform import prefix_mirror
from loraplex.platform.embedded_redis import EmbeddedRedis
from loraplex.platform.limits import connect
from loraplex.platform.prefix_counts import Counts
from loraplex.platform.prefix_mirror import Mirror
from loraplex.platform.prefix_state import PrefixState

PATIENCE = 20.0
LONG = 1000.0
TENANTS, REPLICAS, NAMES = ("ten_a", "ten_b"), ("r1", "r2"), "abcd"
TENANT, REPLICA = st.sampled_from(TENANTS), st.sampled_from(REPLICAS)


def changes(tenant: str, there: set[str], names: set[str]) -> list[CacheEvent]:
    """Evict those of the blocks that are there, and store the others."""
    kinds = (("evicted", names & there), ("stored", names - there))
    return [CacheEvent(kind, tenant, tuple(blocks), 0) for kind, blocks in kinds]


class Caching(RuleBasedStateMachine):
    """Redis beside plain sets and sums, with engines that restart and a Redis that forgets."""

    url: str
    runner: asyncio.Runner

    def __init__(self) -> None:
        super().__init__()
        self.client = connect(self.url, timeout_s=PATIENCE)
        self.runner.run(self.client.flushall())
        self.engines = {name: FakeEngine() for name in REPLICAS}
        self.states = {
            n: PrefixState(self.client, n, e, lease_s=LONG) for n, e in self.engines.items()
        }
        self.blocks = {(r, t): set() for r in REPLICAS for t in TENANTS}
        self.sums = dict.fromkeys(TENANTS, Counts())

    def teardown(self) -> None:
        self.runner.run(self.client.aclose())

    @rule(replica=REPLICA, tenant=TENANT, names=st.sets(st.sampled_from(NAMES)))
    def toggle(self, replica: str, tenant: str, names: set[str]) -> None:
        there = self.blocks[replica, tenant]
        self.states[replica].hear(CacheEvents(tuple(changes(tenant, there, names))))
        self.sums[tenant] += Counts(evicted_blocks=len(names & there))
        there ^= names

    @rule(replica=REPLICA, tenant=TENANT, prompt=st.integers(1, 50), cached=st.integers(0, 50))
    def finish(self, replica: str, tenant: str, prompt: int, cached: int) -> None:
        found = min(prompt, cached)
        self.states[replica].count(tenant, Finished("x", "stop", prompt, 1, found))
        self.sums[tenant] += Counts(1, int(found > 0), prompt, found)

    @rule(replica=REPLICA)
    def restart(self, replica: str) -> None:
        self.engines[replica].die()
        self.engines[replica].revive()
        for tenant in TENANTS:
            self.blocks[replica, tenant] = set()

    @rule(tenant=TENANT, replica=REPLICA, key=st.sampled_from(("blocks", "last")))
    def lose(self, tenant: str, replica: str, key: str) -> None:
        """Redis loses a key; its data are whole again once the tenant is told of again."""
        self.runner.run(self.client.delete(f"cache:{{{tenant}}}:last:{replica}"))
        self.runner.run(self.client.delete(f"cache:{{{tenant}}}:{key}:{replica}"))
        self.states[replica]._mirror.retell([tenant])

    @rule()
    def forget_replicas(self) -> None:
        self.runner.run(
            self.client.delete("{cache-replicas}:leases", "{cache-replicas}:replica:r1")
        )

    @invariant()
    def redis_holds_what_the_model_holds(self) -> None:
        self.runner.run(self.check())

    async def check(self) -> None:
        for state in self.states.values():
            await state.flush()
            state._mirror.check_integrity()
        for tenant in TENANTS:
            found = await self.states["r1"].of(tenant)
            assert found.counts == self.sums[tenant]
            held = {holding.replica: holding.blocks for holding in found.holdings}
            assert held == {r: len(self.blocks[r, tenant]) for r in REPLICAS}
            assert found.complete
            longest = await self.states["r1"].longest(tenant, NAMES)
            for replica in REPLICAS:
                there = [name in self.blocks[replica, tenant] for name in (*NAMES, "x")]
                assert longest.get(replica, 0) == there.index(False)


def test_any_order_of_events(redis_server: EmbeddedRedis) -> None:
    with asyncio.Runner() as runner:
        machine = type("Machine", (Caching,), {"url": redis_server.url, "runner": runner})
        run_state_machine_as_test(
            machine,
            settings=settings(max_examples=8, stateful_step_count=15, deadline=None),
        )


class Telling(RuleBasedStateMachine):
    """A mirror, and one who is told: whatever order and whatever is lost, he ends up right."""

    def __init__(self) -> None:
        super().__init__()
        self.mirror = Mirror()
        self.there: dict[str, set[str]] = {tenant: set() for tenant in TENANTS}
        self.known: dict[str, set[str]] = {tenant: set() for tenant in TENANTS}
        self.last = dict.fromkeys(TENANTS, 0)

    @rule(tenant=TENANT, names=st.sets(st.sampled_from(NAMES)))
    def toggle(self, tenant: str, names: set[str]) -> None:
        there = self.there[tenant]
        for event in changes(tenant, there, names):
            self.mirror.hear(event)
        there ^= names

    @rule(tenant=TENANT)
    def tell(self, tenant: str) -> None:
        if not self.mirror.is_due(tenant, 0.0):
            return
        news = self.mirror.tell(tenant, 1.0)
        if news.whole:
            self.known[tenant] = set()
        elif news.previous != self.last[tenant]:
            self.mirror.retell([tenant])
            return
        assert news.number > self.last[tenant]
        self.known[tenant] = self.known[tenant] - {*news.removed} | {*news.added}
        self.last[tenant] = news.number
        self.mirror.confirm(tenant)

    @rule(tenant=TENANT)
    def lose(self, tenant: str) -> None:
        if self.mirror.is_due(tenant, 0.0):
            self.mirror.tell(tenant, 1.0)
            self.mirror.retell()

    @rule(tenant=TENANT)
    def forget(self, tenant: str) -> None:
        """He who is told loses what he knew; he says so when he is told more."""
        if self.mirror.is_due(tenant, 0.0):
            self.known[tenant], self.last[tenant] = set(), -1

    @rule()
    def restart(self) -> None:
        self.mirror.restart(complete=True)
        for tenant in TENANTS:
            self.there[tenant], self.known[tenant], self.last[tenant] = set(), set(), 0

    @invariant()
    def he_who_is_told_all_knows_all(self) -> None:
        self.mirror.check_integrity()
        assert self.mirror.complete
        assert sorted(self.mirror.due(2.0)) == sorted(self.mirror._shares)
        for tenant in TENANTS:
            if not self.mirror.is_due(tenant, 0.0):
                assert self.known[tenant] == self.there[tenant]
            if not self.there[tenant] and not self.mirror.is_due(tenant, 0.0):
                assert tenant not in self.mirror._shares


def test_any_order_of_tellings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_mirror, "MAX_CHANGES", 2)
    run_state_machine_as_test(
        Telling, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
