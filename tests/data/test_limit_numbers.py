"""What is worked out about limits before and after Redis decides."""

from datetime import UTC, datetime

import pytest
from limit_kit import of_all, of_tenant

from loraplex.platform.errors import BadRequest, BudgetSpent, RateLimited
from loraplex.platform.limit_standing import (
    NAMES,
    Counted,
    Standing,
    Use,
    cap_max_tokens,
    duration,
    refusal,
)
from loraplex.platform.quotas import Bucket, Limits


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
    for name in ("tokens_per_minute", "tokens_per_day", "tokens_per_month"):
        buckets = of_tenant(**{name: whole})
        if expected is None:
            with pytest.raises(BadRequest, match=name.replace("_", " ")):
                cap_max_tokens(buckets, prompt, asked, room, choices)
        else:
            assert cap_max_tokens(buckets, prompt, asked, room, choices) == expected


def test_a_default_fits_the_smallest_bucket() -> None:
    buckets = of_all(Limits(None, 1000), Limits(tokens_per_day=500), Limits(None, 60))
    assert cap_max_tokens(buckets, 10, None, 4096) == 50
    with pytest.raises(BadRequest, match="this adapter's limit of 60 tokens per minute"):
        cap_max_tokens(buckets, 10, 51, 4096)


HELD = Limits(60, 1000, 4, tokens_per_day=2000)
KEY = Counted(
    Bucket("key", "key_1", HELD),
    HELD.held,
    (12, 400, 1, 1500, 9000),
    (12.0, 30.0, 0.0, 3600.0, 86400.0),
)
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)


def test_limits_are_in_the_order_of_their_names() -> None:
    assert HELD.held == tuple(getattr(HELD, name) for name in NAMES)
    uses = Standing((KEY,), NOON.timestamp()).uses
    assert [(use.name, use.limit) for use in uses] == list(zip(NAMES, HELD.held, strict=True))
    assert uses[3] == Use(KEY.bucket, "tokens_per_day", 2000, 1500, 3600.0)


def test_headers_tell_of_the_tightest_limits() -> None:
    alone = Counted(Bucket("tenant", "ten_1", Limits(5, None)), (5,), (1,), (1.0,))
    headers = Standing((KEY, alone), NOON.timestamp()).headers
    assert headers == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "2000",
        "x-ratelimit-remaining-tokens": "500",
        "x-ratelimit-reset-tokens": "60m0s",
        "x-loraplex-limit": "key tokens_per_day",
    }
    assert Standing((), 0).headers == {}


def test_what_is_unused_has_no_reset() -> None:
    """A window that holds nothing still has an end, which is no news to who waits for it."""
    fresh = Counted(KEY.bucket, KEY.limits, (0,) * 5, (0.0, 31.3, 0.0, 3600.0, 86400.0))
    standing = Standing((fresh,), NOON.timestamp())
    assert [use.reset_s for use in standing.uses] == [0.0] * 5
    assert standing.headers["x-ratelimit-reset-tokens"] == "0ms"
    assert fresh.use(3) == Use(KEY.bucket, "tokens_per_day", 2000, 0, 0.0)


def test_a_refusal_says_which_limit_of_whom() -> None:
    rate = refusal(Standing((KEY,), NOON.timestamp(), (0, 1), 30.0), 700)
    assert isinstance(rate, RateLimited)
    assert "This key's limit of 1000 tokens per minute is reached (600 left)" in rate.message
    assert rate.headers["retry-after"] == "30"
    assert rate.headers["x-loraplex-limit"] == "key tokens_per_minute"
    budget = refusal(Standing((KEY,), NOON.timestamp(), (0, 3), 3600.0), 700)
    assert isinstance(budget, BudgetSpent)
    for part in ("key's budget of 2000 tokens per day", "1500", "700", "2026-11-30 13:00 UTC"):
        assert part in budget.message
    assert budget.headers["x-should-retry"] == "false"
    assert "retry-after" not in budget.headers
    assert budget.body["error"]["type"] == budget.body["error"]["code"] == "insufficient_quota"


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
