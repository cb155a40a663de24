"""Log-probabilities of tokens under the model's own distribution, and the likeliest tokens.

Penalties, biases, temperature, limits and masks do not change what is reported here: it is what the
model said. A row's figures depend on its own logits alone, fp32 `[vocabulary]`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex.engine.protocol import TokenLogprob

ROWS = 16  # at once: their logarithms fit the caches that cores share

Pairs = list[tuple[int, float]]


def prompt_logprobs(
    logits: Tensor, token_ids: Sequence[int], count: int
) -> tuple[TokenLogprob, ...]:
    """Of each row of `logits`, `[R, vocabulary]`, that of the token which comes next.

    `token_ids` are those R tokens; `count` says how many of the likeliest are named beside each.
    """
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), ROWS):
        found += _of_rows(logits[start : start + ROWS], token_ids[start : start + ROWS], count)
    return tuple(found)


def tops(logits: Tensor, row: int, count: int) -> Pairs:
    """The `count` likeliest tokens of a row of `logits`, `[W, vocabulary]`, the likeliest first.

    A row that holds NaN or infinity has none.
    """
    if not bool(torch.isfinite(logits[row]).all()):
        return []
    return _likeliest(torch.log_softmax(logits[row : row + 1], dim=-1), count)[0]


def _of_rows(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprob]:
    logprobs = torch.log_softmax(logits, dim=-1)
    columns = torch.tensor(token_ids, device=logits.device)[:, None]
    of_tokens = logprobs.gather(1, columns)[:, 0].tolist()
    pairs = _likeliest(logprobs, count)
    return [
        TokenLogprob(token, value, tuple(top))
        for token, value, top in zip(token_ids, of_tokens, pairs, strict=True)
    ]


def _likeliest(logprobs: Tensor, count: int) -> list[Pairs]:
    top = torch.topk(logprobs, min(count, logprobs.shape[-1]))
    rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [list(zip(tokens, values, strict=True)) for tokens, values in rows]
