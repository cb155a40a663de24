"""Random lives of jobs against a plain model of the queue, and the longest wait under attack."""

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.engine.counters import Counters
from loraplex.engine.fairness import FairQueue
from loraplex.engine.protocol import Policy

TENANTS = st.sampled_from("abcd")
AGE_S, REMEMBER = 4.0, 2


@dataclass(eq=False)
class Job:
    tenant: str
    priority: int
    arrived: float


class Life(RuleBasedStateMachine):
    """Jobs come, run, are preempted, end and are aborted, under caps that change."""

    def __init__(self) -> None:
        super().__init__()
        self.counters = Counters()
        self.queue: FairQueue[Job] = FairQueue(self.counters, AGE_S, REMEMBER)
        self.caps: dict[str, int] = {}
        self.clock = 0.0
        self.fresh: list[Job] = []
        self.preempted: list[Job] = []
        self.running: list[Job] = []

    @property
    def waiting(self) -> list[Job]:
        return self.fresh + self.preempted

    @rule(tenant=TENANTS, priority=st.integers(-2, 2), weight=st.sampled_from([0.5, 1.0, 3.0]))
    def push(self, tenant: str, priority: int, weight: float) -> None:
        self.clock += 1.0
        job = Job(tenant, priority, self.clock)
        self.counters.set_policy(tenant, Policy(weight=weight))
        before, idle = self.counters.value(tenant), not self.queue.waiting(tenant)
        self.queue.push(job)
        self.fresh.append(job)
        assert idle or self.counters.value(tenant) == before
        assert self.counters.value(tenant) >= before

    @rule(tenant=TENANTS, cap=st.integers(0, 3))
    def cap(self, tenant: str, cap: int) -> None:
        self.caps[tenant] = cap

    def admissible(self, job: Job) -> bool:
        running = sum(one.tenant == job.tenant for one in self.running)
        return running < self.caps.get(job.tenant, 3)

    @rule(prompt=st.integers(1, 20))
    def serve(self, prompt: int) -> None:
        able = [one for one in self.waiting if self.admissible(one)]
        counter = {one.tenant: self.counters.value(one.tenant) for one in able}
        job = self.queue.peek(self.admissible)
        assert (job is None) == (not able)
        if job is None:
            return
        assert counter[job.tenant] == min(counter.values())
        assert job is self.first_of(job.tenant)
        self.queue.take(job)
        self.queue.started(job)
        self.counters.charge(job.tenant, prompt)
        (self.fresh if job in self.fresh else self.preempted).remove(job)
        self.running.append(job)

    def first_of(self, tenant: str) -> Job:
        own = [job for job in self.preempted if job.tenant == tenant]
        own = own or [job for job in self.fresh if job.tenant == tenant]
        return min(own, key=lambda job: (job.priority + job.arrived / AGE_S, job.arrived))

    @precondition(lambda self: self.running)
    @rule(tokens=st.integers(1, 5))
    def decode(self, tokens: int) -> None:
        for job in self.running:
            self.counters.charge(job.tenant, generated_tokens=tokens)

    @precondition(lambda self: self.running)
    @rule()
    def preempt(self) -> None:
        victim = self.queue.order(self.running)[-1]
        assert self.counters.value(victim.tenant) == max(
            self.counters.value(job.tenant) for job in self.running
        )
        self.running.remove(victim)
        self.queue.ended(victim)
        self.queue.push_preempted(victim)
        self.preempted.append(victim)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        job = data.draw(st.sampled_from(self.running))
        self.running.remove(job)
        self.queue.ended(job)

    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        jobs = self.waiting + self.running
        if not jobs:
            return
        job = data.draw(st.sampled_from(jobs))
        assert self.queue.remove(job) == (job in self.waiting)
        for place in (self.fresh, self.preempted):
            if job in place:
                place.remove(job)

    @invariant()
    def the_books_agree(self) -> None:
        self.queue.check_integrity(self.running)
        assert set(self.queue) == set(self.waiting)
        assert len(self.queue) == len(self.waiting)
        for tenant in "abcd":
            assert self.queue.waiting(tenant) == sum(j.tenant == tenant for j in self.waiting)
            assert self.queue.running(tenant) == sum(j.tenant == tenant for j in self.running)

    @invariant()
    def few_idle_tenants_are_known(self) -> None:
        active = {job.tenant for job in self.waiting + self.running}
        known = {served.tenant for served in self.queue.services()}
        assert active <= known
        assert len(known - active) <= REMEMBER


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


COST, RIVALS, URGENCY = 3, "bcd", 2  # most that a job costs, and most that its priority differs
ATTACK = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from("a" + RIVALS), st.integers(-URGENCY, URGENCY), st.integers(1, COST)
        ),
        max_size=2,
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(attack=ATTACK, priority=st.integers(-URGENCY, URGENCY))
def test_nothing_waits_for_ever(attack: list[list[tuple[str, int, int]]], priority: int):
    """One job is served a second, and the attack is repeated without end.

    Jobs of its own tenant overtake the victim only if they come within 2 * URGENCY * AGE_S seconds.
    Between two jobs of its tenant, each rival draws level: COST + 1 jobs of cost 1 at most.
    """
    counters = Counters()
    queue: FairQueue[Job] = FairQueue(counters, AGE_S)
    costs: dict[Job, int] = {}
    victim = Job("a", priority, 0.0)
    overtakers = 2 * (2 * int(URGENCY * AGE_S) + 1)
    longest = (overtakers + 1) * (1 + len(RIVALS) * (COST + 1))
    for second in range(longest + 1):
        for tenant, urgency, cost in attack[second % len(attack)]:
            job = Job(tenant, urgency, float(second))
            costs[job] = cost
            queue.push(job)
        if second == 0:
            queue.push(victim)
        served = queue.peek(lambda job: True)
        if served is victim:
            return
        if served:
            queue.take(served)
            counters.charge(served.tenant, costs[served])
    raise AssertionError(f"not served within {longest} seconds")
