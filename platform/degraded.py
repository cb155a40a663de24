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

from loraplex.platform.limit_standing import Counted, Standing
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
        waits = [
            (wait, (place, limit))
            for place, (bucket, state) in enumerate(pairs)
            for wait, limit in self._waits(bucket, state, estimate, now)
        ]
        wait, by = max(waits, key=lambda each: each[0], default=(0.0, None))
        if by is None:
            for bucket, state in pairs:
                self._take(bucket, state, id, estimate, now)
            self._reserved[id] = _Reserved(self._window, estimate, keys)
        counted = tuple(self._counted(bucket, state, now) for bucket, state in pairs)
        return Standing(counted, now / 1e6, by, wait)

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
    ) -> list[tuple[float, int]]:
        """For how many seconds each limit of a bucket refuses, and its place; those that do."""
        counted = self._counted(bucket, state, now)
        (requests, tokens, at_once), used = counted.limits, counted.used
        waits = []
        if requests is not None:
            step = self._step(requests)
            wait = max(state.arrival, now) + step - step * requests - now
            waits.append((wait / 1e6, 0))
        if tokens is not None and used[1] + estimate > tokens:
            waits.append((counted.reset_s[1], 1))
        if at_once is not None and used[2] >= at_once:
            waits.append((AT_ONCE_WAIT_S, 2))
        return [each for each in waits if each[0] > 0]

    def _take(self, bucket: Bucket, state: _State, id: str, estimate: int, now: int) -> None:
        if (share := self._share(bucket.limits.requests_per_minute)) is not None:
            state.arrival = max(state.arrival, now) + self._step(share)
        state.tokens = self._tokens(state) + estimate
        state.window = self._window
        state.running.add(id)

    def _counted(self, bucket: Bucket, state: _State, now: int) -> Counted:
        """A bucket's rates as they stand here; requests used are those that GCRA still holds."""
        requests, tokens, at_once = (self._share(limit) for limit in bucket.limits.held[:3])
        busy = max(0, state.arrival - now)
        used = 0 if requests is None else -(-busy // self._step(requests))
        window_end = (self._window + 1) * self._period
        return Counted(
            bucket,
            (requests, tokens, at_once),
            (used, self._tokens(state), len(state.running)),
            (busy / 1e6, (window_end - now) / 1e6, 0.0),
        )

    def _tokens(self, state: _State) -> int:
        return state.tokens if state.window == self._window else 0

    def _share(self, limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // self._replicas)

    def _step(self, share: int) -> int:
        return -(-self._period // share)
