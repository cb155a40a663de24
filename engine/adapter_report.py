"""What the compiler says of an adapter that it took: plain values, as they stand in its JSON.

This file knows how a configuration, matched tensors and a base become words and counts. It refuses
to know weights, and so needs no NumPy.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from loraplex.engine.images import BaseManifest, ImageDtype
from loraplex.engine.peft_config import PeftConfig
from loraplex.engine.peft_format import LoraModule
from loraplex.engine.reasons import Findings, Reason, shown
from loraplex.engine.safetensors_header import Tensor

MAX_NAME = 256


class Coverage(msgspec.Struct, frozen=True):
    """In how many layers of those there are a linear is adapted, and at which ranks."""

    layers: int
    of: int
    rank_min: int = 0
    rank_max: int = 0


class BaseMatch(msgspec.Struct, frozen=True):
    """The base that the image is for, and the one that the configuration names.

    `matches` is None where it names none. Names are advice: shapes are what is checked.
    """

    name: str
    fingerprint: str
    asked: str | None
    matches: bool | None


class Range(msgspec.Struct, frozen=True):
    """The least and the largest of some numbers."""

    min: float
    max: float


class Dtypes(msgspec.Struct, frozen=True):
    """Number formats of the checkpoint's tensors, and of the image."""

    source: tuple[str, ...]
    image: ImageDtype


class Parity(msgspec.Struct, frozen=True):
    """How far what the written image adds is from what the checkpoint adds, on random inputs.

    `max_error` is the largest `‖found - wanted‖ / ‖wanted‖` of a linear, that of `worst`.
    `of_bound` is the largest share that an output's error had of what rounding can explain.
    """

    probes: int
    modules: int
    max_error: float
    worst: str
    of_bound: float


class Norms(msgspec.Struct, frozen=True):
    """Frobenius norms of `scaling · B A` over the layers that have a linear."""

    mean: float
    max: float
    layer: int  # that of the largest


class Report(msgspec.Struct, frozen=True):
    """What was compiled; `modules` counts the layers in which each linear is adapted."""

    digest: str
    bytes: int
    rank: int  # the largest
    modules: dict[str, int]
    dora: bool
    rslora: bool
    parameters: int
    source_bytes: int
    coverage: dict[str, Coverage]
    base: BaseMatch
    scaling: Range
    dtype: Dtypes
    parity: Parity
    norms: dict[str, Norms]
    zero_modules: tuple[str, ...] = ()  # linears that change nothing
    invocation: tuple[int, ...] = ()  # of an activated adapter
    warnings: tuple[Reason, ...] = ()
    seconds: dict[str, float] = {}  # of each stage
    sandbox: tuple[str, ...] = ()  # what bound the process; none where it was not confined


def coverage(modules: Iterable[LoraModule], base: BaseManifest) -> dict[str, Coverage]:
    """Of each linear of the base, those that the adapter leaves alone among them."""
    ranks: dict[str, list[int]] = {name: [] for name in base.modules}
    for module in modules:
        ranks[module.name].append(module.rank)
    return {
        name: Coverage(len(found), base.num_layers, min(found, default=0), max(found, default=0))
        for name, found in ranks.items()
    }


def match_base(config: PeftConfig, base: BaseManifest, findings: Findings) -> BaseMatch:
    """Compare the names of bases by what follows the last slash; warn where they differ."""
    asked = config.base_name
    if asked is None:
        return BaseMatch(base.name, base.fingerprint, None, None)
    matches = _tail(asked) in (_tail(base.name), _tail(base.path))
    if not matches:
        detail = f"adapter_config.json names the base {shown(asked)}, and this one is {base.name}"
        cure = "its shapes fit; if it was trained on another model, its answers will be poor"
        findings.warn("base_differs", detail, cure)
    return BaseMatch(base.name, base.fingerprint, asked[:MAX_NAME], matches)


def scaling(modules: Iterable[LoraModule]) -> Range:
    """The factors of `B A`, by their size."""
    sizes = [abs(module.scaling) for module in modules]
    return Range(min(sizes), max(sizes))


def source_dtypes(modules: Iterable[LoraModule]) -> tuple[str, ...]:
    """The formats in which the checkpoint stores its tensors."""
    return tuple(sorted({tensor.dtype for module in modules for tensor in _tensors(module)}))


def parameters(modules: Iterable[LoraModule]) -> int:
    """Numbers that the adapter holds."""
    return sum(math.prod(tensor.shape) for module in modules for tensor in _tensors(module))


def summarise(norms: Iterable[tuple[str, int, float]]) -> dict[str, Norms]:
    """Norms of each linear, given as its name, layer and norm."""
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for name, layer, norm in norms:
        found[name].append((norm, layer))
    return {
        name: Norms(sum(norm for norm, _ in each) / len(each), *max(each))
        for name, each in found.items()
    }


def _tensors(module: LoraModule) -> list[Tensor]:
    parts = (module.a, module.b, module.bias, module.magnitude)
    return [part for part in parts if part is not None]


def _tail(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].casefold()
