"""The turns of a conversation as Anthropic writes them: text, calls of tools, and their results.

Checks blocks and says each turn in OpenAI's words, which is what templates are given. Refuses to
know what else is in a body.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from loraplex.platform.api.or_text import OrText
from loraplex.platform.api.strict import Strict
from loraplex.platform.api.tools import ToolName

MAX_BLOCKS = 1_024
CallId = Annotated[str, Field(min_length=1, max_length=256)]
Said = dict[str, Any]  # a message in OpenAI's words
OrBlocks = OrText(lambda text: [{"type": "text", "text": text}])


class CacheControl(Strict):
    """Changes nothing: every prefix is cached, for as long as there is room for it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Strict):
    """What every block may have."""

    cache_control: CacheControl | None = None


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any] | None, Field(max_length=0)] = None


class DirectCaller(Strict):
    """The model itself called, as it always does here."""

    type: Literal["direct"]


class ToolUseBlock(Block):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: dict[str, Any]
    caller: DirectCaller | None = None

    def said(self) -> Said:
        """The call in OpenAI's words."""
        function = {"name": self.name, "arguments": json.dumps(self.input, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


class ToolResultBlock(Block):
    """What a call came to."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS), OrBlocks] = Field(
        default=[], description="Text, or blocks of text."
    )
    is_error: Annotated[bool | None, Field(description="True: told as an error.")] = None

    def said(self) -> Said:
        """The result in OpenAI's words, which have none for an error."""
        text = text_of(self.content)
        content = f"Error: {text}" if self.is_error else text
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


Blocks = Annotated[
    list[Annotated[TextBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]],
    Field(max_length=MAX_BLOCKS),
    OrBlocks,
]


class Turn(Strict):
    """One turn: the assistant calls tools, the user answers with results, all may say text."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _fits_its_role(self) -> "Turn":
        kinds = {block.type for block in self.content}
        if "tool_use" in kinds and self.role != "assistant":
            raise ValueError("only the assistant's turns have blocks of type tool_use")
        if "tool_result" in kinds and self.role != "user":
            raise ValueError("only the user's turns have blocks of type tool_result")
        if not kinds and self.role != "assistant":
            raise ValueError("content must have a block")
        return self

    def said(self) -> Iterator[Said]:
        """The turn in OpenAI's words: a result is a message of its own."""
        if self.role == "assistant":
            calls = [block.said() for block in self.content if isinstance(block, ToolUseBlock)]
            said: Said = {"role": "assistant", "content": text_of(self.content)}
            yield said | ({"tool_calls": calls} if calls else {})
            return
        for is_result, blocks in groupby(self.content, key=lambda b: b.type == "tool_result"):
            if is_result:
                yield from (b.said() for b in blocks if isinstance(b, ToolResultBlock))
            else:
                yield {"role": self.role, "content": text_of(list(blocks))}


def text_of(blocks: list[Any]) -> str:
    """The text of the blocks that have one, joined by line breaks."""
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
