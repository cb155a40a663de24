"""Steps that may be launched before the tokens of the step before are read, and what that takes.

While a device computes a step the host plans the next one, whose newest tokens only the device
knows: it takes them from the step before itself. The host reads a step's tokens once the next is
launched, and learns one step late that a sequence has ended; what that sequence computed meanwhile
is dropped. So do SGLang ("zero-overhead batch scheduler", 2024), TensorRT-LLM's overlap scheduler
and vLLM's asynchronous scheduling.

Only steps fly whose tokens the device can choose, and which move no blocks. Others wait until what
flies has landed. This file knows plans and sequences; it refuses to know executors and events.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from loraplex.engine.draw import Draw
from loraplex.engine.philox import uniform
from loraplex.engine.plan import Plan, Scheduled
from loraplex.engine.sampler import is_adjusted, is_greedy
from loraplex.engine.sequence import Sequence


def may_fly(plan: Plan) -> bool:
    """Whether nothing of a plan needs the host."""
    moves = plan.preempted or plan.swap_out or plan.copies or plan.swap_in
    if moves or not plan.scheduled:
        return False
    return all(_may_fly(part.sequence) for part in plan.scheduled)


def take_off(order: Iterable[Scheduled], model_len: int) -> list[Draw | None]:
    """Note with the sequences of a step in row order that it will have run.

    Returns how each wanted row chooses: by a draw, or (None) the likeliest.
    """
    draws: list[Draw | None] = []
    for part in order:
        sequence = part.sequence
        sequence.computed = part.end
        if not part.wanted:
            continue
        draws.append(_draw(sequence))
        sequence.fed = -len(draws)
        if part.end + 1 < min(model_len, _most_tokens(sequence)):  # else its next token ends it
            sequence.ahead += 1
    return draws


def touch_down(part: Scheduled) -> None:
    """Note that the token that the part chose is read."""
    sequence = part.sequence
    sequence.ahead -= sequence.ahead > 0


def remaining(plan: Plan, lives: Callable[[Sequence], bool]) -> Plan:
    """The plan without the sequences that have ended since it was made."""
    return replace(plan, scheduled=tuple(p for p in plan.scheduled if lives(p.sequence)))


def _may_fly(sequence: Sequence) -> bool:
    """Whether the sequence's choices depend on its logits and its seed alone, and nothing else."""
    request, sampling = sequence.request, sequence.request.sampling
    reported = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    is_simple = sequence.matcher is None and request.search is None and sequence.slots == 1
    is_short = bool(request.barred) and sequence.generated + sequence.ahead < sampling.min_tokens
    return is_simple and not (sequence.drafts or reported or is_short or is_adjusted(sampling))


def _draw(sequence: Sequence) -> Draw | None:
    sampling = sequence.request.sampling
    if is_greedy(sampling):
        return None
    return Draw(sampling, uniform(sequence.seed, sequence.generated + sequence.ahead))


def _most_tokens(sequence: Sequence) -> int:
    return sequence.request.prompt_len + sequence.request.sampling.max_tokens
