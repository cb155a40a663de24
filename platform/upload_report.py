"""The report of an upload: each check with its outcome, every reason, and what was found out.

Plain JSON throughout, the same for an adapter that is refused and for one that is published. Knows
the checks' names and which reason is whose; refuses to know clocks, files and how a check is made.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

Check = Literal["received", "unpacked", "config", "weights", "compiled", "canary", "published"]
Outcome = Literal["passed", "failed"]
Reason = Mapping[str, str]
COMPILER_CHECKS: Final[tuple[Check, ...]] = ("config", "weights", "compiled")
OF_CONFIG: Final = ("config_", "unsupported_")
OF_WEIGHTS: Final = frozenset({"unsupported_vocabulary"})
OF_COMPILER: Final = frozenset({"too_slow", "too_costly", "parity_failed", "rank_too_large"})


class ReportSoFar:
    """Grows as checks are made; `plain` is what to keep and to show."""

    def __init__(self) -> None:
        self._checks: list[dict[str, Any]] = []
        self._reasons: list[Reason] = []
        self._facts: dict[str, Any] = {"variants": {}, "warnings": []}

    @property
    def plain(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {**self._facts, "checks": list(self._checks), "reasons": list(self._reasons)}

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Add what was found out; later facts replace earlier ones of the same name."""
        self._facts |= facts

    def tell_variant(self, dtype: str, facts: Mapping[str, Any]) -> None:
        """Add what was found out about one of the images."""
        variants = self._facts["variants"]
        self._facts["variants"] = variants | {dtype: {**variants.get(dtype, {}), **facts}}

    def passed(self, name: Check, seconds: float, at: int, **detail: Any) -> None:
        """A check that took `seconds` passed, at `at` (seconds since the epoch)."""
        self._add(name, "passed", seconds, at, detail)

    def failed(self, name: Check, seconds: float, at: int, reasons: Sequence[Reason]) -> None:
        """A check failed for these reasons, each `{"code", "message"}`."""
        self._reasons += reasons
        self._add(name, "failed", seconds, at, {"codes": sorted({r["code"] for r in reasons})})

    def compiler_passed(self, report: Mapping[str, Any], seconds: float, at: int) -> None:
        """What the compiler checks has passed; its own times are taken where it tells them."""
        times = report.get("seconds", {})
        config, weights = times.get("headers", 0.0), times.get("image", 0.0)
        rest = max(0.0, seconds - config - weights)
        for name, own in zip(COMPILER_CHECKS, (config, weights, rest), strict=True):
            self.passed(name, own, at)

    def compiler_failed(self, reasons: Sequence[Reason], seconds: float, at: int) -> None:
        """The compiler refused: which of its checks failed is told by the reasons' codes."""
        for name, own in _by_check(reasons):
            if own:
                self.failed(name, seconds, at, own)
            elif name != "compiled":
                self.passed(name, 0.0, at)

    def _add(self, name: Check, state: Outcome, seconds: float, at: int, detail: Any) -> None:
        check = {"name": name, "state": state, "seconds": round(seconds, 3), "at": at}
        self._checks.append(check | {"detail": detail})


def _by_check(reasons: Sequence[Reason]) -> Iterable[tuple[Check, list[Reason]]]:
    """Each of the compiler's checks with its reasons, up to the last one that failed."""
    found: dict[Check, list[Reason]] = {name: [] for name in COMPILER_CHECKS}
    for reason in reasons:
        found[_check_of(reason["code"])].append(reason)
    last = max(COMPILER_CHECKS.index(name) for name, own in found.items() if own)
    return [(name, found[name]) for name in COMPILER_CHECKS[: last + 1]]


def _check_of(code: str) -> Check:
    if code in OF_COMPILER:
        return "compiled"
    return "config" if code.startswith(OF_CONFIG) and code not in OF_WEIGHTS else "weights"
