"""What it costs to compute a token and to swap a block, learnt from the steps that ran.

Pure numbers: seconds come from whoever measures. A preempted sequence is swapped to the host when
bringing its blocks there and back is expected to take less time than computing its tokens again.
"""

RECENT = 0.1  # how much the newest measurement counts


class Costs:
    """Running means; before anything is measured the guesses of a small machine hold."""

    def __init__(self, token_s: float = 1e-3, block_s: float = 1e-4) -> None:
        self.token_s, self.block_s = token_s, block_s

    def note_step(self, tokens: int, seconds: float) -> None:
        """A step that was mostly a prompt computed `tokens`."""
        self.token_s += RECENT * (seconds / tokens - self.token_s)

    def note_swap(self, blocks: int, seconds: float) -> None:
        """So many blocks were swapped out or in."""
        self.block_s += RECENT * (seconds / blocks - self.block_s)

    def prefers_swap(self, tokens: int, blocks: int) -> bool:
        """Whether swapping `blocks` out and in takes less than computing `tokens` again."""
        return blocks > 0 and 2 * blocks * self.block_s < tokens * self.token_s
