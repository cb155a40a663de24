"""Any order of all that can happen to a scheduler, in pools that barely hold one sequence.

KV is modelled: what a block holds is the tokens that were written to it, so a copy, a swap or a
cached block that comes at the wrong time is seen.
"""

import random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from loraplex.engine.plan import Plan, Scheduled
from loraplex.engine.protocol import Policy
from loraplex.engine.sequence import Sequence

IMAGES = ["a", "b", "c"]
SIZES: list[dict[str, Any]] = [
    {"blocks": 5},
    {"blocks": 5, "slots": 7},
    {"blocks": 5, "seqs": 4, "tokens": 4},
    {"blocks": 20, "size": 1, "seqs": 5, "tokens": 5, "slots": 30},
    {"blocks": 40, "seqs": 6, "tokens": 64, "wanted": 9},
]


class Machine:
    """A subject, the model of its KV, and the verbs of the test."""

    def __init__(self, schedules: ModuleType, sizes: dict[str, Any]) -> None:
        self.sizes = {"seqs": 4, "tokens": 6, "size": 4, **sizes}
        self.longest = sizes["blocks"] * self.sizes["size"]
        self.subject = schedules.Subject(**self.sizes)
        self.kv: dict[int, list[int]] = {}
        self.host: dict[int, list[int]] = {}
        self.names: list[str] = []
        self.count = 0

    def add(self, prompt: int, tokens: int, **options: Any) -> None:
        self.count += 1
        prompt = min(prompt, self.longest - 1)
        tokens = min(tokens, self.longest - prompt)
        options["choices"] = min(options.get("choices", 1), self.sizes["seqs"])
        self.subject.add(str(self.count), prompt, tokens=tokens, **options)
        self.names.append(str(self.count))

    def end(self, name: str) -> None:
        self.names.remove(name)
        self.subject.end(name)

    def image_arrives(self, image: str) -> None:
        self.subject.scheduler.image_ready(image)

    def image_fails(self, image: str) -> None:
        for failed in self.subject.scheduler.loading_for(image):
            self.end(failed.request.request_id)

    def step(self, rng: random.Random) -> None:
        scheduler = self.subject.scheduler
        for sequence in scheduler.running:
            if sequence.pending == 1 and sequence.generated and rng.random() < 0.3:
                room = sequence.request.sampling.max_tokens - sequence.generated - 1
                sequence.drafts = [1] * min(3, max(0, room))
        runnable = len(scheduler.running) + scheduler.waiting
        plan = scheduler.schedule()
        assert bool(plan.scheduled) == bool(runnable), "work and no progress"
        self._move(plan)
        self._check(plan)
        for part in plan.scheduled:
            self._write(part)
        for part in plan.scheduled:
            self._advance(part, rng)
        scheduler.check_integrity()

    def _move(self, plan: Plan) -> None:
        for block, slot in plan.swap_out:
            self.host[slot] = list(self.kv.get(block, []))
        for source, target in plan.copies:
            self.kv[target] = list(self.kv.get(source, []))
        for slot, block in plan.swap_in:
            self.kv[block] = self.host.pop(slot)

    def _check(self, plan: Plan) -> None:
        limits = self.sizes
        assert sum(part.count for part in plan.scheduled) <= limits["tokens"]
        assert len({part.sequence for part in plan.scheduled}) == len(plan.scheduled)
        most = max(limits.get("wanted", 0), limits["seqs"])
        assert sum(part.wanted for part in plan.scheduled) <= most
        cut = {p.sequence for p in plan.scheduled if p.end < len(p.sequence.token_ids)}
        starved = {s for s in self.subject.scheduler.running if s.pending == 1} - {
            part.sequence for part in plan.scheduled
        }
        lacking = self.subject.scheduler.lacking_blocks
        assert not (cut and starved) or lacking, "a prompt goes on and a decode does not"
        for part in plan.scheduled:
            assert part.sequence not in plan.preempted
            assert part.start == part.sequence.computed

    def _write(self, part: Scheduled) -> None:
        """Read what the part's tokens follow, then write them, as attention and its cache do."""
        sequence, size = part.sequence, self.sizes["size"]
        tokens = sequence.token_ids + sequence.drafts
        for position in range(part.end):
            block, offset = sequence.block_table[position // size], position % size
            mine = hash((sequence.request.scope, sequence.image, *tokens[: position + 1]))
            lines = self.kv.setdefault(block, [])
            if position < part.start:
                assert lines[offset] == mine, "the KV is another's"
            else:
                assert not self.subject.pool.is_shared(block), "a shared block is written to"
                del lines[offset:]
                lines.append(mine)

    def _advance(self, part: Scheduled, rng: random.Random) -> None:
        sequence, scheduler = part.sequence, self.subject.scheduler
        name = sequence.request.request_id
        if name not in self.names:
            return
        if part.end < len(sequence.token_ids) + len(sequence.drafts):
            scheduler.commit(sequence, part.end)
            return
        kept = sequence.drafts[: rng.randrange(len(sequence.drafts) + 1)]
        rejected = len(sequence.drafts) - len(kept)
        sequence.drafts = []
        family = [sequence]
        if sequence.slots > 1:
            scheduler.commit(sequence, part.end)
            family += self.subject.fork(name, sequence.request.choices)
        for each in family:
            each.token_ids += [*kept, rng.randrange(3)]
        scheduler.commit(sequence, part.end - rejected)
        for each in family:
            self._finish(each)

    def _finish(self, sequence: Sequence) -> None:
        request = sequence.request
        if sequence.generated < request.sampling.max_tokens:
            return
        self.subject.scheduler.remove(sequence)
        request.alive.remove(sequence)
        if not request.alive:
            self.names.remove(request.request_id)

    def drain(self, rng: random.Random) -> None:
        for image in IMAGES:
            self.image_arrives(image)
        for _ in range(20_000):
            if not self.names:
                break
            self.step(rng)
        assert self.names == [], "something never ends"
        assert self.subject.pool.used_count == self.subject.host.used_count == 0


OPTIONS = {
    "image": [None, None, *IMAGES],
    "tenant": ["x", "y", "z"],
    "scope": ["s", "t"],
    "policy": [Policy(), Policy(3.0), Policy(max_running=1), Policy(kv_share=0.4)],
    "choices": [1, 1, 1, 2, 3],
    "priority": [0, 0, 5],
    "token": [7, 8],
}


class Rules(RuleBasedStateMachine):
    """Hypothesis's hands on a `Machine`."""

    make: Any

    def __init__(self) -> None:
        super().__init__()
        self.machine = self.make()

    @rule(
        prompt=st.integers(1, 39),
        tokens=st.integers(1, 19),
        options=st.fixed_dictionaries({k: st.sampled_from(v) for k, v in OPTIONS.items()}),
    )
    def add(self, prompt: int, tokens: int, options: dict[str, Any]) -> None:
        self.machine.add(prompt, tokens, **options)

    @rule(image=st.sampled_from(IMAGES), fails=st.booleans())
    def image(self, image: str, fails: bool) -> None:
        (self.machine.image_fails if fails else self.machine.image_arrives)(image)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.machine.names:
            self.machine.end(data.draw(st.sampled_from(self.machine.names)))

    @rule(seed=st.integers(0, 1 << 20), times=st.integers(1, 5))
    def steps(self, seed: int, times: int) -> None:
        rng = random.Random(seed)
        for _ in range(times):
            self.machine.step(rng)

    @invariant()
    def books_agree(self) -> None:
        scheduler = self.machine.subject.scheduler
        scheduler.check_integrity()
        assert len(scheduler.running) <= self.machine.sizes["seqs"]

    def teardown(self) -> None:
        self.machine.drain(random.Random(0))


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_whatever_happens_nothing_is_lost_and_everything_ends(
    schedules: ModuleType, sizes: dict[str, Any]
) -> None:
    rules = type("Sized", (Rules,), {"make": staticmethod(lambda: Machine(schedules, sizes))})
    run_state_machine_as_test(
        rules, settings=settings(max_examples=25, stateful_step_count=30, deadline=None)
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_thousands_of_random_steps(schedules: ModuleType, sizes: dict[str, Any]) -> None:
    rng, machine = random.Random(20), Machine(schedules, sizes)
    for _ in range(2_500):
        if len(machine.names) < 8 and rng.random() < 0.5:
            options = {key: rng.choice(values) for key, values in OPTIONS.items()}
            machine.add(rng.randrange(1, 40), rng.randrange(1, 20), **options)
        verb = rng.random()
        if verb < 0.05 and machine.names:
            machine.end(rng.choice(machine.names))
        elif verb < 0.15:
            machine.image_arrives(rng.choice(IMAGES))
        elif verb < 0.17:
            machine.image_fails(rng.choice(IMAGES))
        machine.step(rng)
    machine.drain(rng)
