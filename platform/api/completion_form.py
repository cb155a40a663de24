"""The JSON of plain completions: `text_completion`, whole and in chunks.

Knows deltas and shapes; refuses to know where deltas come from and how bytes are sent.
"""

from collections.abc import Sequence

from loraplex.engine.protocol import TokenLogprob
from loraplex.platform.api.choice import Delta, ShownToken
from loraplex.platform.api.forms import (
    LEAST_LOGPROB,
    Answered,
    Json,
    OpenAIForm,
    Usage,
    prompt_json,
    text_of,
)


class CompletionForm(OpenAIForm):
    """Writes the answers of one request for completions."""

    kind = "text_completion"

    def opening(self, choices: int) -> bytes:
        """Nothing comes before the text."""
        return b""

    def chunks(self, delta: Delta) -> bytes:
        """One chunk: text, log-probabilities and, on the last one, why it ended."""
        choice = self._choice(delta.index, Answered([delta]))
        return self._events([self._envelope([choice])], delta.total)

    def whole(self, answers: Sequence[Answered], usage: Usage) -> Json:
        """A `text_completion`."""
        choices = [
            self._choice(i, each)
            | prompt_json(self._identity, self._vocabulary, each.prompt_logprobs)
            for i, each in enumerate(answers)
        ]
        return self._envelope(choices) | {"usage": usage.json()}

    def _choice(self, index: int, answer: Answered) -> Json:
        return {
            "index": index,
            "text": answer.text,
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": answer.finish,
        }

    def _logprobs(self, tokens: Sequence[ShownToken]) -> Json | None:
        """By token; those of an echoed prompt's first are null."""
        if self._identity.logprobs is None:
            return None
        known = [token.logprob for token in tokens]
        return {
            "tokens": [text_of(self._vocabulary, token.token_id) for token in tokens],
            "token_logprobs": [each and max(each.logprob, LEAST_LOGPROB) for each in known],
            "top_logprobs": [each and self._top(each, self._identity.logprobs) for each in known],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, token: TokenLogprob, count: int) -> dict[str, float]:
        """The likeliest tokens and the chosen one; where two have one text, the likelier counts."""
        told = [*token.top[:count], (token.token_id, token.logprob)]
        likeliest_last = sorted(told, key=lambda pair: pair[1])
        return {
            text_of(self._vocabulary, token_id): max(logprob, LEAST_LOGPROB)
            for token_id, logprob in likeliest_last
        }
