"""What is compared: the cases, their names in a result, and prompts that nobody has seen before.

Prefill is 8 prompts of 256 tokens, decode 64 tokens at 1, 8 and 32 rows, both for the base alone
and with adapters of rank 16 on all linears. Knows token ids; refuses to know who runs them.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from bench import FIRST_TOKEN, LAST_TOKEN, Case
from peers.wire import Work

PREFILL_ROWS, PREFILL_PROMPT = 8, 256
DECODE_PROMPT = 16
DECODE_TOKENS, QUICK_TOKENS = 64, 8
ROWS, ADAPTERS = (1, 8, 32), 8
RATIOS = (
    "decode_1_base",
    "decode_1_lora1",
    "decode_8_base",
    "decode_8_lora8",
    "decode_32_base",
    "decode_32_lora8",
    "prefill_base",
    "prefill_lora8",
)
CASES = [
    *(Case("decode", rows, n) for rows in ROWS for n in (0, 1, ADAPTERS) if n <= rows),
    *(Case("prefill", PREFILL_ROWS, n) for n in (0, ADAPTERS)),
]


def key(case: Case) -> str:
    """A case's name in a result, such as `decode_8_lora8` or `prefill_base`."""
    what = f"lora{case.adapters}" if case.adapters else "base"
    return f"prefill_{what}" if case.phase == "prefill" else f"decode_{case.rows}_{what}"


@dataclass(frozen=True)
class Ability:
    """What a peer can do at all."""

    rows: int = max(ROWS)
    adapters: int = ADAPTERS

    def cases(self, only: Iterable[str] = ()) -> list[Case]:
        """The cases that are within it, all or those named."""
        wanted = set(only) or {key(case) for case in CASES}
        return [
            case
            for case in CASES
            if key(case) in wanted and case.rows <= self.rows and case.adapters <= self.adapters
        ]


class Prompts:
    """Makes works whose prompts are all different, so that no cache can help either side."""

    def __init__(self, quick: bool = False) -> None:
        self._random, self._decode_tokens = (
            random.Random(0),
            QUICK_TOKENS if quick else DECODE_TOKENS,
        )

    def work(self, case: Case) -> Work:
        """One run of a case."""
        prefill = case.phase == "prefill"
        length, tokens = (PREFILL_PROMPT, 1) if prefill else (DECODE_PROMPT, self._decode_tokens)
        prompts = tuple(
            tuple(self._random.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(length))
            for _ in range(case.rows)
        )
        return Work(case.phase, case.adapters, tokens, prompts)
