"""Module patterns as PEFT's configurations hold them, without running a stranger's regex.

PEFT reads `target_modules` given as a string, and the keys of `rank_pattern` and `alpha_pattern`,
as regular expressions. Here a small part of that language is understood, with PEFT's meaning:

    ["^"] [".*"] [path] ["(" path {"|" path} ")"] ["$"]

where a path is made of names and of dots, bare or escaped; a bare dot matches any character, and
path or group there must be. Anything else is `PatternError`. This file knows no module names.
"""

import re
from dataclasses import dataclass

MAX_LENGTH = 1024
_PATH = r"(?:[A-Za-z0-9_-]|\\?\.)+"
_PATTERN = re.compile(rf"(\^?)(\.\*)?({_PATH})?(?:\((?:\?:)?({_PATH}(?:\|{_PATH})*)\))?\$?")
_CHARACTER = re.compile(r"\\?(.)")
_ANY = ""


class PatternError(ValueError):
    """The pattern is outside the part of the regex language that is understood here."""


@dataclass(frozen=True)
class Pattern:
    """Alternative paths, each a tuple of characters in which "" stands for any."""

    text: str
    paths: tuple[tuple[str, ...], ...]
    anchored: bool  # began with "^"
    open: bool  # began with ".*"

    def matches_whole(self, name: str) -> bool:
        """Whether `re.fullmatch(pattern, name)` would match, as for `target_modules`."""
        return any(_ends(name, p) and (self.open or len(p) == len(name)) for p in self.paths)

    def matches_end(self, name: str) -> bool:
        r"""Whether `re.match(rf"(.*\.)?({pattern})$", name)` would, as for `rank_pattern`."""
        return any(_ends(name, p) and self._may_begin(name, len(p)) for p in self.paths)

    def _may_begin(self, name: str, length: int) -> bool:
        start = len(name) - length
        return self.open or start == 0 or (not self.anchored and name[start - 1] == ".")


def parse_pattern(text: str) -> Pattern:
    """Parse a pattern; raises `PatternError`."""
    found = _PATTERN.fullmatch(text) if len(text) <= MAX_LENGTH else None
    anchor, anything, path, group = found.groups(default="") if found else ("", "", "", "")
    if not path and not group:
        raise PatternError(text)
    paths = tuple(_characters(path + end) for end in group.split("|"))
    return Pattern(text, paths, bool(anchor), bool(anything))


def _characters(path: str) -> tuple[str, ...]:
    return tuple(_ANY if m[0] == "." else m[1] for m in _CHARACTER.finditer(path))


def _ends(name: str, path: tuple[str, ...]) -> bool:
    if len(path) > len(name):
        return False
    tail = name[len(name) - len(path) :]
    return all(want in (_ANY, have) for want, have in zip(path, tail, strict=True))
