"""Whose turn follows a conversation, and what else its template is told: vLLM's three fields.

Knows names and sizes; what a base's template makes of them is its own matter.
"""

import json
import re
from typing import Annotated, Any, Final

from pydantic import Field, field_validator, model_validator

from loraplex.platform.api.strict import Strict
from loraplex.platform.errors import BadRequest
from loraplex.platform.rendering import RESERVED, Rendering

MAX_VARIABLES: Final = 64
MAX_VARIABLE_CHARS: Final = 16_384  # of all of them together, as JSON
VARIABLE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


class Turned(Strict):
    """The fields that say how a conversation becomes a prompt."""

    add_generation_prompt: Annotated[
        bool | None,
        Field(description="False: the prompt ends with the last message. By default it does not."),
    ] = None
    continue_final_message: Annotated[
        bool | None, Field(description="True: the answer goes on with the last message's text.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        Field(
            max_length=MAX_VARIABLES,
            description="Variables for the chat template, such as `enable_thinking`.",
        ),
    ] = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in value or ():
            if name in RESERVED:
                raise ValueError(f"{name} is not for chat_template_kwargs to set")
            if not VARIABLE.fullmatch(name):
                raise ValueError("a variable's name has up to 64 letters, digits and underscores")
        try:
            length = len(json.dumps(value, allow_nan=False))
        except RecursionError:
            raise ValueError("it is too deep") from None
        if length > MAX_VARIABLE_CHARS:
            raise ValueError(f"its JSON has at most {MAX_VARIABLE_CHARS} characters")
        return value

    @model_validator(mode="after")
    def _one_ending(self) -> "Turned":
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "A prompt either continues the final message or begins another; leave out "
                "add_generation_prompt or continue_final_message.",
                param="continue_final_message",
            )
        return self

    @property
    def rendering(self) -> Rendering:
        """The same, as a template is told."""
        continues = bool(self.continue_final_message)
        begins = not continues and self.add_generation_prompt is not False
        return Rendering(begins, continues, self.chat_template_kwargs or {})
