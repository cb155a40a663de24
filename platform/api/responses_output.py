"""The items that an answer of OpenAI's Responses API comes to, and the events that tell of them.

An item is a message of one text, or a call of a function. Knows deltas; refuses to know whose
response it is, how its events are numbered, and how bytes are sent.
"""

from collections.abc import Collection, Iterator
from typing import Final

from loraplex.platform.api.chat_form import ranked
from loraplex.platform.api.choice import Delta
from loraplex.platform.api.forms import Json
from loraplex.platform.api.tool_calls import Arguments, Begin, CallReader, Piece, Text
from loraplex.platform.text import Vocabulary

TEXT: Final = "response.output_text"
PART: Final = "response.content_part"
ITEM: Final = "response.output_item"
ARGUMENTS: Final = "response.function_call_arguments"


class Output:
    """One answer while it comes; `items` are those that are done.

    `unique` tells the items' ids from those of other answers; `tools` are the names of those that
    the model may call.
    """

    def __init__(self, unique: str, vocabulary: Vocabulary, tools: Collection[str]) -> None:
        self._unique, self._vocabulary, self._tools = unique, vocabulary, tools
        self._reader = CallReader(tools)
        self._item: Json = {}  # the one that is open, as it was begun
        self._texts: list[str] = []
        self._logprobs: list[Json] = []
        self.items: list[Json] = []
        self.is_cut = False  # by the limit of tokens

    def take(self, delta: Delta) -> Iterator[Json]:
        """The events of what a delta adds; an answer has an item, be it an empty message."""
        logprobs = ranked(self._vocabulary, delta.tokens)
        for piece in self._read(delta):
            yield from self._tell(piece, logprobs)
        if delta.finish:
            if not self._item and not self.items:
                yield from self._begin_message()
            self.is_cut = delta.finish == "length"
            yield from self._close("incomplete" if self.is_cut else "completed")

    def _read(self, delta: Delta) -> list[Piece]:
        if not self._tools:
            return [Text(delta.text)] if delta.text or delta.tokens else []
        return self._reader.push(delta.text) + (self._reader.flush() if delta.finish else [])

    def _tell(self, piece: Piece, logprobs: list[Json]) -> Iterator[Json]:
        """The events of one piece; it may need an item of its own first."""
        if isinstance(piece, Begin):
            yield from self._close("completed")
            yield from self._begin(
                f"fc_{self._unique}",
                {"type": "function_call", "call_id": piece.id, "name": piece.name, "arguments": ""},
            )
            return
        if isinstance(piece, Text) and self._item.get("type") != "message":
            yield from self._close("completed")
            yield from self._begin_message()
        self._texts.append(piece.text)
        if isinstance(piece, Arguments):
            yield {"type": f"{ARGUMENTS}.delta"} | self._place() | {"delta": piece.text}
            return
        self._logprobs += logprobs
        added = {"delta": piece.text, "logprobs": logprobs}
        yield {"type": f"{TEXT}.delta"} | self._place() | {"content_index": 0} | added

    def _begin_message(self) -> Iterator[Json]:
        message = {"type": "message", "role": "assistant", "content": []}
        yield from self._begin(f"msg_{self._unique}", message)
        part = {"content_index": 0, "part": _part("", [])}
        yield {"type": f"{PART}.added"} | self._place() | part

    def _begin(self, name: str, item: Json) -> Iterator[Json]:
        self._texts, self._logprobs = [], []
        index = len(self.items)
        self._item = {"id": f"{name}{index:02}", "status": "in_progress"} | item
        yield {"type": f"{ITEM}.added", "output_index": index, "item": self._item}

    def _close(self, status: str) -> Iterator[Json]:
        """The events of the end of the item that is open, if one is."""
        if not self._item:
            return
        text, place = "".join(self._texts), self._place()
        if self._item["type"] == "message":
            part = _part(text, self._logprobs)
            done = {"content_index": 0, "text": text, "logprobs": self._logprobs}
            yield {"type": f"{TEXT}.done"} | place | done
            yield {"type": f"{PART}.done"} | place | {"content_index": 0, "part": part}
            ending: Json = {"content": [part]}
        else:
            ending = {"arguments": text}
            named = {"name": self._item["name"]}
            yield {"type": f"{ARGUMENTS}.done"} | place | named | ending
        item = self._item | {"status": status} | ending
        yield {"type": f"{ITEM}.done", "output_index": len(self.items), "item": item}
        self.items.append(item)
        self._item = {}

    def _place(self) -> Json:
        return {"item_id": self._item["id"], "output_index": len(self.items)}


def _part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
