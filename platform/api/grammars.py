"""Whether llguidance can follow a guide, asked before a request is let in.

Guides come from strangers, and llguidance walks their rules recursively, so a check runs on a
thread of its own whose stack is deep enough for any text of `MAX_CHARS`; it is given back at once.
One check runs at a time. Knows grammars; refuses to know requests.
"""

import threading
from collections.abc import Callable
from typing import Final

from llguidance import LLMatcher

from loraplex.engine.protocol import Guide, GuideKind

MAX_CHARS: Final = 65_536
STACK: Final = 1 << 28  # bytes of address space; pages are taken as they are used

_lock = threading.Lock()


def problem_with(guide: Guide) -> str | None:
    """Why the guide, of at most `MAX_CHARS` characters, cannot be followed; None if it can be."""
    found: list[str] = []
    with _lock:
        thread = _start_deep(lambda: found.append(_check(guide)))
        thread.join()
    return found[0] or None


def _start_deep(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="grammar")
    before = threading.stack_size(STACK)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


def _check(guide: Guide) -> str:
    try:
        return LLMatcher.validate_grammar(_GRAMMARS[guide.kind](guide.text))
    except ValueError as error:
        return str(error)


_GRAMMARS: Final[dict[GuideKind, Callable[[str], str]]] = {
    "json_schema": LLMatcher.grammar_from_json_schema,
    "regex": LLMatcher.grammar_from_regex,
    "grammar": LLMatcher.grammar_from_lark,
}
