"""Tokens that the device chooses: those of the host's draw, in whichever order steps are given.

A draw's running sums are of fp32 and in another order than the host's, so a token counts as right
that the host draws with a share `NEAR` above or below.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, cycle, islice
from types import SimpleNamespace

import numpy as np
import torch
from gpu_compare import Check
from gpu_model import batch_of
from gpu_moves import CONTEXT, KINDS, add, compact

from loraplex.engine.batch import Batch, Span
from loraplex.engine.draw import Draw, Drawer
from loraplex.engine.gpu.choices import Choices
from loraplex.engine.gpu.executor import GpuExecutor
from loraplex.engine.model.config import ModelConfig
from loraplex.engine.outcome import Outcome
from loraplex.engine.philox import uniform
from loraplex.kernels.triton.sampling import row_peaks

NEAR = 1e-4
LIMITS = [
    SimpleNamespace(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in (
        (0.8, 0, 1.0, 0.0), (0.8, 20, 1.0, 0.0), (1.5, 0, 0.9, 0.0), (0.7, 30, 0.95, 0.01),
        (3.0, 0, 1.0, 0.05), (0.02, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 0, 1e-6, 0.0),
    )
]  # fmt: skip


def draws(vocabulary: int, rows: int, device: str) -> Iterator[Check]:
    """The share of rows for which the device draws another token than the host."""
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(3)) * 3
    asked = [Draw(LIMITS[row % len(LIMITS)], uniform(row, 7)) for row in range(rows)]
    on_device = logits.to(device)
    outcome = Outcome(on_device, *row_peaks(on_device))
    found = Choices(rows, on_device.device).choose(outcome, asked).result()
    drawer, wrong = Drawer(vocabulary), 0
    for row, (limits, share), token in zip(logits.numpy(), asked, found, strict=True):
        low, high = (
            drawer.draw(row, float(row.max()), limits, min(max(share + by, 0.0), 1 - 2**-53))
            for by in (-NEAR, NEAR)
        )
        wrong += token is None or not low <= token <= high
    yield Check(f"draws of {vocabulary} tokens", wrong / rows)


class Ahead:
    """Sequences that decode, some tokens likeliest and some drawn, under images or none."""

    def __init__(self, executor: GpuExecutor, config: ModelConfig) -> None:
        self._executor, self._config = executor, config
        self._steps, copies = (48, 4) if executor.device != "cpu" else (2, 1)
        names = (None, *KINDS) * copies
        self._rows = len(names)
        spans = [(1, CONTEXT + self._steps)] * self._rows
        self._batch = batch_of(spans, names, config.vocab_size)

    def checks(self) -> Iterator[Check]:
        """Tokens ahead are those in turn, also while images come, go and move."""
        in_turn = self._in_turn()
        yield Check("tokens ahead", differing(in_turn, self._ahead(moving=False)))
        yield Check("tokens ahead, images moving", differing(in_turn, self._ahead(moving=True)))

    def _in_turn(self) -> list[list[int | None]]:
        """The host reads each step's tokens before it gives the next step."""
        ids, found = self._batch.token_ids, []
        for step in range(self._steps):
            outcome = self._executor.execute(self._at(step, ids))
            assert outcome.draw is not None
            found.append(outcome.draw(outcome, self._draws(step)))
            ids = np.array([-1 if token is None else token for token in found[-1]], np.int32)
        return found

    def _ahead(self, *, moving: bool) -> list[list[int | None]]:
        """A step is read once the next is launched, which has its tokens from the device."""
        found = []
        flight = self._executor.launch(self._at(0, self._batch.token_ids), self._draws(0))
        for step in range(1, self._steps):
            if moving:
                self._move(step)
            ids = -1 - np.arange(self._rows, dtype=np.int32)
            flight, before = self._executor.launch(self._at(step, ids), self._draws(step)), flight
            found.append(before.result())
        return [*found, flight.result()]

    def _move(self, step: int) -> None:
        """In turns, images leave and others move up; they come back."""
        kind = KINDS[step % len(KINDS)]
        self._executor.remove_image(kind)
        compact(self._executor)
        add(self._executor, self._config, kind)

    def _at(self, step: int, ids: np.ndarray) -> Batch:
        context = CONTEXT + step
        return replace(
            self._batch,
            token_ids=ids,
            positions=np.full(self._rows, context - 1, np.int32),
            spans=tuple(Span(row, row + 1, context) for row in range(self._rows)),
        )

    def _draws(self, step: int) -> list[Draw | None]:
        """The likeliest, then by each limit in turn."""
        limits = islice(cycle(LIMITS), self._rows - 1)
        return [None, *(Draw(each, uniform(row, step)) for row, each in enumerate(limits))]


def differing(expected: list[list[int | None]], found: list[list[int | None]]) -> float:
    """The share of tokens that differ."""
    pairs = list(zip(chain(*expected), chain(*found), strict=True))
    return sum(a != b for a, b in pairs) / len(pairs)
