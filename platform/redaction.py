"""Takes secrets out of text, whoever wrote it: logs, tracebacks, messages, printed settings.

Knows how secrets look and those that it was told; refuses to know where text comes from. Too much
is hidden rather than too little: a log line is for finding a fault, not for copying from.
"""

import re
from typing import Final
from urllib.parse import quote

HIDDEN: Final = "…"
SHORTEST: Final = 6  # characters of a secret that is hidden wherever it stands

_NAMES = (
    r"(?:authorization|(?:set-)?cookie|pepper|secret|passw(?:or)?d|pwd|credentials?"
    r"|api[-_]?key|(?:access|secret|private|account)[-_]?key"
    r"|(?:access|auth|refresh|security|session)[-_]?token|signature|sig)"
)
_Rule = tuple[tuple[str, ...], re.Pattern[str], str]
_RULES: Final[tuple[_Rule, ...]] = (  # each is slow, so for text with one of its marks
    # keys of ours, also percent-encoded, and tokens of services that we call
    (("lpx",), re.compile(r"(lpx(?:_|%5[fF]))[0-9A-Za-z]{8,}"), rf"\1{HIDDEN}"),
    (
        ("hf_", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "akia"),
        re.compile(r"\b(hf_|sk-|gh[pousr]_|AKIA)[0-9A-Za-z_-]{12,}"),
        rf"\1{HIDDEN}",
    ),
    # scheme://user:password@host
    (("://",), re.compile(r"(://[^\s/:@'\"<>]*):[^\s/'\"<>]+@"), rf"\1:{HIDDEN}@"),
    (("bearer",), re.compile(r"\b(bearer)\s+[^\s'\",;]+", re.IGNORECASE), rf"\1 {HIDDEN}"),
    (
        ("basic",),
        re.compile(r"\b(basic)\s+[0-9A-Za-z+/=_-]{8,}", re.IGNORECASE),
        rf"\1 {HIDDEN}",
    ),
    # name: value, name=value, 'name': 'value', (b'name', b'value')
    (
        (":", "=", ","),
        re.compile(
            rf"({_NAMES}(?:\\?['\"])?\s*(?:[:=]|(?<=['\"])\s*,)\s*b?)"
            r"(?:\\?\"[^\"]*\"|\\?'[^']*'|SecretStr\([^)]*\)|[^\s,;&'\"]+)",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
)


def redact(text: str) -> str:
    """The same text without what looks like a secret."""
    lowered = text.lower() if text.isascii() else None  # other letters may fold to a mark's
    for marks, pattern, replacement in _RULES:
        if lowered is None or any(mark in lowered for mark in marks):
            text = pattern.sub(replacement, text)
    return text


class Redactor:
    """Hides what looks like a secret, and every secret that it has learned, as it is."""

    def __init__(self, *secrets: str | None) -> None:
        self._literals: frozenset[str] = frozenset()
        self.learn(*secrets)

    def learn(self, *secrets: str | None) -> None:
        """Hide these from now on, percent-encoded too, unless they are too short to be told."""
        known = {secret for secret in secrets if secret and len(secret) >= SHORTEST}
        self._literals |= known | {quote(secret, safe="") for secret in known}

    def __call__(self, text: str) -> str:
        """The same text without secrets."""
        for literal in self._literals:
            text = text.replace(literal, HIDDEN)
        return redact(text)
