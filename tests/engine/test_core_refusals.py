"""What the engine does not take: requests that can never fit, floods, ids in flight, settings."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from loraplex.engine.core import DuplicateRequest
from loraplex.engine.protocol import Failed, Finished, Generate
from loraplex.engine.settings import SettingsError

Start = Callable[..., Any]
A = "a" * 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": ()}, "no tokens"),
        ({"prompt": (1,) * 128}, "at most 127 leave room"),
        ({"prompt": (1, 64)}, "vocabulary of 64"),
        ({"prompt": (-1,)}, "vocabulary of 64"),
        ({"image": "../etc"}, "64 hexadecimal digits"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": ((64, 1.0),)}, "logit_bias names"),
        ({"logit_bias": ((1, float("inf")),)}, "logit_bias must be finite"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_what_can_never_be_served_is_refused_at_the_door(
    rig: Start, stand_in: ModuleType, change: dict[str, Any], words: str
) -> None:
    subject, change = rig(), dict(change)
    prompt = change.pop("prompt", (1, 2))
    request = stand_in.request("bad", *prompt, **change)
    subject.add(Generate("bad", tuple(prompt), request.sampling, request.image))
    subject.add(stand_in.request("good", 1))
    subject.drain()
    end = subject.end("bad")
    assert isinstance(end, Failed)
    assert end.code == "invalid_request"
    assert words in end.message
    assert isinstance(subject.end("good"), Finished)
    assert subject.holds_nothing()


def test_a_full_queue_refuses(rig: Start, stand_in: ModuleType) -> None:
    subject = rig(max_waiting=2)
    subject.add(stand_in.request("1", 1), stand_in.request("2", 1, image=A))
    subject.add(stand_in.request("3", 1))
    subject.drain()
    end = subject.end("3")
    assert isinstance(end, Failed) and end.code == "overloaded"
    subject.arrive(A)
    subject.step()
    subject.drain()
    assert isinstance(subject.end("2"), Finished)


def test_an_id_in_flight_is_refused_and_the_first_goes_on(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.add(stand_in.request("r", 1))
    with pytest.raises(DuplicateRequest):
        subject.add(stand_in.request("r", 2))
    subject.drain()
    assert isinstance(subject.end("r"), Finished)
    subject.events.clear()
    subject.add(stand_in.request("r", 1))
    subject.drain()
    assert isinstance(subject.end("r"), Finished)


def test_a_model_length_that_cannot_fit_is_refused_at_the_start(rig: Start) -> None:
    with pytest.raises(SettingsError, match=r"max_model_len is 100.*holds 40.*at most 40"):
        rig(num_blocks=10, max_model_len=100)
