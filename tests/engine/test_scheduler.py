"""The scheduler on ints alone: its rules one by one, then any order of all of them."""

from unittest import TestCase

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.engine.block_pool import BlockPool
from loraplex.engine.protocol import Generate, Sampling
from loraplex.engine.scheduler import Plan, Scheduler
from loraplex.engine.sequence import Sequence, from_request


def sequence(
    name: str, prompt: int, *, tokens: int = 1, image: str | None = None, tenant: str = ""
) -> Sequence:
    request = Generate(name, (1,) * prompt, Sampling(tokens), image, tenant)
    return from_request(request, now=0.0)


def scheduler(blocks: int, *, seqs: int = 8, tokens: int = 16, size: int = 4) -> Scheduler:
    return Scheduler(BlockPool(blocks, size), seqs, tokens)


def names(plan: Plan) -> list[tuple[str, int, int]]:
    return [(part.sequence.request_id, part.start, part.count) for part in plan.scheduled]


def run(subject: Scheduler) -> Plan:
    """One step in which every sequence that is computed to its end gets one more token."""
    plan = subject.schedule()
    subject.commit(plan.scheduled)
    for part in plan.scheduled:
        if part.sequence.pending == 0:
            part.sequence.token_ids.append(1)
    return plan


def test_a_long_prompt_is_cut_into_chunks_and_decodes_go_first() -> None:
    subject = scheduler(32)
    subject.add(sequence("long", 40))
    assert names(run(subject)) == [("long", 0, 16)]
    subject.add(sequence("short", 3))
    assert names(run(subject)) == [("long", 16, 16)]
    assert names(run(subject)) == [("long", 32, 8), ("short", 0, 3)]
    subject.add(sequence("next", 20))
    assert names(run(subject)) == [("long", 40, 1), ("short", 3, 1), ("next", 0, 14)]
    assert names(run(subject)) == [("long", 41, 1), ("short", 4, 1), ("next", 14, 6)]


def test_no_more_sequences_run_than_allowed() -> None:
    subject = scheduler(32, seqs=2)
    for name in "abc":
        subject.add(sequence(name, 2))
    assert [name for name, *_ in names(run(subject))] == ["a", "b"]
    assert (subject.running, subject.waiting) == (2, 1)


def test_tenants_take_turns() -> None:
    subject = scheduler(32, seqs=5)
    for i in range(4):
        subject.add(sequence(f"greedy{i}", 1, tenant="greedy"))
    subject.add(sequence("modest0", 1, tenant="modest"))
    admitted = [name for name, *_ in names(run(subject))]
    assert admitted == ["greedy0", "modest0", "greedy1", "greedy2", "greedy3"]


def test_a_missing_image_delays_only_those_who_need_it() -> None:
    subject = scheduler(32)
    subject.add(sequence("waits", 2, image="a"))
    subject.add(sequence("runs", 2))
    subject.add(sequence("also waits", 2, image="b"))
    assert names(run(subject)) == [("runs", 0, 2)]
    assert subject.loading_images == ["a", "b"]
    assert [s.request_id for s in subject.image_ready("b")] == ["also waits"]
    assert names(run(subject)) == [("runs", 2, 1), ("also waits", 0, 2)]
    assert (subject.loading, subject.loading_images) == (1, ["a"])


def test_the_last_admitted_gives_way_and_comes_back_first() -> None:
    subject = scheduler(4, size=2)
    old, young = sequence("old", 4), sequence("young", 4)
    subject.add(old)
    subject.add(young)
    run(subject)
    subject.add(sequence("newcomer", 1))
    plan = run(subject)
    assert names(plan) == [("old", 4, 1)]
    assert plan.preempted == (young,)
    assert (young.block_table, young.computed) == ([], 0)
    subject.check_integrity()
    subject.remove(old)
    assert names(run(subject))[0] == ("young", 0, 5)


def test_the_preempted_come_back_oldest_first() -> None:
    subject = scheduler(6, size=2)
    old, middle, young = (sequence(name, 4) for name in ("old", "middle", "young"))
    for each in (old, middle, young):
        subject.add(each)
    run(subject)
    subject.add(sequence("newcomer", 1))
    preempted = [victim for _ in range(5) for victim in run(subject).preempted]
    assert preempted == [young, middle]
    for ended, next_one in ((old, "middle"), (middle, "young")):
        subject.remove(ended)
        assert names(run(subject))[0][0] == next_one


def test_a_prompt_is_started_only_when_all_of_it_has_blocks() -> None:
    subject = scheduler(6, size=4, tokens=8)
    subject.add(sequence("first", 16))
    subject.add(sequence("second", 12))
    subject.add(sequence("small", 1))
    assert names(run(subject)) == [("first", 0, 8)]
    assert names(run(subject)) == [("first", 8, 8)]
    assert names(run(subject)) == [("first", 16, 1)]
    assert subject.waiting == 2, "the small one does not overtake"


@pytest.mark.parametrize("phase", ["loading", "waiting", "running", "preempted"])
def test_remove_in_every_phase_frees_everything(phase: str) -> None:
    subject = scheduler(4, size=2)
    target = sequence("target", 4, image="a" if phase == "loading" else None)
    other = sequence("other", 4)
    if phase == "preempted":
        subject.add(other)
    subject.add(target)
    if phase in ("running", "preempted"):
        run(subject)
    if phase == "preempted":
        assert run(subject).preempted == (target,)
    subject.remove(target)
    assert target.block_table == []
    assert subject.running + subject.waiting + subject.loading == (phase == "preempted")
    subject.check_integrity()


IMAGES = ["a", "b", "c"]


class SchedulerMachine(RuleBasedStateMachine):
    """Sequences of all sizes in a pool that holds barely one of the largest."""

    block_size, num_blocks, max_seqs, max_tokens = 4, 5, 3, 6

    def __init__(self) -> None:
        super().__init__()
        pool = BlockPool(self.num_blocks, self.block_size)
        self.scheduler = Scheduler(pool, self.max_seqs, self.max_tokens)
        self.live: list[Sequence] = []
        self.resident: set[str] = set()
        self.count = 0

    @rule(
        prompt=st.integers(1, 19),
        tokens=st.integers(1, 19),
        image=st.sampled_from([None, *IMAGES]),
        tenant=st.sampled_from("xy"),
    )
    def add(self, prompt: int, tokens: int, image: str | None, tenant: str) -> None:
        self.count += 1
        tokens = min(tokens, 20 - prompt)
        added = sequence(str(self.count), prompt, tokens=tokens, image=image, tenant=tenant)
        self.scheduler.add(added)
        self.live.append(added)

    @rule(image=st.sampled_from(IMAGES))
    def image_arrives(self, image: str) -> None:
        expected = self.scheduler.loading_for(image)
        assert self.scheduler.image_ready(image) == expected
        self.resident.add(image)

    @rule(image=st.sampled_from(IMAGES))
    def image_fails(self, image: str) -> None:
        for failed in self.scheduler.loading_for(image):
            self.end(failed)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.live)))

    @rule()
    def step(self) -> None:
        runnable = self.scheduler.running + self.scheduler.waiting
        plan = self.scheduler.schedule()
        assert bool(plan.scheduled) == bool(runnable), "work and no progress"
        self.check(plan)
        self.scheduler.commit(plan.scheduled)
        for part in plan.scheduled:
            owner = part.sequence
            if owner.pending == 0:
                owner.token_ids.append(1)
                if owner.generated >= owner.sampling.max_tokens:
                    self.end(owner)

    def check(self, plan: Plan) -> None:
        cut = [p for p in plan.scheduled if p.start + p.count < len(p.sequence.token_ids)]
        assert cut in ([], [*plan.scheduled[-1:]]), "a prompt is cut before a decode"
        assert sum(part.count for part in plan.scheduled) <= self.max_tokens
        assert len({part.sequence for part in plan.scheduled}) == len(plan.scheduled)
        for part in plan.scheduled:
            assert part.count > 0
            assert part.start == part.sequence.computed
            room = len(part.sequence.block_table) * self.block_size
            assert part.start + part.count <= min(len(part.sequence.token_ids), room)
            assert part.sequence not in plan.preempted
            assert part.sequence not in self.scheduler.loading_for(part.sequence.image or "")

    def end(self, ended: Sequence) -> None:
        self.live.remove(ended)
        self.scheduler.remove(ended)
        assert ended.block_table == []

    @invariant()
    def nothing_is_lost(self) -> None:
        subject = self.scheduler
        subject.check_integrity()
        assert subject.running <= self.max_seqs
        assert subject.running + subject.waiting + subject.loading == len(self.live)

    def teardown(self) -> None:
        for image in IMAGES:
            self.image_arrives(image)
        bound = 1 + sum(len(s.token_ids) + s.sampling.max_tokens for s in self.live) * 4
        for _ in range(bound):
            self.step()
            self.nothing_is_lost()
        assert self.live == []


def machine(**sizes: int) -> type[TestCase]:
    case = type("Sized", (SchedulerMachine,), sizes).TestCase
    case.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
    return case


TestTight = machine()
TestOneAtATime = machine(max_seqs=1, max_tokens=1)
TestOneTokenBlocks = machine(block_size=1, num_blocks=20, max_seqs=5, max_tokens=5)
TestRoomy = machine(num_blocks=40, max_seqs=4, max_tokens=64)
