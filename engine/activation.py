"""Where an activated adapter begins in a prompt (aLoRA, Greenewald et al. 2025).

Tokens before that run on the bare base, so their KV is the base's own and all such adapters share
it. This file knows token ids; it refuses to know images and blocks.
"""

from collections.abc import Sequence


def activation(prompt: Sequence[int], invocation: tuple[int, ...]) -> int | None:
    """The position of the prompt's first token that runs under the adapter; None for none of them.

    As in PEFT, that is where the invocation occurs last; where it does not occur, the adapter stays
    off, also for what is generated. An adapter without an invocation is on from the first token.
    """
    if not invocation:
        return 0
    first, length = invocation[0], len(invocation)
    for start in range(len(prompt) - length, -1, -1):
        if prompt[start] == first and tuple(prompt[start : start + length]) == invocation:
            return start
    return None
