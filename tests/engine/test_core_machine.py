"""Any order of requests, steps, aborts, images and faults: each request ends exactly once."""

from collections import Counter
from types import ModuleType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from loraplex.engine.core import Engine
from loraplex.engine.protocol import Chunk, Failed, Finished
from loraplex.engine.settings import EngineSettings

IMAGES = ["a" * 64, "b" * 64, "c" * 64]


class EngineMachine(RuleBasedStateMachine):
    """Seven blocks of four tokens, so that two sequences soon fight for them."""

    stand_in: ModuleType

    def __init__(self) -> None:
        super().__init__()
        self.executor = self.stand_in.HashExecutor(num_blocks=7)
        self.residency = self.stand_in.StandInResidency()
        knobs = EngineSettings(max_num_seqs=3, max_num_batched_tokens=8, max_waiting=5)
        self.engine = Engine(self.executor, self.residency, knobs, self.stand_in.MANIFEST)
        self.added, self.ends, self.sent = 0, Counter[str](), Counter[str]()

    @rule(
        prompt=st.integers(0, 30),
        max_tokens=st.integers(1, 30),
        image=st.sampled_from([None, *IMAGES]),
        ignore_eos=st.booleans(),
    )
    def add(self, prompt: int, max_tokens: int, image: str | None, ignore_eos: bool) -> None:
        self.added += 1
        name, tokens = str(self.added), (5,) * prompt or (99,)
        sampling = {"max_tokens": max_tokens, "ignore_eos": ignore_eos, "temperature": 1.0}
        self.engine.add(self.stand_in.request(name, *tokens, image=image, **sampling))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(str(data.draw(st.integers(1, max(self.added, 1)))))

    @rule(image=st.sampled_from(IMAGES))
    def image_arrives(self, image: str) -> None:
        self.residency.resident.add(image)
        self.executor.images.add(image)

    @rule(image=st.sampled_from(IMAGES))
    def image_fails(self, image: str) -> None:
        if self.residency.references[image] and image not in self.residency.resident:
            self.residency.failures[image] = ("image_corrupt", "its bytes are wrong")

    @rule()
    def a_step_breaks(self) -> None:
        self.executor.broken = RuntimeError("broken")
        self.step()
        self.executor.broken = None

    @rule(times=st.integers(1, 6))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.step()

    def step(self) -> None:
        for event in self.engine.step():
            if isinstance(event, Chunk):
                assert not self.ends[event.request_id], "a chunk after the end"
                self.sent[event.request_id] += len(event.token_ids)
            else:
                self.ends[event.request_id] += 1
            if isinstance(event, Finished):
                assert event.completion_tokens == self.sent[event.request_id]
            if isinstance(event, Failed):
                assert event.code in ("invalid_request", "overloaded", "image_corrupt", "internal")

    @invariant()
    def the_books_agree(self) -> None:
        self.engine.check_integrity()
        assert max(self.ends.values(), default=0) <= 1

    def teardown(self) -> None:
        for image in IMAGES:
            self.image_arrives(image)
        self.step()
        for _ in range(1000):
            if not self.engine.has_work:
                break
            self.step()
        assert self.ends == Counter(str(i + 1) for i in range(self.added))
        stats = self.engine.stats()
        assert stats.running + stats.waiting + stats.loading + stats.kv_blocks_used == 0
        assert not any(self.residency.references.values())


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
def test_each_request_ends_exactly_once_and_nothing_is_kept(
    stand_in: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    machine = type("Machine", (EngineMachine,), {"stand_in": stand_in})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
