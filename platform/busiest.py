"""Counts by name for the names that matter, in bounded memory: the busiest, and all others as one.

A series that has been shown never goes down, or a monitor would take it for a restart: what a name
had while it was among the others stays there. Which names are shown is decided anew at each look.
Knows numbers; refuses to know what the names are of.
"""

from heapq import nlargest
from typing import Final

Name = tuple[str, ...]
Amounts = tuple[float, ...]
OTHER: Final = "other"
CANDIDATES: Final = 16  # names that are remembered for each that is shown


class Busiest:
    """The `most` names with the greatest weight so far, each with its amounts.

    Weights are kept by the Space-Saving algorithm (Metwally, Agrawal, El Abbadi, ICDT 2005): a new
    name takes the place of the lightest one and inherits its weight, so no heavy one is missed.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._weights: dict[Name, float] = {}
        self._amounts: dict[Name, Amounts] = {}
        self._named: set[Name] = set()
        self._other: Amounts = ()
        self._length = 1

    def add(self, name: Name, weight: float, amounts: Amounts) -> None:
        """Count what was done for a name; `amounts` is of one length for all."""
        self._length = len(name)
        self._weigh(name, weight)
        if len(self._named) < self._most and name in self._weights:
            self._named.add(name)
        if name in self._named:
            self._amounts[name] = _sum(self._amounts.get(name, ()), amounts)
        else:
            self._other = _sum(self._other, amounts)

    def shown(self) -> dict[Name, Amounts]:
        """Amounts of the busiest names, and of "other" where there was any."""
        self._named = {*nlargest(self._most, self._weights, key=self._weights.__getitem__)}
        found = {name: amounts for name, amounts in self._amounts.items() if name in self._named}
        return found | ({(OTHER,) * self._length: self._other} if self._other else {})

    def _weigh(self, name: Name, weight: float) -> None:
        inherited = 0.0
        if name not in self._weights and len(self._weights) >= self._most * CANDIDATES:
            if not self._weights:
                return
            lightest = min(self._weights, key=self._weights.__getitem__)
            inherited = self._weights.pop(lightest)
            self._forget(lightest)
        self._weights[name] = self._weights.get(name, inherited) + weight

    def _forget(self, name: Name) -> None:
        """Put what a name had to the others; it is not shown, or it would not be the lightest."""
        self._named.discard(name)
        self._other = _sum(self._other, self._amounts.pop(name, ()))


def _sum(before: Amounts, more: Amounts) -> Amounts:
    return tuple(map(sum, zip(before, more, strict=True))) if before and more else before or more
