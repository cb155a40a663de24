"""How buckets stand after a decision: what is left, what binds, and what a caller is told of it.

Pure arithmetic over what Redis (`limits.py`) or a process by itself (`degraded.py`) counted;
refuses to know either, and has no clock.
"""

import math
from collections.abc import Iterable
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
_REQUESTS: Final = (0,)  # places in NAMES
_TOKENS: Final = (1, 3, 4)


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


class Counted(msgspec.Struct, frozen=True):
    """One bucket as it stands: its limits, what is used of each, and seconds until that is back.

    In the order of `NAMES`; a bucket may be without the last of them.
    """

    bucket: Bucket
    limits: tuple[int | None, ...]
    used: tuple[int, ...]
    reset_s: tuple[float, ...]

    def use(self, place: int) -> Use:
        """The limit in that place of `NAMES`."""
        limit, used = self.limits[place], self.used[place]
        return Use(self.bucket, NAMES[place], limit, used, self.reset_of(place))

    def reset_of(self, place: int) -> float:
        """Seconds until all of a limit is there again: 0 where nothing of it is used."""
        return self.reset_s[place] if self.used[place] else 0.0


@dataclass(frozen=True)
class Standing:
    """How all buckets of a request stand, and which limit refuses it, if one does, until when.

    `now` is the counter's own clock, in seconds since the epoch; `refused` the places of the
    bucket and of its limit.
    """

    counted: tuple[Counted, ...]
    now: float
    refused: tuple[int, int] | None = None
    wait_s: float = 0.0

    @property
    def uses(self) -> tuple[Use, ...]:
        """Every limit of every bucket."""
        return tuple(each.use(i) for each in self.counted for i in range(len(each.limits)))

    @property
    def refused_by(self) -> Use | None:
        """The limit that refuses."""
        if self.refused is None:
            return None
        bucket, limit = self.refused
        return self.counted[bucket].use(limit)

    def use(self, name: LimitName, kind: str = "tenant") -> Use:
        """The named limit of the first bucket of this kind."""
        return next(u for u in self.uses if u.name == name and u.bucket.kind == kind)

    @property
    def nearest(self) -> Use | None:
        """The limit that refuses, else the one of which the smallest share is left."""
        if self.refused is not None:
            return self.refused_by
        shares = [(left / limit, bucket, place) for left, bucket, place, limit in self._left()]
        _, bucket, place = min(shares, default=(0.0, -1, 0))
        return self.counted[bucket].use(place) if bucket >= 0 else None

    @property
    def headers(self) -> dict[str, str]:
        """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}` and `x-loraplex-limit`.

        Each of the two is told of its tightest limit, a day's and a month's tokens among them.
        """
        headers, left = {}, self._left()
        for kind, places in (("requests", _REQUESTS), ("tokens", _TOKENS)):
            tightest = min((each for each in left if each[2] in places), default=None)
            if tightest is not None:
                remaining, bucket, place, limit = tightest
                headers[f"x-ratelimit-limit-{kind}"] = str(limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(remaining)
                reset_s = self.counted[bucket].reset_of(place)
                headers[f"x-ratelimit-reset-{kind}"] = duration(reset_s)
        if (nearest := self.nearest) is not None:
            headers["x-loraplex-limit"] = nearest.label
        return headers

    def _left(self) -> list[tuple[int, int, int, int]]:
        """What is left of each limit, the places of its bucket and in `NAMES`, and the limit."""
        return [
            (max(0, limit - each.used[place]), bucket, place, limit)
            for bucket, each in enumerate(self.counted)
            for place, limit in enumerate(each.limits)
            if limit is not None
        ]


def refusal(standing: Standing, asked: int) -> RateLimited | QuotaExceeded:
    """The error for a request that `standing` refuses; `asked` is what it might use in tokens."""
    use = standing.refused_by
    if use is None or use.limit is None:
        raise ValueError("nothing refuses this request")
    if use.name in BUDGETS:
        moment = datetime.fromtimestamp(standing.now, UTC) + timedelta(seconds=standing.wait_s)
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
    held = bucket.limits.held
    return [(NAMES[i], limit) for i in _TOKENS if (limit := held[i]) is not None]


def duration(seconds: float) -> str:
    """As OpenAI writes it: `250ms`, `1.5s`, `6m0s`; rounded up to the millisecond."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    rest = f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
