"""Tokens chosen on the device, and the buffers that bring numbers there and back."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from loraplex.engine.draw import Draw
from loraplex.engine.gpu.choices import Choices
from loraplex.engine.gpu.metadata import Metadata
from loraplex.engine.outcome import Outcome

CPU = torch.device("cpu")
SAMPLING = SimpleNamespace(temperature=1e-9, top_k=0, top_p=1.0, min_p=0.0)


def likeliest(*tokens: int | None) -> Outcome:
    """Rows of nine logits whose highest is that of a token, or which are not finite."""
    logits = torch.zeros(len(tokens), 9)
    for row, token in zip(logits, tokens, strict=True):
        row[token or 0] = 1.0 if token is not None else torch.nan
    peak, first = logits.max(dim=1)
    return Outcome(logits, first, peak)


def test_the_newest_two_steps_can_be_read_in_any_order() -> None:
    choices = Choices(3, CPU)
    before = choices.choose(likeliest(4, 5, 6), [None] * 3)
    for tokens in ([7], [1, None, 3], [2, 8]):
        newest = choices.choose(
            likeliest(*tokens), [None, Draw(SAMPLING, 0.9), None][: len(tokens)]
        )
        assert newest.result() == tokens
        known, before = before.result(), newest
    assert known == [1, None, 3]


def test_a_step_takes_what_was_chosen_last() -> None:
    choices = Choices(3, CPU)
    choices.choose(likeliest(4, 5, None), [None] * 3)
    choices.choose(likeliest(7, None), [None] * 2)
    ids = torch.tensor([-1, 3, -2, -1], dtype=torch.int32)
    choices.feed(ids)
    assert ids.tolist() == [7, 3, 0, 7], "what is no token stands for any; the host ends that row"


class Event:
    """Tells when it is waited for."""

    def __init__(self, name: str, told: list[str]) -> None:
        self._name, self._told = name, told

    def synchronize(self) -> None:
        self._told.append(self._name)


def test_a_buffer_is_written_once_the_copy_from_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of two steps ago; the copy of the step before may be under way."""
    metadata, told, events = Metadata(4, CPU), [], iter("abcd")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor is metadata.ints))
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda: SimpleNamespace(record_event=lambda: Event(next(events), told)),
    )

    def write(ints: np.ndarray) -> int:
        ints[:] = len(told)
        told.append("write")
        return 4

    for _ in range(4):
        metadata.send(write)
    assert told == ["write", "write", "a", "write", "b", "write"]
    assert metadata.ints.tolist() == [5] * 4


@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.99}, {"min_p": 0.1}])
def test_what_may_not_come_is_not_drawn(limits: dict[str, float]) -> None:
    """Logits of -inf, which a guide's mask leaves."""
    logits = torch.full((4, 70), -torch.inf)
    logits[:, [3, 40]] = torch.tensor([1.0, 0.5])
    peak, first = logits.max(dim=1)
    sampling = SimpleNamespace(
        **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | limits
    )
    draws = [Draw(sampling, share) for share in (0.0, 0.6, 0.7, 1 - 2.0**-53)]
    assert Choices(4, CPU).choose(Outcome(logits, first, peak), draws).result() == [3, 3, 40, 40]
