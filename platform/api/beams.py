"""How many completions a prompt has, and how those that are answered with are chosen.

`n` alone answers with all; `best_of` with the likeliest; beam search with the best of its beams.
What does not go together is refused, not dropped. Refuses to know how beams are searched.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from loraplex.engine.protocol import Beams
from loraplex.platform.api.strict import Strict
from loraplex.platform.errors import BadRequest

MAX_CHOICES: Final = 8
MAX_WIDTH: Final = 20
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {  # beside beam search: what changes nothing
    "temperature": (None, 0),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "stop": (None, []),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "speculative_tokens": (None, 0),
}


class Several(Strict):
    """The fields that say how many completions there are, and of how many they are the best."""

    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    best_of: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_WIDTH,
            description="Completions to choose the n likeliest of; or, in beam search, beams.",
        ),
    ] = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float | None, Field(ge=-10, le=10)] = None
    early_stopping: bool | None = None
    stream: bool | None = None

    @property
    def returned(self) -> int:
        """How many choices each prompt's answer has."""
        return self.n or 1

    @property
    def width(self) -> int:
        """How many completions are run for each prompt."""
        return self.best_of or self.returned

    @property
    def beams(self) -> Beams | None:
        """Beam search, where it was asked for."""
        if not self.use_beam_search:
            return None
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return Beams(self.width, penalty, bool(self.early_stopping))

    def check_width(self, parameters: Mapping[str, Any]) -> None:
        """Raise `BadRequest` for what does not go together; `parameters` are those of `NEUTRAL`."""
        if self.width < self.returned:
            raise BadRequest("best_of must be at least n.", param="best_of")
        if self.stream and self.width > self.returned:
            raise BadRequest(
                "A stream cannot take back what it sent, so it has no best_of above n; leave "
                "stream out.",
                param="best_of",
            )
        if self.use_beam_search:
            self._check_beams(parameters)
            return
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) is not None:
                raise BadRequest(f"{name} needs use_beam_search set to true.", param=name)

    def _check_beams(self, parameters: Mapping[str, Any]) -> None:
        if self.width < 2:
            raise BadRequest(
                "Beam search needs two beams or more; set best_of (or n).", param="use_beam_search"
            )
        if self.stream:
            raise BadRequest("Beam search cannot stream; leave stream out.", param="stream")
        for name, neutral in NEUTRAL.items():
            if parameters[name] not in neutral:
                raise BadRequest(f"Beam search does not go with {name}; leave it out.", param=name)
