"""How a conversation's prompt ends, and what else its template is told.

As a rule a prompt ends where the assistant's turn begins. It may end with the last message instead,
or in the midst of it, so that the model goes on writing it: then a tag is put behind that message's
text, and what the template renders is cut there, as Transformers does. This file refuses to know
templates and requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "  # its last blank tells whether a template trims
SPECIAL_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
RESERVED: Final = frozenset(SPECIAL_TOKENS) | {  # what a template is told by us alone
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "raise_exception",
    "strftime_now",
}

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Rendering:
    """`begins` the assistant's turn, or `continues` the last message, or neither.

    `variables` are what the template finds besides what it always does, none of them `RESERVED`.
    """

    begins: bool = True
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


def mark(messages: Sequence[Message]) -> list[Message]:
    """The messages, with the tag behind the text of the last."""
    *others, last = messages
    return [*others, {**last, "content": last["content"] + TAG}]


def cut(text: str, messages: Sequence[Message]) -> str:
    """What was rendered of marked messages up to the tag, without blanks that were trimmed before.

    `messages` are those that were marked. Raises `ValueError` where the last is not in the text, or
    is there twice.
    """
    kept, tag, rest = text.partition(TAG.strip())
    if not tag or tag in rest or messages[-1]["content"].strip() not in kept:
        raise ValueError("it does not render the last message once and as it is")
    return kept if rest.startswith(" ") else kept.rstrip()
