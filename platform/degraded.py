"""Rates held by one process alone, while Redis is away.

Each of so many replicas lets a share of every limit through, `limit / replicas` and at least 1:
requests by GCRA, tokens by fixed minutes, requests at once by counting them. So no replica needs to
hear of another. It begins empty: what Redis admitted in the same minute is not known here. Budgets
are not for it: they stay closed.

Pure: whole numbers, no IO, and the caller's clock, in microseconds since the epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from loraplex.platform.errors import LimitName
from loraplex.platform.limit_standing import Standing, Use
from loraplex.platform.quotas import Bucket

AT_ONCE_WAIT_S: Final = 1.0  # nobody knows when a running request ends
Key = tuple[str, str, str]  # tenant, kind, id


@dataclass
class _State:
    """One bucket here: GCRA's theoretical arrival, a minute's tokens, and who is running."""

    arrival: int = 0
    window: int = 0
    tokens: int = 0
    running: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Reserved:
    window: int
    estimate: int
    keys: tuple[Key, ...]


class Degraded:
    """All buckets of one process, each with `1 / replicas` of its limits a `period_us`."""

    def __init__(self, replicas: int, period_us: int) -> None:
        self._replicas, self._period = replicas, period_us
        self._states: dict[Key, _State] = {}
        self._reserved: dict[str, _Reserved] = {}
        self._window = 0

    def can_ever_hold(self, buckets: Sequence[Bucket], estimate: int) -> bool:
        """Whether so many tokens fit this process's share of a minute."""
        wholes = (self._share(bucket.limits.tokens_per_minute) for bucket in buckets)
        return all(whole is None or estimate <= whole for whole in wholes)

    def admit(
        self, tenant_id: str, id: str, buckets: Sequence[Bucket], estimate: int, now: int
    ) -> Standing:
        """Let a request in, in all buckets or, where the answer is refused by one, in none."""
        self._turn(now)
        keys = tuple((tenant_id, bucket.kind, bucket.id) for bucket in buckets)
        states = [self._states.setdefault(key, _State()) for key in keys]
        pairs = list(zip(buckets, states, strict=True))
        waits = [each for b, state in pairs for each in self._waits(b, state, estimate, now)]
        wait, by = max(waits, key=lambda each: each[0], default=(0.0, None))
        if by is None:
            for bucket, state in pairs:
                self._take(bucket, state, id, estimate, now)
            self._reserved[id] = _Reserved(self._window, estimate, keys)
        uses = tuple(use for bucket, state in pairs for use in self._uses(bucket, state, now))
        return Standing(uses, now / 1e6, by, wait)

    def settle(self, id: str, used: int, now: int) -> None:
        """End a request that used so many tokens; a second call changes nothing."""
        self._turn(now)
        if (reserved := self._reserved.pop(id, None)) is None:
            return
        for key in reserved.keys:
            state = self._states[key]
            state.running.discard(id)
            if state.window == reserved.window:
                state.tokens += used - reserved.estimate

    def _turn(self, now: int) -> None:
        """When a minute has begun, forget buckets that hold nothing of the last any more."""
        window = now // self._period
        if window == self._window:
            return
        self._window = window
        held = [(k, s) for k, s in self._states.items() if s.running or s.arrival > now]
        self._states = dict(held)

    def _waits(
        self, bucket: Bucket, state: _State, estimate: int, now: int
    ) -> list[tuple[float, Use]]:
        """Each limit of a bucket that refuses, and for how many seconds it will."""
        requests, tokens, at_once = self._uses(bucket, state, now)
        waits = []
        if requests.limit is not None:
            step = self._step(requests.limit)
            wait = max(state.arrival, now) + step - step * requests.limit - now
            waits.append((wait / 1e6, requests))
        if tokens.limit is not None and tokens.used + estimate > tokens.limit:
            waits.append((tokens.reset_s, tokens))
        if at_once.limit is not None and at_once.used >= at_once.limit:
            waits.append((AT_ONCE_WAIT_S, at_once))
        return [each for each in waits if each[0] > 0]

    def _take(self, bucket: Bucket, state: _State, id: str, estimate: int, now: int) -> None:
        if (share := self._share(bucket.limits.requests_per_minute)) is not None:
            state.arrival = max(state.arrival, now) + self._step(share)
        state.tokens = self._tokens(state) + estimate
        state.window = self._window
        state.running.add(id)

    def _uses(self, bucket: Bucket, state: _State, now: int) -> tuple[Use, Use, Use]:
        """The bucket's limits as they stand here; requests used are those that GCRA still holds."""
        limits, busy = bucket.limits, max(0, state.arrival - now)
        share = self._share(limits.requests_per_minute)
        requests = 0 if share is None else -(-busy // self._step(share))
        window_end = (self._window + 1) * self._period
        return (
            self._use(bucket, "requests_per_minute", requests, busy),
            self._use(bucket, "tokens_per_minute", self._tokens(state), window_end - now),
            self._use(bucket, "max_concurrency", len(state.running), 0),
        )

    def _use(self, bucket: Bucket, name: LimitName, used: int, reset_us: int) -> Use:
        return Use(bucket, name, self._share(getattr(bucket.limits, name)), used, reset_us / 1e6)

    def _tokens(self, state: _State) -> int:
        return state.tokens if state.window == self._window else 0

    def _share(self, limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // self._replicas)

    def _step(self, share: int) -> int:
        return -(-self._period // share)
