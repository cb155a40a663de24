"""Whether an image adds what its checkpoint adds: every linear is probed once the file is written.

The checkpoint's tensors go through PEFT's own formula in float64, the image's bytes, read back from
the file, through that of `images.py`; both see the same inputs. What may differ is rounding, and
how much of it each output can have is known from the tensors (an error analysis by components, as
in Higham, "Accuracy and Stability of Numerical Algorithms", 2002, chapter 3): anything beyond is a
fault of ours, and no such image may be published.

DoRA's gain needs the base, of which some rows are read of each linear.

This file knows numbers and both formats. It refuses to know how one is made into the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loraplex.engine.adapter_report import Norms, Parity, summarise
from loraplex.engine.base_weights import BaseWeights
from loraplex.engine.float_arrays import INT8_MAX, read_floats, widen
from loraplex.engine.images import (
    PROJECTIONS,
    BaseManifest,
    Entry,
    ImageDtype,
    ImageError,
    read_image,
)
from loraplex.engine.peft_format import LoraModule
from loraplex.engine.reasons import Findings, Rejected
from loraplex.engine.safetensors_header import Tensor

Doubles = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

PROBES, SEED = 4, 0x10A
ROWS = 256  # outputs of a linear, from first to last, whose DoRA gain is probed
HALF_STEP_BF16 = 2.0**-8  # relative, of rounding to nearest
FLOAT32 = 2.0**-22  # relative, of a few roundings to float32
FLOAT64 = 2.0**-48
SMALLEST_BF16 = 2.0**-134  # absolute, of numbers below the normal ones
SMALLEST = 2e-43  # the same of float32, and of its products with steps of int8
UNBOUNDED = 1e200  # rounding may turn the row of weights around
_STORED = {"bf16": "<u2", "fp32": "<f4", "int8": "i1"}
_OURS = "this is a fault of the server, not of the adapter: tell its operator"


@dataclass(frozen=True)
class _Delta:
    """One side's part in a linear: `y = gain · (W x + scale · (x Aᵀ) Bᵀ) + bias`."""

    a: Doubles  # [rank, in]
    b: Doubles  # [out, rank]
    scale: Doubles  # [rank]
    bias: Doubles  # [out], or a zero
    gain: Doubles | None = None  # [out]

    def of(self, x: Doubles) -> Doubles:
        """`scale · (x Aᵀ) Bᵀ`, `[probes, out]`."""
        product: Doubles = (self.scale * (x @ self.a.T)) @ self.b.T
        return product

    def sizes(self, x: Doubles) -> Doubles:
        """The same of all numbers' absolute values."""
        product: Doubles = (abs(self.scale) * (abs(x) @ abs(self.a).T)) @ abs(self.b).T
        return product

    def only(self, rows: Rows) -> "_Delta":
        """The same of some outputs."""
        bias = self.bias[rows] if len(self.bias) > 1 else self.bias
        gain = None if self.gain is None else self.gain[rows]
        return _Delta(self.a, self.b[rows], self.scale, bias, gain)

    @property
    def norm(self) -> float:
        """`‖B · scale · A‖`, from products of rank by rank."""
        b = self.b * self.scale
        return float(np.sqrt(max(0.0, float(np.sum((b.T @ b) * (self.a @ self.a.T))))))


@dataclass(frozen=True)
class _Probed:
    """What one linear showed."""

    module: LoraModule
    norm: float
    error: float
    of_bound: float


def check_parity(
    modules: list[LoraModule],
    weights: Path,
    image: Path,
    digest: str,
    base: BaseManifest,
    findings: Findings,
) -> tuple[Parity, dict[str, Norms]]:
    """Compare `image` with the tensors in `weights`, and tell the norms of what they add.

    Raises `Rejected` with "parity_failed" when a linear is off by more than rounding, or the file
    is not what `digest` names.
    """
    try:
        probed = list(_Probe(weights, image, digest, base).all(modules))
    except ImageError as error:
        findings.reject("parity_failed", f"the image cannot be read back: {error}", _OURS)
        raise Rejected(findings.reasons) from error
    for each in probed:
        if each.of_bound > 1:
            detail = (
                f"what the image adds in {each.module.place} is {each.of_bound:.3g} times as far"
                " from the checkpoint as rounding explains"
            )
            findings.reject("parity_failed", detail, _OURS)
    findings.raise_if_any()
    worst = max(probed, key=lambda each: each.error)
    parity = Parity(
        probes=PROBES,
        modules=len(probed),
        max_error=worst.error,
        worst=worst.module.place,
        of_bound=max(each.of_bound for each in probed),
    )
    return parity, summarise((p.module.name, p.module.layer, p.norm) for p in probed)


class _Probe:
    """Reads both sides of each linear and compares them."""

    def __init__(self, weights: Path, image: Path, digest: str, base: BaseManifest) -> None:
        self._weights, self._base = weights, base
        header, self._block = read_image(image, digest)
        self._dtype: ImageDtype = header.dtype
        self._entries = {(e.layer, e.projection): e for e in header.entries}
        self._base_weights: BaseWeights | None = None
        random = np.random.default_rng(SEED)
        sizes = sorted({size for size, _ in base.modules.values()})
        self._inputs = {size: random.standard_normal((PROBES, size)) for size in sizes}

    def all(self, modules: list[LoraModule]) -> Iterator[_Probed]:
        """Probe one linear after the other."""
        for module in modules:
            wanted, found = self._source(module), self._written(module)
            x = self._inputs[wanted.a.shape[1]]
            if found is None:  # it is not in the image
                yield _Probed(module, wanted.norm, 1.0, float("inf"))
                continue
            yield self._compare(module, wanted, found, x)

    def _compare(self, module: LoraModule, wanted: _Delta, found: _Delta, x: Doubles) -> _Probed:
        steps = _steps(wanted.a, self._dtype, 1), _steps(wanted.b, self._dtype, 0)
        ours, theirs = found.of(x), wanted.of(x)
        shares = [
            _share(ours, theirs, _rounding(wanted, found, *steps, x)),
            _share(found.bias, wanted.bias, FLOAT32 * abs(wanted.bias) + SMALLEST),
            float("inf") if (found.gain is None) != (module.magnitude is None) else 0.0,
        ]
        if module.magnitude is not None and found.gain is not None:
            ours, theirs, bound = self._scaled(module, module.magnitude, wanted, found, *steps, x)
            shares.append(_share(ours, theirs, bound))
        off = float(np.linalg.norm(ours - theirs)) + float(np.linalg.norm(found.bias - wanted.bias))
        size = float(np.linalg.norm(theirs)) + float(np.linalg.norm(wanted.bias))
        return _Probed(module, wanted.norm, off / size if size else off, max(shares))

    def _scaled(
        self,
        module: LoraModule,
        magnitude: Tensor,
        wanted: _Delta,
        found: _Delta,
        step_a: Doubles,
        step_b: Doubles,
        x: Doubles,
    ) -> tuple[Doubles, Doubles, Doubles]:
        """What both sides add with DoRA's gain in some outputs, and how far off it may be."""
        rows = np.unique(np.linspace(0, len(wanted.b) - 1, ROWS).astype(int))
        wanted, found, step_b = wanted.only(rows), found.only(rows), step_b[rows]
        weight = self._base_rows(module, rows)
        plain, ours, theirs = x @ weight.T, found.of(x), wanted.of(x)
        norms, spread = _row_norms(weight, wanted, step_a, step_b)
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = read_floats(self._weights, magnitude)[rows] / norms
        have, whole = np.asarray(found.gain), abs(plain + theirs)
        bound = abs(have) * _rounding(wanted, found, step_a, step_b, x)
        bound += abs(gain) * spread * whole + SMALLEST * (1 + whole) + FLOAT64 * abs(plain)
        return have * (plain + ours) - plain, gain * (plain + theirs) - plain, bound

    def _source(self, module: LoraModule) -> _Delta:
        a, b = (read_floats(self._weights, part) for part in (module.a, module.b))
        bias = np.zeros(1)
        if module.bias is not None:
            bias = module.scaling * read_floats(self._weights, module.bias).astype(np.float64)
        scale = np.full(module.rank, module.scaling, np.float64)
        return _Delta(a.astype(np.float64), b.astype(np.float64), scale, bias)

    def _written(self, module: LoraModule) -> _Delta | None:
        projection = next(p for p, names in PROJECTIONS.items() if module.name in names)
        entry = self._entries.get((module.layer, projection))
        at = PROJECTIONS[projection].index(module.name)
        if entry is None or entry.slices[at].rank != module.rank:
            return None
        return self._slice(entry, at)

    def _slice(self, entry: Entry, at: int) -> _Delta:
        part, ranks = entry.slices[at], [each.rank for each in entry.slices]
        rows = slice(sum(ranks[:at]), sum(ranks[: at + 1]))
        stored, out = _STORED[self._dtype], part.out_features
        a = self._array(entry.a, stored, sum(ranks), entry.in_features)[rows]
        scale = self._array(entry.scale, "<f4", sum(ranks))[rows]
        b = self._array(part.b, stored, part.rank, out).T
        bias = self._array(part.bias, "<f4", out) if part.bias >= 0 else np.zeros(1)
        gain = self._array(part.gain, "<f4", out) if part.gain >= 0 else None
        return _Delta(a, b, scale, bias, gain)

    def _array(self, offset: int, dtype: str, *shape: int) -> Doubles:
        count = int(np.prod(shape))
        stored = np.frombuffer(self._block, dtype, count, offset).reshape(shape)
        return widen(stored).astype(np.float64)

    def _base_rows(self, module: LoraModule, rows: Rows) -> Doubles:
        if self._base_weights is None:
            self._base_weights = BaseWeights(Path(self._base.path))
        return self._base_weights.rows(module.layer, module.name, rows).astype(np.float64)


def _row_norms(
    weight: Doubles, wanted: _Delta, step_a: Doubles, step_b: Doubles
) -> tuple[Doubles, Doubles]:
    """DoRA's `‖W + scaling · B A‖` of each row, and by how much of it rounding may move a gain.

    The image's gain is for the norm of its own, rounded A and B.
    """
    norms = np.linalg.norm(weight + (wanted.b * wanted.scale) @ wanted.a, axis=1)
    moved_a, length_a = np.linalg.norm(step_a, axis=1), np.linalg.norm(wanted.a, axis=1)
    scale = abs(wanted.scale)
    moved = (step_b * scale) @ length_a + ((abs(wanted.b) + step_b) * scale) @ moved_a
    left = norms - moved
    with np.errstate(divide="ignore", invalid="ignore"):
        return norms, np.where(left > 0, moved / left, UNBOUNDED) + FLOAT32


def _share(ours: Doubles, theirs: Doubles, bound: Doubles) -> float:
    """The largest part of its bound that an output is off by."""
    off = abs(ours - theirs)
    return float(np.divide(off, bound, out=np.full_like(off, np.inf), where=bound > 0).max())


def _steps(values: Doubles, dtype: ImageDtype, axis: int) -> Doubles:
    """By how much each number may be off as stored in `dtype`; int8 has a scale along `axis`."""
    if dtype == "fp32":
        return np.full_like(values, SMALLEST)
    if dtype == "bf16":
        return abs(values) * HALF_STEP_BF16 + SMALLEST_BF16
    largest = abs(values).max(axis=axis, keepdims=True)
    steps: Doubles = np.broadcast_to(largest / (2 * INT8_MAX) * (1 + FLOAT32), values.shape)
    return steps + SMALLEST


def _rounding(
    wanted: _Delta, found: _Delta, step_a: Doubles, step_b: Doubles, x: Doubles
) -> Doubles:
    """The most by which each output may be off, `[probes, out]`."""
    scale, size_x = abs(wanted.scale), abs(x)
    size, moved = scale * (size_x @ abs(wanted.a).T), scale * (size_x @ step_a.T)
    products = (size + moved) @ step_b.T + moved @ abs(wanted.b).T
    factors = FLOAT32 * wanted.sizes(x)
    tiny = SMALLEST * (1 + (size_x @ abs(found.a).T) @ abs(found.b).T)
    bound: Doubles = products + factors + tiny
    return bound
