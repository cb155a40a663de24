"""What is worked out about limits before and after Redis decides."""

import pytest

from loraplex.platform.errors import BadRequest
from loraplex.platform.limits import _duration as duration
from loraplex.platform.limits import cap_max_tokens
from loraplex.platform.quotas import TenantLimits


@pytest.mark.parametrize(
    ("whole", "prompt", "asked", "room", "choices", "expected"),
    [
        (None, 10, None, 500, 1, 500),
        (None, 10, 7, 500, 1, 7),
        (100, 10, None, 500, 1, 90),
        (100, 10, None, 50, 1, 50),
        (100, 10, None, 500, 4, 22),
        (100, 10, 90, 500, 1, 90),
        (100, 99, None, 500, 1, 1),
        (100, 100, None, 500, 1, None),
        (100, 10, 91, 500, 1, None),
        (100, 10, 46, 500, 2, None),
        (100, 98, None, 500, 3, None),
    ],
)
def test_a_default_fits_the_bucket_and_a_wish_must(
    whole: int | None, prompt: int, asked: int | None, room: int, choices: int, expected: int | None
) -> None:
    limits = TenantLimits(tokens_per_minute=whole)
    if expected is None:
        with pytest.raises(BadRequest, match="tokens per minute"):
            cap_max_tokens(limits, prompt, asked, room, choices)
    else:
        assert cap_max_tokens(limits, prompt, asked, room, choices) == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0001, "1ms"),
        (0.25, "250ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (61.25, "1m1.25s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
