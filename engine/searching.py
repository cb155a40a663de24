"""Beam search in the engine: what the search decides becomes forks of sequences that share blocks.

This file knows sequences and the search's decisions (`beam.py`); it refuses to know logits.
"""

from loraplex.engine.beam import Candidate
from loraplex.engine.protocol import Generate
from loraplex.engine.scheduler import Scheduler
from loraplex.engine.sequence import Request, Sequence


def advance(request: Request, scheduler: Scheduler) -> bool:
    """Let the search of a request choose its next beams; False when it has ended."""
    assert request.search is not None  # noqa: S101
    parents = request.alive
    chosen = request.search.advance([beam.tops for beam in parents])
    if not chosen:
        return False
    children = _children(parents, chosen, scheduler)
    for parent in parents:
        if parent not in children:
            scheduler.remove(parent)
    for child, candidate in zip(children, chosen, strict=True):
        child.token_ids.append(candidate.token)
        child.tops = []
    request.alive = children
    return True


def _children(
    parents: list[Sequence], chosen: list[Candidate], scheduler: Scheduler
) -> list[Sequence]:
    """The sequences that go on: a parent itself as its first child, forks of it as the others."""
    children: list[Sequence] = []
    for candidate in chosen:
        parent = parents[candidate.beam]
        children.append(parent if parent not in children else scheduler.fork(parent, 0))
    return children


def lacks_room(message: Generate, model_len: int, block_size: int) -> str | None:
    """Why a search's beams, which all run at once, could find no room for ever; else None."""
    if message.beams is None:
        return None
    longest = min(len(message.token_ids) + message.sampling.max_tokens, model_len)
    needed = message.beams.width * -(-longest // block_size)
    certain = -(-model_len // block_size)
    if needed <= certain:
        return None
    return (
        f"{message.beams.width} beams of {longest} tokens need {needed} KV blocks and {certain}"
        " are certain to be had: ask for fewer beams or a lower max_tokens"
    )
