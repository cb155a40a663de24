"""Runs a plan: blocks move, the executor computes, and rows become tokens of their sequences.

On an executor that is asynchronous a plan may be launched, and its tokens read later (`ahead.py`).
This file knows how a step is put together and in which order; it refuses to know why sequences were
chosen and what their clients are told.
"""

import time
from collections.abc import Sequence as Rows
from typing import NamedTuple

from loraplex.engine.ahead import may_fly, take_off, touch_down
from loraplex.engine.batch import build
from loraplex.engine.costs import Costs
from loraplex.engine.executor import AsyncExecutor, Executor, Pending
from loraplex.engine.guidance import Guides
from loraplex.engine.logprobs import tops
from loraplex.engine.outcome import Outcome
from loraplex.engine.plan import Plan, Scheduled
from loraplex.engine.reader import Wanted, accept, choose, ends_known, read_prompt, with_rows
from loraplex.engine.sampler import Choice
from loraplex.engine.scheduler import Scheduler
from loraplex.engine.sequence import Sequence
from loraplex.engine.settings import EngineSettings

PREFILL = 32  # rows of a step from which on it tells what a prompt's token costs


class Reading(NamedTuple):
    """Tokens that were chosen for a sequence, one and those guesses before it that held.

    Its last choice is None where the logits were no numbers. `computed` tokens have KV by now; it
    is None where that was noted before.
    """

    sequence: Sequence
    choices: list[Choice | None]
    computed: int | None


class Flight(NamedTuple):
    """A plan that was launched, its parts in row order, and what becomes of it."""

    plan: Plan
    order: list[Scheduled]
    pending: Pending
    launched: float


class Stepper:
    """Runs plans on an executor. Sequences end at `model_len` tokens."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        guides: Guides,
        costs: Costs,
        settings: EngineSettings,
        model_len: int,
    ) -> None:
        self._executor, self._scheduler = executor, scheduler
        self._guides, self._costs = guides, costs
        self._model_len = model_len
        self._device = executor if isinstance(executor, AsyncExecutor) else None
        self._launcher = self._device if settings.async_scheduling else None
        self._landed = 0.0

    def run(self, plan: Plan) -> list[Reading]:
        """Run a plan; the readings are of the sequences that chose tokens.

        What else was learnt is kept where it belongs: prompts' log-probabilities with their
        requests, the likeliest tokens of beams with these.
        """
        self._move_blocks(plan)
        if not plan.scheduled:
            return []
        began = time.perf_counter()
        outcome, order = self._compute(plan)
        found = with_rows(order)
        for wanted in found:
            self._note(outcome, wanted)
        readings = self._choose(outcome, found) + _lost_beams(found)
        rows = sum(part.count for part in order)
        if rows >= PREFILL and readings:  # whose tokens a device has computed by now
            self._costs.note_step(rows, time.perf_counter() - began)
        return readings

    def may_launch(self, plan: Plan) -> bool:
        """Whether a plan can be launched while another flies."""
        return self._launcher is not None and may_fly(plan)

    def launch(self, plan: Plan) -> Flight:
        """Launch a plan that may be; the flight before it, if any, has to land next."""
        assert self._launcher is not None  # noqa: S101
        batch, order = build(plan.scheduled, self._launcher.block_size)
        draws = take_off(order, self._model_len)
        return Flight(plan, order, self._launcher.launch(batch, draws), time.perf_counter())

    def land(self, flight: Flight) -> list[Reading]:
        """Wait for a flight's tokens; the readings are also of sequences that ended meanwhile."""
        tokens = iter(flight.pending.result())
        readings = []
        for part in flight.order:
            self._scheduler.store(part.sequence, part.end)
            if part.wanted:
                touch_down(part)
                token = next(tokens)
                choice = None if token is None else Choice(token, None)
                readings.append(Reading(part.sequence, [choice], None))
        self._note_landing(flight)
        return readings

    def _note_landing(self, flight: Flight) -> None:
        """Learn what a prompt's token costs: the device began when the flight before landed."""
        rows, now = sum(part.count for part in flight.order), time.perf_counter()
        if rows >= PREFILL:
            self._costs.note_step(rows, now - max(flight.launched, self._landed))
        self._landed = now

    def _move_blocks(self, plan: Plan) -> None:
        """Move a plan's blocks. A swap is waited for, since else nobody knew what it costs."""
        began, executor = time.perf_counter(), self._executor
        if plan.swap_out:
            executor.swap_out(plan.swap_out)
        if plan.copies:
            executor.copy_blocks(plan.copies)
        if plan.swap_in:
            executor.swap_in(plan.swap_in)
        if moved := len(plan.swap_out) + len(plan.swap_in):
            if self._device is not None:
                self._device.wait()
            self._costs.note_swap(moved, time.perf_counter() - began)

    def _compute(self, plan: Plan) -> tuple[Outcome, list[Scheduled]]:
        batch, order = build(plan.scheduled, self._executor.block_size)
        guided = [p.sequence.matcher for p in order if p.sequence.matcher and ends_known(p)]
        if guided:
            self._guides.prepare(guided)
        return self._executor.execute(batch), order

    def _note(self, outcome: Outcome, wanted: Wanted) -> None:
        """Keep what rows tell besides tokens, and commit the parts that choose none."""
        part = wanted.part
        sequence, request = part.sequence, part.sequence.request
        if request.wants_prompt_logprobs:
            known = read_prompt(outcome, wanted)
            request.prompt_logprobs += known[len(request.prompt_logprobs) - part.start :]
        if request.search is not None and ends_known(part):
            sequence.tops = tops(outcome.logits, wanted.last_row, request.search.tops)
        if request.search is not None or not ends_known(part):
            self._scheduler.commit(sequence, part.end)

    def _choose(self, outcome: Outcome, found: Rows[Wanted]) -> list[Reading]:
        picks: list[tuple[Sequence, int]] = []
        for part, row in ((w.part, w.last_row) for w in found):
            if part.sequence.request.search is None and ends_known(part):
                picks += [(sequence, row) for sequence in self._with_siblings(part)]
        ends = {wanted.part.sequence: wanted.part.end for wanted in found}
        readings = []
        for (sequence, _), choices in zip(picks, choose(outcome, picks), strict=True):
            kept = accept(choices, sequence.drafts)
            end = ends.get(sequence, sequence.computed)
            readings.append(Reading(sequence, kept, end - (len(choices) - len(kept))))
        return readings

    def _with_siblings(self, part: Scheduled) -> list[Sequence]:
        """The part's sequence and, when its prompt is done, one for each other choice."""
        sequence = part.sequence
        if sequence.slots == 1:
            return [sequence]
        self._scheduler.commit(sequence, part.end)
        request = sequence.request
        siblings = [self._scheduler.fork(sequence, i) for i in range(1, request.choices)]
        request.alive += siblings
        return [sequence, *siblings]


def _lost_beams(found: Rows[Wanted]) -> list[Reading]:
    """Readings of beams whose logits were no numbers: they have no likeliest tokens."""
    sequences = (w.part.sequence for w in found if w.part.end == len(w.part.sequence.token_ids))
    lost = (s for s in sequences if s.request.search is not None and not s.tops)
    return [Reading(sequence, [None], sequence.computed) for sequence in lost]
