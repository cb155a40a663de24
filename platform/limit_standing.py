"""How buckets stand after a decision: what is left, what binds, and what a caller is told of it.

Pure arithmetic over what Redis (`limits.py`) or a process by itself (`degraded.py`) counted;
refuses to know either, and has no clock.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, get_args

import msgspec

from loraplex.platform.errors import (
    BadRequest,
    BudgetSpent,
    LimitName,
    QuotaExceeded,
    RateLimited,
)
from loraplex.platform.quotas import Bucket

NAMES: Final[tuple[LimitName, ...]] = get_args(LimitName)
BUDGETS: Final = frozenset({"tokens_per_day", "tokens_per_month"})
_TOKENS: Final[tuple[LimitName, ...]] = ("tokens_per_minute", "tokens_per_day", "tokens_per_month")


class Use(msgspec.Struct, frozen=True):
    """One limit of one bucket as it stands; `reset_s` seconds from now all of it is there again.

    A `limit` of None is no limit: then `remaining` is None too.
    """

    bucket: Bucket
    name: LimitName
    limit: int | None
    used: int
    reset_s: float

    @property
    def remaining(self) -> int | None:
        """What is left, never less than none."""
        return None if self.limit is None else max(0, self.limit - self.used)

    @property
    def label(self) -> str:
        """As the header `x-loraplex-limit` names it: "key requests_per_minute"."""
        return f"{self.bucket.kind} {self.name}"


@dataclass(frozen=True)
class Standing:
    """How all buckets of a request stand, and which limit refuses it, if one does, until when.

    `now` is the counter's own clock, in seconds since the epoch.
    """

    uses: tuple[Use, ...]
    now: float
    refused_by: Use | None = None
    wait_s: float = 0.0

    def use(self, name: LimitName, kind: str = "tenant") -> Use:
        """The named limit of the first bucket of this kind."""
        return next(u for u in self.uses if u.name == name and u.bucket.kind == kind)

    @property
    def nearest(self) -> Use | None:
        """The limit that refuses, else the one of which the smallest share is left."""
        limited = [use for use in self.uses if use.limit]
        return self.refused_by or min(limited, key=_share_left, default=None)

    @property
    def headers(self) -> dict[str, str]:
        """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}` and `x-loraplex-limit`.

        Each of the two is told of its tightest limit, a day's and a month's tokens among them.
        """
        headers = {}
        for kind, names in (("requests", NAMES[:1]), ("tokens", _TOKENS)):
            if (use := self._tightest(names)) is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(use.limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(use.remaining)
                headers[f"x-ratelimit-reset-{kind}"] = duration(use.reset_s)
        if (nearest := self.nearest) is not None:
            headers["x-loraplex-limit"] = nearest.label
        return headers

    def _tightest(self, names: Sequence[LimitName]) -> Use | None:
        limited = [use for use in self.uses if use.name in names and use.limit is not None]
        return min(limited, key=lambda use: use.remaining or 0, default=None)


def refusal(standing: Standing, asked: int) -> RateLimited | QuotaExceeded:
    """The error for a request that `standing` refuses; `asked` is what it might use in tokens."""
    use = standing.refused_by
    if use is None or use.limit is None:
        raise ValueError("nothing refuses this request")
    if use.name in BUDGETS:
        moment = datetime.fromtimestamp(standing.now, UTC) + timedelta(seconds=use.reset_s)
        return BudgetSpent(
            use.name,
            use.limit,
            use.used,
            asked,
            moment,
            standing.headers,
            bucket=use.bucket.kind,
        )
    left = 0 if use.name == "max_concurrency" else use.remaining or 0
    return RateLimited(
        use.name, standing.wait_s, use.limit, left, standing.headers, bucket=use.bucket.kind
    )


def cap_max_tokens(
    buckets: Iterable[Bucket],
    prompt_tokens: int,
    max_tokens: int | None,
    room: int,
    choices: int = 1,
) -> int:
    """How many tokens each of `choices` completions may have: what was asked for, or what fits.

    `room` is what the context leaves beside the prompt. When `max_tokens` is None the answer also
    fits the smallest bucket, so a default never makes a request fail that could run. Raises
    `BadRequest` when the request is larger than a bucket can ever hold.
    """
    buckets = tuple(buckets)
    if max_tokens is None:
        wholes = [limit for bucket in buckets for _, limit in _token_limits(bucket)]
        shares = [(whole - prompt_tokens) // choices for whole in wholes]
        max_tokens = max(1, min([room, *shares]))
    check_fits(buckets, prompt_tokens + choices * max_tokens)
    return max_tokens


def check_fits(buckets: Iterable[Bucket], estimate: int) -> None:
    """Raise `BadRequest` where a bucket could not hold so many tokens if it were empty."""
    for bucket in buckets:
        for name, whole in _token_limits(bucket):
            if estimate > whole:
                raise BadRequest(
                    f"The prompt and max_tokens together are {estimate} tokens, more than this "
                    f"{bucket.kind}'s limit of {whole} {name.replace('_', ' ')} can ever hold. "
                    "Shorten the prompt or lower max_tokens.",
                    param="max_tokens",
                )


def _token_limits(bucket: Bucket) -> list[tuple[LimitName, int]]:
    limits = [(name, getattr(bucket.limits, name)) for name in _TOKENS]
    return [(name, limit) for name, limit in limits if limit is not None]


def _share_left(use: Use) -> float:
    return (use.remaining or 0) / (use.limit or 1)


def duration(seconds: float) -> str:
    """As OpenAI writes it: `250ms`, `1.5s`, `6m0s`; rounded up to the millisecond."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    rest = f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
