"""The engine's door: why a request can never be served, in a sentence its sender can act on.

The platform refuses most of this earlier and in its own words; the engine trusts nobody. Whether a
guide can be followed is found out later, by compiling it.
"""

import math
from collections.abc import Iterable, Iterator

from loraplex.engine.images import ImageError, check_digest
from loraplex.engine.protocol import Generate, Policy, Sampling, composition_digest

MAX_LOGPROBS = 20
MAX_DRAFT_TOKENS = 16
MAX_BEAMS = 64
MAX_PARTS = 16
MAX_GUIDE_BYTES = 256 << 10  # `guidance.STACK` is deep enough for so much

Rules = Iterable[tuple[bool, str]]


def refusal(
    request: Generate, vocab_size: int, max_model_len: int, max_num_seqs: int
) -> str | None:
    """The first reason why `request` can never be served, or None."""
    return next(_reasons(request, vocab_size, max_model_len, max_num_seqs), None)


def _reasons(
    request: Generate, vocab_size: int, max_model_len: int, max_num_seqs: int
) -> Iterator[str]:
    yield from _prompt_reasons(request, vocab_size, max_model_len)
    yield from _image_reasons(request)
    rules = (
        *_sampling_rules(request.sampling, vocab_size),
        *_extra_rules(request.sampling),
        *_choice_rules(request, max_num_seqs),
        *_policy_rules(request.policy),
    )
    yield from (reason for holds, reason in rules if not holds)


def _prompt_reasons(request: Generate, vocab_size: int, max_model_len: int) -> Iterator[str]:
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


def _image_reasons(request: Generate) -> Iterator[str]:
    parts = request.parts
    digests = [] if request.image is None else [request.image]
    for digest in (*digests, *(part.image for part in parts)):
        try:
            check_digest(digest)
        except ImageError as error:
            yield str(error)
    if not parts:
        return
    if len(parts) > MAX_PARTS:
        yield f"a composition has at most {MAX_PARTS} parts"
    if not all(math.isfinite(part.weight) for part in parts):
        yield "the weights of a composition must be finite"
    if request.image != composition_digest(parts):
        yield "the image is not the digest of the composition"


def _sampling_rules(s: Sampling, vocab_size: int) -> Rules:
    return (
        (s.max_tokens >= 1, "max_tokens must be at least 1"),
        (0 <= s.min_tokens <= s.max_tokens, "min_tokens must be between 0 and max_tokens"),
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
    )


def _extra_rules(s: Sampling) -> Rules:
    """Of what comes beside the choice of tokens."""
    guide_bytes = len(s.guide.text.encode()) if s.guide else 0
    return (
        (
            s.logprobs is None or 0 <= s.logprobs <= MAX_LOGPROBS,
            f"logprobs must be between 0 and {MAX_LOGPROBS}",
        ),
        (
            s.prompt_logprobs is None or 0 <= s.prompt_logprobs <= MAX_LOGPROBS,
            f"prompt_logprobs must be between 0 and {MAX_LOGPROBS}",
        ),
        (
            s.draft_tokens is None or 0 <= s.draft_tokens <= MAX_DRAFT_TOKENS,
            f"draft_tokens must be between 0 and {MAX_DRAFT_TOKENS}",
        ),
        (
            guide_bytes <= MAX_GUIDE_BYTES,
            f"the guide has {guide_bytes} bytes; at most {MAX_GUIDE_BYTES} are taken",
        ),
    )


def _choice_rules(request: Generate, max_num_seqs: int) -> Rules:
    s, beams, choices = request.sampling, request.beams, request.choices
    most = min(MAX_BEAMS, max_num_seqs)
    yield (
        1 <= choices <= max_num_seqs,
        f"a request has between 1 and {max_num_seqs} choices, the sequences that run at once",
    )
    if beams is None:
        return
    yield 2 <= beams.width <= most, f"beam search has between 2 and {most} beams"
    yield choices <= beams.width, "beam search cannot return more choices than it has beams"
    yield math.isfinite(beams.length_penalty), "length_penalty must be finite"
    yield s.temperature == 0, "beam search is greedy; its temperature must be 0"
    yield s.guide is None, "beam search does not follow a guide"
    yield not s.draft_tokens, "beam search has no drafts"
    yield s.logprobs is None, "beam search reports no logprobs"


def _policy_rules(policy: Policy) -> Rules:
    return (
        (0 < policy.weight < math.inf, "a policy's weight must be above 0, and finite"),
        (
            policy.max_running is None or policy.max_running >= 1,
            "a policy's max_running must be at least 1",
        ),
        (0 < policy.kv_share <= 1, "a policy's kv_share must be above 0 and at most 1"),
        (
            policy.resident_bytes is None or policy.resident_bytes >= 1,
            "a policy's resident_bytes must be at least 1",
        ),
    )
