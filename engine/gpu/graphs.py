"""Steps captured as CUDA graphs: hundreds of launches become one.

A graph replays the same launches on the same addresses, so what differs between steps must lie in
buffers that stay. All graphs share one pool of memory, as one runs after the other, and leave their
outcomes in one place: an outcome in the pool would keep its memory from all other graphs, so that
the pool grew with each one. An allocator never takes a pool's name again once its last graph is
gone. Other threads stage images in pinned memory meanwhile, so a capture is an error of what its
own thread does alone. This file knows keys and callables; it refuses to know what a step is.
"""

from collections.abc import Callable, Hashable

import torch

from loraplex.engine.outcome import Outcome

Compute = Callable[[], Outcome]


class Graphs:
    """Graphs by key, captured when a key is first run. Outcomes stay valid until the next run.

    They are left in the first rows of `room`.
    """

    def __init__(self, room: Outcome) -> None:
        self._room = room
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Outcome]] = {}

    def run(self, key: Hashable, compute: Compute) -> Outcome:
        """What `compute` would compute now; it launches the same work at every call of a key."""
        if key not in self._captured:
            self._captured[key] = self._capture(compute)
        graph, outcome = self._captured[key]
        graph.replay()
        return outcome

    def clear(self) -> None:
        """Forget all graphs, before a buffer that they use is replaced."""
        torch.cuda.synchronize()
        self._captured.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def _capture(self, compute: Compute) -> tuple[torch.cuda.CUDAGraph, Outcome]:
        """Run once outside, which compiles kernels, then capture."""
        compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outcome = self._leave(compute())
        return graph, outcome

    def _leave(self, outcome: Outcome) -> Outcome:
        """The outcome in the place for all of them."""
        rows, room = len(outcome.logits), self._room
        return Outcome(
            room.logits[:rows].copy_(outcome.logits),
            room.likeliest[:rows].copy_(outcome.likeliest),
            room.peak[:rows].copy_(outcome.peak),
            outcome.draw,
        )


class NoGraphs:
    """Runs each step launch by launch: for the interpreter, and to measure what graphs spare."""

    def run(self, key: Hashable, compute: Compute) -> Outcome:
        """What `compute` computes."""
        return compute()

    def clear(self) -> None:
        """Forget nothing."""
