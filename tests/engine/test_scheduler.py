"""The scheduler on ints alone: its rules, one by one. `test_scheduler_machine.py` mixes them."""

from types import ModuleType

import pytest

from loraplex.engine.plan import Plan
from loraplex.engine.protocol import Policy


def names(plan: Plan) -> list[tuple[str, int, int]]:
    return [(p.sequence.request.request_id, p.start, p.count) for p in plan.scheduled]


def test_a_long_prompt_is_cut_into_chunks_and_decodes_go_first(schedules: ModuleType) -> None:
    subject = schedules.Subject(32)
    subject.add("long", 40)
    assert names(subject.run()) == [("long", 0, 16)]
    subject.add("short", 3)
    assert names(subject.run()) == [("long", 16, 16)]
    assert names(subject.run()) == [("long", 32, 8), ("short", 0, 3)]
    subject.add("next", 20)
    assert names(subject.run()) == [("long", 40, 1), ("short", 3, 1), ("next", 0, 14)]
    subject.add("last", 20)
    assert names(subject.run()) == [
        ("long", 41, 1),
        ("short", 4, 1),
        ("next", 14, 6),
        ("last", 0, 8),
    ]


def test_decodes_go_first_whoever_is_more_entitled(schedules: ModuleType) -> None:
    subject = schedules.Subject(64)
    subject.add("decodes", 2, tenant="busy")
    subject.run()
    subject.scheduler.counters.charge("busy", 1000)
    subject.add("prompt", 100, tenant="new")
    for _ in range(3):
        counts = {name: count for name, _, count in names(subject.run())}
        assert counts == {"decodes": 1, "prompt": 15}


def test_no_more_sequences_run_than_allowed(schedules: ModuleType) -> None:
    subject = schedules.Subject(32, seqs=2)
    for name in "abc":
        subject.add(name, 2)
    assert [name for name, *_ in names(subject.run())] == ["a", "b"]
    assert (len(subject.scheduler.running), subject.scheduler.waiting) == (2, 1)


def test_places_are_kept_for_choices_to_come(schedules: ModuleType) -> None:
    subject = schedules.Subject(32, seqs=4)
    subject.add("three", 40, choices=3)
    subject.add("two", 2, choices=2)
    subject.add("one", 2)
    assert names(subject.run()) == [("three", 0, 16)]
    subject.run()
    assert names(subject.run()) == [("three", 32, 8)], "two would make five"
    subject.fork("three", 3)
    assert [count for _, _, count in names(subject.run())] == [1, 1, 1]
    subject.end("three")
    assert {name for name, *_ in names(subject.run())} == {"two", "one"}


def test_tenants_take_turns(schedules: ModuleType) -> None:
    subject = schedules.Subject(32, seqs=5)
    for i in range(4):
        subject.add(f"greedy{i}", 1, tenant="greedy")
    subject.add("modest0", 1, tenant="modest")
    admitted = [name for name, *_ in names(subject.run())]
    assert admitted == ["greedy0", "modest0", "greedy1", "greedy2", "greedy3"]


def test_a_missing_image_delays_only_those_who_need_it(schedules: ModuleType) -> None:
    subject = schedules.Subject(32)
    subject.add("waits", 2, image="a")
    subject.add("runs", 2)
    subject.add("also waits", 2, image="b")
    assert names(subject.run()) == [("runs", 0, 2)]
    assert subject.scheduler.loading_images == ["a", "b"]
    subject.scheduler.image_ready("b")
    assert names(subject.run()) == [("runs", 2, 1), ("also waits", 0, 2)]
    assert (subject.scheduler.loading, subject.scheduler.loading_images) == (1, ["a"])


@pytest.mark.parametrize("slots", [0, 8], ids=["recompute", "swap"])
def test_the_least_entitled_gives_way_and_comes_back_first(
    schedules: ModuleType, slots: int
) -> None:
    subject = schedules.Subject(4, size=2, slots=slots)
    subject.add("old", 4, tenant="x")
    young = subject.add("young", 4, tenant="y")
    subject.run()
    subject.add("newcomer", 1, tenant="y")
    plan = subject.run()
    assert names(plan) == [("old", 4, 1)]
    assert plan.preempted == (young,)
    assert young.block_table == []
    assert young.computed == (4 if slots else 0)
    assert [slot for _, slot in plan.swap_out] == young.host_slots
    subject.end("old")
    plan = subject.run()
    assert names(plan)[0] == ("young", 4 if slots else 2, 1 if slots else 3), "a block is cached"
    assert len(plan.swap_in) == (2 if slots else 0)
    assert young.host_slots == []


def test_the_tenant_that_had_most_gives_way(schedules: ModuleType) -> None:
    subject = schedules.Subject(6, size=2)
    for name, tenant in (("first", "a"), ("greedy", "b"), ("modest", "c")):
        subject.add(name, 4, tenant=tenant)
    subject.run()
    subject.scheduler.counters.charge("b", 100)
    assert [s.request.request_id for s in subject.run().preempted] == ["greedy"]


def test_the_first_admitted_stays_however_much_its_tenant_had(schedules: ModuleType) -> None:
    subject = schedules.Subject(4, size=2)
    subject.add("first", 4, tenant="a")
    subject.add("second", 4, tenant="b")
    subject.run()
    subject.scheduler.counters.charge("a", 1000)
    assert [s.request.request_id for s in subject.run().preempted] == ["second"]


def test_a_prompt_is_started_only_when_all_of_it_has_blocks(schedules: ModuleType) -> None:
    subject = schedules.Subject(6, size=4, tokens=8)
    subject.add("first", 16)
    subject.add("second", 12)
    subject.add("small", 1)
    assert names(subject.run()) == [("first", 0, 8)]
    assert names(subject.run()) == [("first", 8, 8)]
    assert names(subject.run()) == [("first", 16, 1)]
    assert subject.scheduler.waiting == 2, "the small one does not overtake"
    assert subject.scheduler.lacking_blocks == 2


def test_caps_hold_a_tenant_back_and_nobody_else(schedules: ModuleType) -> None:
    subject = schedules.Subject(32)
    for i in range(3):
        subject.add(f"capped{i}", 2, tenant="a", policy=Policy(max_running=1))
    subject.add("free", 2, tenant="b")
    assert {name for name, *_ in names(subject.run())} == {"capped0", "free"}
    subject.end("capped0")
    assert {name for name, *_ in names(subject.run())} == {"capped1", "free"}


def test_a_share_of_the_blocks_caps_a_tenant(schedules: ModuleType) -> None:
    subject = schedules.Subject(32, tokens=64)
    subject.add("large", 40, tenant="a", policy=Policy(kv_share=0.25))
    subject.add("more", 4, tenant="a", policy=Policy(kv_share=0.25))
    subject.add("free", 4, tenant="b")
    running = {name for name, *_ in names(subject.run())}
    assert running == {"large", "free"}, "what is alone may be too large"
    subject.end("large")
    assert {name for name, *_ in names(subject.run())} == {"more", "free"}


def test_a_cached_prompt_is_not_computed_again(schedules: ModuleType) -> None:
    subject = schedules.Subject(32)
    subject.add("first", 10, token=7)
    subject.run()
    second = subject.add("second", 10, token=7)
    assert names(subject.run())[-1] == ("second", 8, 2)
    assert second.request.cached == 8
    assert subject.add("foreign", 10, token=7, scope="other").request.cached == 0
    assert names(subject.run())[-1] == ("foreign", 0, 10)


def test_one_token_of_a_cached_prompt_is_computed(schedules: ModuleType) -> None:
    subject = schedules.Subject(32)
    subject.add("first", 8, token=7)
    subject.run()
    subject.add("second", 8, token=7)
    assert names(subject.run())[-1] == ("second", 4, 4)


def test_copies_are_made_when_a_shared_block_is_written_to(schedules: ModuleType) -> None:
    subject = schedules.Subject(32)
    parent = subject.add("r", 6, choices=3)
    subject.run()
    children = subject.fork("r", 3)
    assert all(child.block_table == parent.block_table for child in children)
    plan = subject.run()
    shared = plan.copies[0][0]
    assert [source for source, _ in plan.copies] == [shared, shared]
    lasts = {sequence.block_table[1] for sequence in (parent, *children)}
    assert len(lasts) == 3 and shared in lasts
    assert len({sequence.block_table[0] for sequence in (parent, *children)}) == 1


def test_a_full_shared_block_is_not_copied(schedules: ModuleType) -> None:
    subject = schedules.Subject(32)
    subject.add("r", 8, choices=2)
    subject.run()
    subject.fork("r", 2)
    assert subject.run().copies == ()


def test_guesses_run_where_there_is_room_for_them(schedules: ModuleType) -> None:
    subject = schedules.Subject(32, tokens=16, wanted=8 + 3)
    guesser = subject.add("guesser", 2)
    subject.add("other", 2)
    subject.run()
    guesser.drafts = [1, 1, 1, 1, 1]
    part = next(p for p in subject.schedule().scheduled if p.sequence is guesser)
    assert (part.count, part.wanted, guesser.drafts) == (4, 4, [1, 1, 1])


def test_prompt_logprobs_want_all_rows_in_turn(schedules: ModuleType) -> None:
    subject = schedules.Subject(32, tokens=16, wanted=8 + 3)
    asking = subject.add("r", 10, prompt_logprobs=0)
    counts = []
    while asking.generated == 0:
        [part] = subject.schedule().scheduled
        assert part.wanted == part.count
        asking.request.prompt_logprobs += [None] * part.count
        counts.append(part.count)
        subject.commit([part])
    assert counts == [4, 4, 2]


@pytest.mark.parametrize("phase", ["loading", "waiting", "running", "preempted", "swapped"])
def test_remove_in_every_phase_frees_everything(schedules: ModuleType, phase: str) -> None:
    subject = schedules.Subject(4, size=2, slots=4 if phase == "swapped" else 0)
    is_out = phase in ("preempted", "swapped")
    if is_out:
        subject.add("other", 4)
    target = subject.add("target", 4, image="a" if phase == "loading" else None)
    if is_out or phase == "running":
        subject.run()
    if is_out:
        assert subject.run().preempted == (target,)
    subject.end("target")
    assert (target.block_table, target.host_slots) == ([], [])
    scheduler = subject.scheduler
    assert len(scheduler.running) + scheduler.waiting + scheduler.loading == is_out
    scheduler.check_integrity()


def test_moved_blocks_are_found_again(schedules: ModuleType) -> None:
    subject = schedules.Subject(8)
    subject.add("gone", 8)
    stays = subject.add("stays", 8)
    subject.run()
    subject.end("gone")
    subject.pool.drop_cache()
    before = list(stays.block_table)
    moves = subject.pool.resize(3)
    subject.scheduler.renumber(moves)
    assert max(stays.block_table) < 3
    assert [dict(moves).get(block, block) for block in before] == stays.block_table
    subject.scheduler.check_integrity()
