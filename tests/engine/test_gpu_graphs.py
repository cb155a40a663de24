"""Captured steps, on a stand-in for CUDA that keeps an allocator's books of graphs' memory."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import finalize

import pytest
import torch

from loraplex.engine.gpu.graphs import Graphs
from loraplex.engine.outcome import Outcome


def outcome(rows: int, value: float, draw: Any = None) -> Outcome:
    """Rows that are all of one value."""
    full = torch.full((rows,), value)
    return Outcome(torch.full((rows, 2), value), full.long(), full, draw)


class Cuda:
    """What `Graphs` asks of CUDA. A pool's handle is dead once the last of its graphs is."""

    def __init__(self) -> None:
        self.users: Counter[int] = Counter()
        self.dead: set[int] = set()
        self.modes: list[str] = []
        self.replays = 0
        self._handles = count()

    def graph_pool_handle(self) -> int:
        return next(self._handles)

    def synchronize(self) -> None:
        """Nothing is under way."""

    @contextmanager
    def graph(self, graph: "CapturedGraph", pool: int, capture_error_mode: str) -> Iterator[None]:
        assert pool not in self.dead, "use_count > 0 INTERNAL ASSERT FAILED"
        self.users[pool] += 1
        finalize(graph, self._give_up, pool)
        self.modes.append(capture_error_mode)
        yield

    def _give_up(self, pool: int) -> None:
        self.users[pool] -= 1
        if not self.users[pool]:
            self.dead.add(pool)


class CapturedGraph:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def replay(self) -> None:
        self._cuda.replays += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stand_in = Cuda()
    for name in ("graph_pool_handle", "synchronize", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: CapturedGraph(stand_in))
    return stand_in


@pytest.fixture
def graphs(cuda: Cuda) -> Graphs:
    return Graphs(outcome(4, 0.0))


def run(graphs: Graphs, *keys: Any) -> int:
    """How often steps were computed, not replayed."""
    computed: list[Any] = []
    for key in keys:
        graphs.run(key, lambda: computed.append(1) or outcome(1, 1.0))
    return len(computed)


def test_a_key_is_captured_once_and_replayed(cuda: Cuda, graphs: Graphs) -> None:
    assert run(graphs, "a", "b", "a", "a") == 4, "once before its capture and once in it"
    assert cuda.replays == 4


def test_graphs_share_a_pool(cuda: Cuda, graphs: Graphs) -> None:
    run(graphs, "a", "b")
    assert len(cuda.users) == 1


def test_outcomes_take_no_memory_of_the_pool(graphs: Graphs) -> None:
    """What is kept of one graph's memory no other graph could use; so there is one place."""
    few = graphs.run("few", lambda: outcome(2, 5.0, max))
    assert (few.logits.tolist(), few.likeliest.tolist()) == ([[5.0, 5.0]] * 2, [5, 5])
    assert (few.peak.tolist(), few.draw) == ([5.0, 5.0], max)
    many = graphs.run("many", lambda: outcome(4, 7.0))
    assert many.logits.tolist() == [[7.0, 7.0]] * 4
    for name in ("logits", "likeliest", "peak"):
        assert getattr(few, name).data_ptr() == getattr(many, name).data_ptr()


def test_keys_are_captured_again_once_all_are_forgotten(cuda: Cuda, graphs: Graphs) -> None:
    """As after an image of a large rank, for which scratch is replaced; several times over."""
    for _ in range(3):
        assert run(graphs, "a", "b", "a") == 4
        graphs.clear()
    assert not any(cuda.users.values())


def test_clear_before_anything_was_captured(graphs: Graphs) -> None:
    graphs.clear()
    assert run(graphs, "a") == 2


def test_threads_that_stage_images_do_not_end_a_capture(cuda: Cuda, graphs: Graphs) -> None:
    """They take pinned memory, which no thread may while another captures in the global mode."""
    run(graphs, "a")
    assert cuda.modes == ["thread_local"]
