"""A LoRA configuration, normalised and frozen, with PEFT's meaning of every part of it.

This file knows which linears a configuration adapts, at which rank and scaling. It refuses to know
JSON, where the configuration came from, and tensors.
"""

import math
from dataclasses import dataclass

from loraplex.engine.peft_patterns import Pattern

Names = tuple[str, ...] | Pattern


@dataclass(frozen=True)
class PeftConfig:
    """What `peft.LoraConfig` says of the adapted linears; modules are paths as PEFT sees them."""

    rank: int
    alpha: float
    rslora: bool
    dora: bool
    bias: bool
    targets: Names | None  # None: every linear
    excluded: Names
    layers: frozenset[int] | None  # None: all
    layers_patterns: tuple[str, ...]  # names of the list that `layers` counts; none: any
    ranks: tuple[tuple[Pattern, int], ...]
    alphas: tuple[tuple[Pattern, float], ...]
    invocation: tuple[int, ...]  # token ids that activate the adapter; none: it always is
    base_name: str | None = None  # of the base it was trained on; advice

    def covers(self, module: str, layer: int) -> bool:
        """Whether PEFT adapts this linear; `module` is its path, as `model.layers.0.mlp.up_proj`.

        A listed name selects the modules whose path ends in it. Exclusion wins.
        """
        if selects(self.excluded, module):
            return False
        if self.targets is not None and not selects(self.targets, module):
            return False
        return self.layers is None or (layer in self.layers and self._counts(module))

    def rank_of(self, module: str) -> int:
        """The rank PEFT gives this linear: that of the first pattern that matches, else `r`."""
        return next((rank for p, rank in self.ranks if p.matches_end(module)), self.rank)

    def scaling_of(self, module: str, rank: int) -> float:
        """`alpha / rank`, or `alpha / √rank` (rank-stabilised LoRA, Kalajdzievski 2023)."""
        alpha = next((a for p, a in self.alphas if p.matches_end(module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def _counts(self, module: str) -> bool:
        container = module.split("layers.", 1)[0] + "layers"
        return not self.layers_patterns or any(_ends_in(container, p) for p in self.layers_patterns)


def selects(names: Names, module: str) -> bool:
    """Whether a list of names, or a pattern for whole paths, selects a module."""
    if isinstance(names, Pattern):
        return names.matches_whole(module)
    return any(_ends_in(module, name) for name in names)


def _ends_in(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")
