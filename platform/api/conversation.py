"""Which conversation a request belongs to, so that a canary split treats all of it alike.

A client may say; if it does not, the conversation's opening says, because every later request of
it begins with the same words. Knows bodies; refuses to know who asks, and what is split.
"""

import hashlib
from typing import Annotated, Final

from fastapi import Header

from loraplex.platform.api.chat import ChatRequest
from loraplex.platform.api.requests import CompletionRequest, GenerationRequest

HEADER: Final = "x-loraplex-conversation"
FIELD: Final = "conversation_id"  # of `metadata`
OPENING: Final = 256  # characters or token ids of a plain prompt
Conversation = Annotated[
    str | None,
    Header(
        alias=HEADER,
        min_length=1,
        max_length=256,
        description="The conversation's id: all of it takes one side of a canary split. Without "
        "it, `metadata.conversation_id`, `user`, or the conversation's opening says which it is.",
        examples=["conv-2831"],
    ),
]


def conversation_of(body: GenerationRequest, named: str | None) -> str:
    """The conversation's id: the client's own, or a digest of how the conversation opens."""
    given = named or (body.metadata or {}).get(FIELD) or body.user
    if given:
        return f"id:{given}"
    return f"opening:{hashlib.sha256(_opening(body).encode()).hexdigest()}"


def _opening(body: GenerationRequest) -> str:
    if isinstance(body, ChatRequest):
        first = {message.role: message.content for message in reversed(body.messages)}
        return repr((first.get("system"), first.get("user")))
    prompts = body.prompts if isinstance(body, CompletionRequest) else ()
    return repr([prompt[:OPENING] for prompt in prompts])
