"""Prompt lookup: guesses the tokens that come next from what followed the same tokens before.

After Saxena, "Prompt Lookup Decoding" (2023), and Yang et al., "Inference with Reference" (2023).
A guess costs no model; whoever verifies it decides what it was worth.

This file knows the tokens of one sequence; it refuses to know models, prompts and budgets.
"""

from collections.abc import Sequence


class Lookup:
    """Finds the latest earlier occurrence of a sequence's last tokens, in time free of its length.

    Of the last n tokens, n is `longest` at first and `shortest` at last. Each token is indexed
    once, which takes one entry for each of the sizes: about 400 bytes in all.
    """

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram: where what followed it last begins
        self._indexed = 0  # leading tokens that are indexed, each as one that follows

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """The `most` tokens after the occurrence, or none when there is no occurrence.

        An occurrence with fewer tokens after it is taken for a period, which goes on. Between calls
        the tokens may only have grown at their end.
        """
        self._index(token_ids)
        for size in self._sizes:
            place = self._follows.get(tuple(token_ids[-size:]))
            if place is not None:
                period = len(token_ids) - place
                return [token_ids[place + i % period] for i in range(most)]
        return []

    def _index(self, token_ids: Sequence[int]) -> None:
        for place in range(self._indexed, len(token_ids)):
            for size in self._sizes:
                if size <= place:
                    self._follows[tuple(token_ids[place - size : place])] = place
        self._indexed = len(token_ids)
