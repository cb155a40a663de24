"""Budgets beside a sum, in any order of requests and losses: each request counts once."""

import asyncio
from itertools import count

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)
from ledger_kit import HELD, MONTH, UNHELD, Ledger, read_again
from limit_kit import PATIENCE, of_all

from loraplex.platform.embedded_redis import EmbeddedRedis
from loraplex.platform.ids import new_id
from loraplex.platform.limit_standing import Standing
from loraplex.platform.limits import Admission, Limiter, connect
from loraplex.platform.quotas import UNLIMITED, Limits
from loraplex.platform.recount import recount


class Losing(RuleBasedStateMachine):
    """Redis that loses everything, or is distrusted, beside a sum: each request counts once."""

    url: str
    runner: asyncio.Runner
    open = Bundle("open")
    ended = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.client, self.ledger = connect(self.url, timeout_s=PATIENCE), Ledger()
        self.limiter = Limiter(self.client, spent=self.ledger.spent)
        self.tenant, self.ids = new_id("ten"), count()
        self.counted: dict[str, int] = {}  # by Redis since the last loss
        self.written: dict[str, int] = {}

    def teardown(self) -> None:
        self.runner.run(self.limiter.close())
        self.runner.run(self.client.aclose())

    @rule(target=open, estimate=st.integers(0, 50), has_budget=st.booleans())
    def admit(self, estimate: int, has_budget: bool) -> Admission:
        held = of_all(Limits(tokens_per_month=10**6), UNLIMITED) if has_budget else UNHELD
        id = f"req_{next(self.ids)}"
        admission = self.runner.run(self.limiter.admit(self.tenant, held, estimate, request_id=id))
        self.counted[id] = estimate
        return admission

    @rule(target=ended, admission=consumes(open), tokens=st.integers(0, 80))
    def settle(self, admission: Admission, tokens: int) -> tuple[Admission, int]:
        self.runner.run(self.limiter.settle(admission, tokens, note="kept"))
        if admission.id in self.counted:
            self.counted[admission.id] = tokens
        return admission, tokens

    @rule(ended=consumes(ended))
    def write(self, ended: tuple[Admission, int]) -> None:
        admission, tokens = ended
        self.ledger.add(admission.at, tokens)
        self.written[admission.id] = tokens

    @rule()
    def lose(self) -> None:
        self.runner.run(self.client.flushall())
        self.counted.clear()

    @rule()
    def distrust(self) -> None:
        self.runner.run(recount(self.client))
        self.counted.clear()

    @invariant()
    def every_request_counts_once(self) -> None:
        standing = self.runner.run(self.look())
        known = self.written | self.counted
        assert standing.use(MONTH).used == sum(known.values())
        assert standing.use(MONTH, "key").used == sum(known.values())

    async def look(self) -> Standing:
        await self.limiter.look(self.tenant, HELD)
        await read_again(self.client, self.limiter, self.tenant)
        return await self.limiter.look(self.tenant, HELD)


def test_any_order_of_losses(redis_server: EmbeddedRedis) -> None:
    with asyncio.Runner() as runner:
        machine = type("Machine", (Losing,), {"url": redis_server.url, "runner": runner})
        run_state_machine_as_test(
            machine, settings=settings(max_examples=15, stateful_step_count=20, deadline=None)
        )
