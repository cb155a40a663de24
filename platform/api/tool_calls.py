"""Reads the calls of tools out of an answer's text as it comes.

A call is a JSON object of `name` and `arguments` between `<tool_call>` tags. Its arguments are
given out as they come, once its name is known to be a tool's; nothing of a tag is ever shown. What
stands between tags but is no call of a known tool is text like any other, tags and all. Knows text;
refuses to know tokens and the JSON of answers.
"""

import contextlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from loraplex.platform.hermes import CLOSE, OPEN
from loraplex.platform.ids import new_id
from loraplex.platform.text import overlap

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_DECODER = json.JSONDecoder()
_STRUCTURE = re.compile(r'["\\{}\[\]<]')


@dataclass(frozen=True)
class Text:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class Begin:
    """A call begins; `index` counts an answer's calls."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the arguments of a call."""

    index: int
    text: str


Piece = Text | Begin | Arguments


class CallReader:
    """Splits one answer into text and calls; how the text is split into pushes changes no call.

    Space before a call and between calls is dropped, and a tag that a limit cuts off after a call.
    Arguments that were told as they came stay told, even if a limit cuts them off or they turn out
    to be no JSON.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._held = names, ""
        self._inside, self._space = False, ""  # of a block; what stood before it
        self._arguments: _Object | None = None  # those that are coming
        self._ready: list[Piece] = []
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        """Add text; returns what can be told for certain."""
        self._held += text
        while self._step():
            pass
        return self._take_ready()

    def flush(self) -> list[Piece]:
        """What is still held, once no more can come."""
        held, self._held = self._held, ""
        if self._arguments is None:
            if self._inside:
                self._see_block(held, "")
            elif not (self.calls and OPEN.startswith(held.strip())):
                self._say(held)
        return self._take_ready()

    def _take_ready(self) -> list[Piece]:
        ready, self._ready = self._ready, []
        return ready

    def _step(self) -> bool:
        """Use up some of what is held; False when more must come first."""
        if self._arguments is not None:
            return self._in_arguments(self._arguments)
        return self._in_block() if self._inside else self._in_text()

    def _in_text(self) -> bool:
        before, tag, after = self._held.partition(OPEN)
        if tag:
            text = before.rstrip()
            self._say(text)
            self._space = before[len(text) :]
            self._inside, self._held = True, after
            return True
        sure = self._held[: len(self._held) - overlap(self._held, OPEN)].rstrip()
        self._say(sure)
        self._held = self._held[len(sure) :]
        return False

    def _in_block(self) -> bool:
        if CLOSE in self._held:
            content, self._held = _split_block(self._held)
            self._inside = False
            self._see_block(content, CLOSE)
            return True
        head = _HEAD.match(self._held)
        if head is None or head[1] not in self._names:
            return False
        self._begin(head[1])
        self._arguments, self._held = _Object(), self._held[head.end() :]
        return True

    def _in_arguments(self, arguments: "_Object") -> bool:
        """Arguments up to their end; then the rest of the block, which is dropped."""
        if taken := arguments.take(self._held):
            self._ready.append(Arguments(self.calls - 1, taken))
            self._held = self._held[len(taken) :]
        if not arguments.ended or CLOSE not in self._held:
            return False
        self._held = self._held.partition(CLOSE)[2]
        self._arguments, self._inside = None, False
        return True

    def _see_block(self, content: str, close: str) -> None:
        """A whole block: a call, or text as it stands."""
        name, arguments = _parse(content) or ("", "")
        if name not in self._names:
            self._say(self._space + OPEN + content + close)
            return
        self._begin(name)
        self._ready.append(Arguments(self.calls - 1, arguments))

    def _begin(self, name: str) -> None:
        self._ready.append(Begin(self.calls, new_id("call"), name))
        self.calls += 1

    def _say(self, text: str) -> None:
        if text:
            self._ready.append(Text(text))


class _Object:
    """Finds the end of a JSON object that comes in pieces: the brace that closes the first one."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False
        self.ended = False

    def take(self, text: str) -> str:
        """The part of `text` that belongs to the object."""
        position = 0
        if self.ended:
            return ""
        while (found := self._next(text, position)) is not None:
            position = found + 1
            if self._see(text[found]):
                self.ended = True
                return text[: position if text[found] == "}" else found]
        return text

    def _next(self, text: str, start: int) -> int | None:
        if self._escaped and start < len(text):
            self._escaped = False
            start += 1
        match = _STRUCTURE.search(text, start)
        return match.start() if match else None

    def _see(self, char: str) -> bool:
        """Account for a character of the structure; True at the end, or at a tag that cuts it."""
        if self._quoted:
            self._escaped = char == "\\"
            self._quoted = char != '"'
            return False
        self._quoted = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return char == "<" or (char in "}]" and self._depth == 0)


def _split_block(held: str) -> tuple[str, str]:
    """What a block holds and what follows it; a tag inside the JSON's strings does not end it."""
    with contextlib.suppress(ValueError, RecursionError):
        _, end = _DECODER.raw_decode(held, len(held) - len(held.lstrip()))
        if held[end:].lstrip().startswith(CLOSE):
            start = held.index(CLOSE, end)
            return held[:start], held[start + len(CLOSE) :]
    content, _, after = held.partition(CLOSE)
    return content, after


def _parse(content: str) -> tuple[str, str] | None:
    """The name and the arguments of the call that a block spells, if it does.

    Arguments that come last, as usual, are told as they are written, and whatever follows them is
    dropped, as it is where they are told while they come.
    """
    head = _HEAD.match(content)
    arguments = _Object().take(content[head.end() :]) if head else ""
    if head and _read_object(arguments) is not None:
        return head[1], arguments
    call = _read_object(content) or {}
    name, named = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not isinstance(named, dict):
        return None
    return name, json.dumps(named, ensure_ascii=False)


def _read_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
