"""Any order of requests, steps, aborts, images and faults, in an engine that is short of memory.

Each request ends exactly once, nothing is kept, and what was generated is what an engine with
plenty of everything generates for that request alone. Blocks, host slots and images are real but
for the model: what is read from a wrong block gives other tokens.
"""

import random
import runpy
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from loraplex.engine.core import Engine
from loraplex.engine.image_fetcher import ImageFetcher
from loraplex.engine.images import ImageStore, read_header
from loraplex.engine.memory_share import divide
from loraplex.engine.protocol import Abort, Beams, Chunk, Failed, Finished, Generate, Guide, Policy
from loraplex.engine.residency import Residency
from loraplex.engine.settings import EngineSettings

INVOCATION = (5, 5)
ROOMY = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "max_model_len": 28}
OPTIONS: dict[str, list[Any]] = {
    "tenant": ["x", "y", "z"],
    "scope": ["s", "t"],
    "policy": [
        Policy(),
        Policy(3.0),
        Policy(max_running=1),
        Policy(kv_share=0.4),
        Policy(resident_bytes=1),
    ],
    "priority": [0, 0, 5],
    "choices": [1, 1, 1, 2, 3],
    "ignore_eos": [False, True],
    "temperature": [0.0, 1.0],
    "draft_tokens": [0, 3],
    "logit_bias": [(), ((5, 9.0), (6, 9.0))],
    "guide": [None, None, None, Guide("grammar", "3,4 5,6 7"), Guide("grammar", "bad")],
    "beams": [None, None, None, None, Beams(2), Beams(3)],
    "prompt_logprobs": [None, None, 1],
}
PLAIN = {
    key: OPTIONS[key][0]
    for key in ("choices", "draft_tokens", "logit_bias", "guide", "beams", "prompt_logprobs")
}  # of requests whose steps may fly


class Machine:
    """An engine with twelve blocks' memory, in which four images and 28 tokens do not fit."""

    def __init__(self, stand_in: ModuleType, folder: Path, executor: str = "HashExecutor") -> None:
        self.stand_in, self.woken = stand_in, False
        kit = runpy.run_path(str(Path(__file__).with_name("residency_kit.py")))
        store = ImageStore(str(folder / "store"))
        invocations = [(), (), (), INVOCATION]
        self.images = [
            stand_in.make_image(store, folder, seed, rank=24, invocation=each)
            for seed, each in enumerate(invocations)
        ]
        kind = getattr(stand_in, executor)
        self.executor = kind(12, swap_slots=6, memory_blocks=12)
        knobs = EngineSettings(
            max_num_seqs=4, max_num_batched_tokens=8, max_waiting=8, max_model_len=28
        )
        boundary = divide(self.executor, knobs, stand_in.MANIFEST)
        self.pool, self.store = kit["ManualPool"](), store
        fetcher = ImageFetcher(
            store,
            folder / "cache",
            stand_in.MANIFEST.fingerprint,
            limit_bytes=boundary.most_image_bytes,
            prepare=self.executor.prepare_image,
            measure=self.executor.image_bytes,
        )
        self.residency = Residency(
            fetcher, budget_bytes=boundary.image_bytes, load=self.executor.add_image,
            unload=self.executor.remove_image, wake=self._wake, pool=self.pool,
        )  # fmt: skip
        guides = stand_in.StandInGuides()
        self.engine = Engine(self.executor, self.residency, guides, knobs, stand_in.MANIFEST)
        self.asked: dict[str, Generate] = {}
        self.ends: dict[str, Finished | Failed] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.spoiled: set[str] = set()  # aborted, in part or whole
        self.limits: set[int] = set()

    def _wake(self) -> None:
        self.woken = True

    def add(self, prompt: list[int], tokens: int, image: int | None, options: Any) -> None:
        name, options = str(len(self.asked)), dict(options)
        if options["beams"]:
            options |= {"guide": None, "temperature": 0.0, "draft_tokens": None, "choices": 2}
            options |= {"prompt_logprobs": None}
        digest = None if image is None else self.images[image]
        asked = self.stand_in.request(
            name, *prompt, image=digest, max_tokens=tokens, seed=int(name), **options
        )
        self.asked[name] = asked
        self.engine.add(asked)

    def abort(self, name: str, index: int | None) -> None:
        self.spoiled.add(name)
        message = Abort(name, index)
        self.engine.abort(message.request_id, message.index)

    def step(self) -> None:
        for event in self.engine.step():
            name = event.request_id
            assert name not in self.ends, "an event after the end"
            if isinstance(event, Chunk):
                self.tokens.setdefault((name, event.index), []).extend(event.token_ids)
            elif isinstance(event, Finished | Failed):
                self.ends[name] = event
            if isinstance(event, Finished):
                told = [t for (n, _), each in self.tokens.items() if n == name for t in each]
                assert event.completion_tokens == len(told)
        self.limits.add(self.engine.stats().kv_blocks_total)
        self.engine.check_integrity()

    def break_a_step(self) -> None:
        self.executor.broken = RuntimeError("broken")
        self.step()
        self.executor.broken = None

    def drain(self) -> None:
        for _ in range(5000):
            if not (self.pool.run() or self.engine.has_work or self.woken):
                break
            self.woken = False
            self.step()
        assert self.ends.keys() == self.asked.keys()
        stats = self.engine.stats()
        held = stats.running + stats.waiting + stats.loading + stats.kv_blocks_used
        assert held + stats.swap_blocks_used == 0
        assert self.residency.held_bytes == 0
        self.engine.fail_all("internal", "there is nobody")

    def check_tokens(self) -> None:
        """All that ended by themselves have the tokens that they have alone."""
        subject = self.stand_in.Rig(num_blocks=4096, **ROOMY)
        subject.arrive(*self.images)
        subject.residency.invocations[self.images[3]] = INVOCATION
        for name, end in self.ends.items():
            if isinstance(end, Failed) or name in self.spoiled:
                continue
            subject.add(self.asked[name])
            subject.step()
            subject.drain()
            assert subject.end(name).reason == end.reason
            for index in range(self.asked[name].choices):
                assert subject.tokens(name, index) == self.tokens.get((name, index), [])

    def check_failures(self) -> None:
        codes = {end.code for end in self.ends.values() if isinstance(end, Failed)}
        assert codes <= {"invalid_request", "overloaded", "internal"}


class Rules(RuleBasedStateMachine):
    """Hypothesis's hands on a `Machine`."""

    make: Any

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.machine: Machine = self.make(Path(self.folder.name))

    @rule(
        prompt=st.lists(st.sampled_from([5, 6]), max_size=26),
        tokens=st.integers(1, 20),
        image=st.sampled_from([None, None, 0, 1, 2, 3]),
        options=st.fixed_dictionaries({k: st.sampled_from(v) for k, v in OPTIONS.items()}),
        plain=st.sampled_from([{}, PLAIN]),
    )
    def add(
        self, prompt: list[int], tokens: int, image: int | None, options: Any, plain: Any
    ) -> None:
        self.machine.add(prompt, tokens, image, options | plain)

    @rule(data=st.data(), index=st.sampled_from([None, 0, 1]))
    def abort(self, data: st.DataObject, index: int | None) -> None:
        if self.machine.asked:
            self.machine.abort(data.draw(st.sampled_from(list(self.machine.asked))), index)

    @rule(times=st.integers(1, 3))
    def threads_run(self, times: int) -> None:
        for _ in range(times):
            self.machine.pool.run()

    @rule(image=st.integers(0, 3), pinned=st.booleans())
    def hints(self, image: int, pinned: bool) -> None:
        self.machine.engine.prefetch(self.machine.images[image])
        self.machine.engine.pin(self.machine.images[0], pinned)

    @rule()
    def a_step_breaks(self) -> None:
        self.machine.break_a_step()

    @rule(times=st.integers(1, 6))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.machine.step()

    @invariant()
    def the_books_agree(self) -> None:
        self.machine.engine.check_integrity()

    def teardown(self) -> None:
        self.machine.drain()
        self.machine.check_tokens()
        self.machine.check_failures()
        self.folder.cleanup()


EXECUTORS = pytest.mark.parametrize("executor", ["HashExecutor", "LateExecutor"])


@EXECUTORS
def test_an_image_gets_idle_memory_though_it_was_refused_while_others_ran(
    stand_in: ModuleType, executor: str, tmp_path: Path
) -> None:
    """Blocks had gained memory just before, and keep it for a while; then their last user ends."""
    machine = Machine(stand_in, tmp_path, executor)
    plainly = {key: values[0] for key, values in OPTIONS.items()}
    life = [(1, None, "x", 11), (18, None, "x", 1), (14, None, "x", 0), (1, 0, "x", 5)]
    for tokens, image, tenant, steps in [*life, (17, None, "y", 8)]:
        machine.add([], tokens, image, plainly | {"tenant": tenant})
        for _ in range(steps):
            machine.step()
    machine.drain()
    machine.check_tokens()


@EXECUTORS
@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
def test_each_request_ends_exactly_once_and_nothing_is_kept(
    stand_in: ModuleType, executor: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    make = staticmethod(lambda folder: Machine(stand_in, folder, executor))
    run_state_machine_as_test(
        type("Made", (Rules,), {"make": make}),
        settings=settings(max_examples=40, stateful_step_count=30, deadline=None),
    )


@EXECUTORS
def test_thousands_of_random_steps(
    stand_in: ModuleType, executor: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    plainly = 0.9 if executor == "LateExecutor" else 0.0
    rng, machine = random.Random(4), Machine(stand_in, tmp_path, executor)
    for _ in range(1500):
        machine.pool.run()
        if rng.random() < 0.25:
            options = {key: rng.choice(values) for key, values in OPTIONS.items()}
            options |= PLAIN if rng.random() < plainly else {}
            prompt = [rng.choice([5, 6]) for _ in range(rng.randrange(1, 27))]
            image = rng.choice([None, None, 0, 1, 2, 3])
            machine.add(prompt, rng.randrange(1, 21), image, options)
        if rng.random() < 0.02 and machine.asked:
            machine.abort(str(rng.randrange(len(machine.asked))), rng.choice([None, 0, 1]))
        if rng.random() < 0.003:
            machine.break_a_step()
        machine.step()
    machine.drain()
    machine.check_tokens()
    machine.check_failures()
    stats = machine.engine.stats()
    assert min(stats.preemptions, stats.blocks_swapped_in, stats.cache_hit_tokens) > 0
    assert min(stats.accepted_tokens, stats.cache_evicted_blocks) > 0
    assert len(machine.limits) > 1, "the boundary has moved"
    if executor == "LateExecutor":
        assert machine.executor.most_flying == 2 and machine.executor.fed > 500


def test_an_image_that_waits_for_memory_is_not_passed_for_ever(
    stand_in: ModuleType, tmp_path: Path
) -> None:
    machine = Machine(stand_in, tmp_path)
    options = {key: values[0] for key, values in OPTIONS.items()} | {"ignore_eos": True}
    *hot, cold = machine.images
    for _ in range(1200):
        flying = [m.image for n, m in machine.asked.items() if n not in machine.ends]
        for place, image in enumerate(hot):
            for _ in range(2 - flying.count(image)):
                machine.add([5, 6], 20, place, options)
        if cold not in flying:
            machine.add([5, 6], 2, 3, options)
        machine.pool.run()
        machine.step()
        if any(m.image == cold and n in machine.ends for n, m in machine.asked.items()):
            break
    else:
        raise AssertionError("images in use keep another out")
    machine.drain()


def test_a_tenants_limit_lets_its_images_take_turns_and_holds_nobody_else_back(
    stand_in: ModuleType, tmp_path: Path
) -> None:
    """Of three images one is there at a time, and two of them are always asked for."""
    machine = Machine(stand_in, tmp_path)
    plain = {key: values[0] for key, values in OPTIONS.items()} | {"ignore_eos": True}
    narrow = plain | {"policy": Policy(resident_bytes=1), "tenant": "x"}
    with machine.store.fetch(machine.images[0], tmp_path).open("rb") as file:
        size = machine.executor.image_bytes(read_header(file))
    longest = since = 0
    for now in range(250):
        flying = [m for n, m in machine.asked.items() if n not in machine.ends]
        of_x = [m.image for m in flying if m.tenant == "x"]
        for place, count in ((0, 3), (1, 1), (2, 1)):
            if of_x.count(machine.images[place]) < count:
                machine.add([5, 6], 3, place, narrow)
        if not [m for m in flying if m.tenant == "y"]:
            longest, since = max(longest, now - since), now
            machine.add([6, 5], 1, None, plain | {"tenant": "y"})
        machine.pool.run()
        machine.step()
        assert all(each.image_bytes in (0, size) for each in machine.engine.stats().tenants)
    served = {m.image for n, m in machine.asked.items() if n in machine.ends and m.tenant == "x"}
    assert served == {*machine.images[:3]}
    assert longest < 20
    machine.drain()
