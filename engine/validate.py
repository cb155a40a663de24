"""The engine's door: why a request can never be served, in a sentence its sender can act on.

The platform refuses most of this earlier and in its own words; the engine trusts nobody.
"""

import math
from collections.abc import Iterator

from loraplex.engine.images import ImageError, check_digest
from loraplex.engine.protocol import Generate, Sampling

MAX_LOGPROBS = 20


def refusal(request: Generate, vocab_size: int, max_model_len: int) -> str | None:
    """The first reason why `request` can never be served, or None."""
    return next(_reasons(request, vocab_size, max_model_len), None)


def _reasons(request: Generate, vocab_size: int, max_model_len: int) -> Iterator[str]:
    count = len(request.token_ids)
    if count == 0:
        yield "the prompt has no tokens"
    if count >= max_model_len:
        yield (
            f"the prompt has {count} tokens; at most {max_model_len - 1} leave room for a"
            f" completion, for the limit is {max_model_len} together"
        )
    if any(not 0 <= token < vocab_size for token in request.token_ids):
        yield f"a token id of the prompt is outside the vocabulary of {vocab_size}"
    if request.image is not None:
        try:
            check_digest(request.image)
        except ImageError as error:
            yield str(error)
    yield from _sampling_reasons(request.sampling, vocab_size)


def _sampling_reasons(s: Sampling, vocab_size: int) -> Iterator[str]:
    rules = (
        (s.max_tokens >= 1, "max_tokens must be at least 1"),
        (0 <= s.temperature < math.inf, "temperature must be 0 or more, and finite"),
        (0 < s.top_p <= 1, "top_p must be above 0 and at most 1"),
        (s.top_k >= 0, "top_k must be 0 (all) or more"),
        (0 <= s.min_p <= 1, "min_p must be between 0 and 1"),
        (math.isfinite(s.presence_penalty), "presence_penalty must be finite"),
        (math.isfinite(s.frequency_penalty), "frequency_penalty must be finite"),
        (0 < s.repetition_penalty < math.inf, "repetition_penalty must be above 0, and finite"),
        (all(math.isfinite(bias) for _, bias in s.logit_bias), "logit_bias must be finite"),
        (
            all(0 <= token < vocab_size for token, _ in s.logit_bias),
            f"logit_bias names a token outside the vocabulary of {vocab_size}",
        ),
        (
            s.logprobs is None or 0 <= s.logprobs <= MAX_LOGPROBS,
            f"logprobs must be between 0 and {MAX_LOGPROBS}",
        ),
    )
    return (reason for holds, reason in rules if not holds)
