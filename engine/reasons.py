"""Why an upload is refused: reasons gathered until all are known, each with what to do about it.

This file knows codes and sentences. It refuses to know what is checked.
"""

from collections.abc import Iterable

import msgspec

EXAMPLES = 3
MAX_SHOWN = 120


class Reason(msgspec.Struct, frozen=True):
    """One thing that is wrong, or worth a warning: a stable code, and what is wrong and to do."""

    code: str
    message: str


class Rejected(Exception):
    """The adapter cannot be served; `reasons` are all that were found."""

    def __init__(self, reasons: Iterable[Reason]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("\n".join(f"{r.code}: {r.message}" for r in self.reasons))


class Findings:
    """Collects what is wrong; findings with one code and one cure become one reason."""

    def __init__(self) -> None:
        self._rejections: dict[tuple[str, str], list[str]] = {}
        self._warnings: dict[tuple[str, str], list[str]] = {}

    def reject(self, code: str, detail: str, cure: str) -> None:
        """Add a reason to refuse: `detail` is what is wrong, `cure` what to do, no full stops."""
        self._rejections.setdefault((code, cure), []).append(detail)

    def warn(self, code: str, detail: str, cure: str) -> None:
        """Add what the owner should know but does not stop the adapter."""
        self._warnings.setdefault((code, cure), []).append(detail)

    def extend(self, other: "Findings") -> None:
        """Add all that another collection has found."""
        for (code, cure), details in other._rejections.items():
            self._rejections.setdefault((code, cure), []).extend(details)
        for (code, cure), details in other._warnings.items():
            self._warnings.setdefault((code, cure), []).extend(details)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """The reasons to refuse, in the order in which their kinds were found."""
        return tuple(_reason(*found) for found in self._rejections.items())

    @property
    def warnings(self) -> tuple[Reason, ...]:
        """The warnings, in the order in which their kinds were found."""
        return tuple(_reason(*found) for found in self._warnings.items())

    def raise_if_any(self) -> None:
        """Raise `Rejected` when there is a reason to."""
        if self._rejections:
            raise Rejected(self.reasons)


def shown(value: object) -> str:
    """A stranger's value as it may stand in a message: quoted, on one line, of bounded length."""
    text = repr(value[:MAX_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def _reason(kind: tuple[str, str], details: list[str]) -> Reason:
    code, cure = kind
    text = "; ".join(details[:EXAMPLES])
    if len(details) > EXAMPLES:
        text += f"; and {len(details) - EXAMPLES} more"
    return Reason(code, f"{_capital(text)}. {_capital(cure)}.")


def _capital(text: str) -> str:
    """Begin a sentence, unless it begins with a name."""
    is_word = text.split(" ", 1)[0].isalpha()
    return text[:1].upper() + text[1:] if is_word else text
