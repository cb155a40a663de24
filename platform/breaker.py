"""A circuit breaker: after failures in a row nobody waits for a part that does not answer.

Closed, every call is tried. Open, none is, until `cool_s` seconds have passed; then one call is let
through to probe, and its outcome closes or opens the circuit again (M. Nygard, "Release It!").
Pure: it has no clock, waits for nothing and knows nothing of what it protects.
"""

from dataclasses import dataclass


@dataclass
class Breaker:
    """Opens after `failures` in a row; all moments are seconds of one monotonic clock."""

    failures: int = 3
    cool_s: float = 1.0
    _failed: int = 0
    _probe_at: float = 0.0

    @property
    def is_well(self) -> bool:
        """Whether the last call that ended had an answer."""
        return self._failed == 0

    def allows(self, now: float) -> bool:
        """Whether a call may be tried; a probe that is allowed holds others off for `cool_s`."""
        if self._failed < self.failures:
            return True
        if now < self._probe_at:
            return False
        self._probe_at = now + self.cool_s
        return True

    def succeeded(self) -> None:
        """A call had its answer."""
        self._failed = 0

    def failed(self, now: float) -> None:
        """A call had none."""
        self._failed += 1
        self._probe_at = now + self.cool_s
