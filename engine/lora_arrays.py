"""Reads a checked adapter's weights, casts them to the serving dtype and lays them out as an image.

All in NumPy and one linear at a time, so that an upload costs neither Torch's start nor its memory.
This file knows numbers. It refuses to know configurations and names: `peft_format` has checked.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loraplex.engine.base_weights import BaseWeights
from loraplex.engine.float_arrays import Floats, ServedRows, read_floats, serve_rows, widen
from loraplex.engine.image_builder import ImageBuilder, SliceData
from loraplex.engine.images import PROJECTIONS, BaseManifest, ImageDtype
from loraplex.engine.peft_format import LoraModule
from loraplex.engine.reasons import Findings
from loraplex.engine.safetensors_header import Tensor

Doubles = npt.NDArray[np.float64]

NORM_ROWS = 512  # rows of a base weight that are widened to float64 at a time

_TRAIN_AGAIN = "train again with a lower learning rate, and check the weights before saving"


@dataclass(frozen=True)
class _Arrays:
    """One linear's part of its projection's A and scale, and its slice."""

    a: bytes
    scale: bytes
    part: SliceData


class Written(NamedTuple):
    """An image that was written: its digest, and the linears that change nothing."""

    digest: str
    idle: tuple[str, ...]


def write_image(
    modules: list[LoraModule],
    invocation: tuple[int, ...],
    weights: Path,
    base: BaseManifest,
    out: Path,
    dtype: ImageDtype,
    findings: Findings,
) -> Written:
    """Write the image of `modules`, activated by `invocation`, to `out`.

    Raises `Rejected` when the weights are not finite in `dtype`, or change nothing anywhere.
    """
    compiler = _Compiler(weights, base, dtype, findings)
    builder = ImageBuilder(base.fingerprint, dtype, invocation)
    for layer in sorted({m.layer for m in modules}):
        for projection, names in PROJECTIONS.items():
            found = {m.name: m for m in modules if m.layer == layer and m.name in names}
            if found:
                arrays = {name: compiler.arrays(module) for name, module in found.items()}
                _add(builder, base, layer, projection, arrays)
    compiler.check_effect(len(modules))
    findings.raise_if_any()
    return Written(builder.finish(out), tuple(compiler.idle))


def _add(
    builder: ImageBuilder,
    base: BaseManifest,
    layer: int,
    projection: str,
    arrays: dict[str, _Arrays],
) -> None:
    """Add one projection; a linear that the adapter leaves alone is a slice of rank 0."""
    names = PROJECTIONS[projection]
    present = [arrays[name] for name in names if name in arrays]
    builder.add(
        layer,
        projection,
        base.modules[names[0]][0],
        b"".join(x.a for x in present),
        b"".join(x.scale for x in present),
        [
            arrays[name].part if name in arrays else SliceData(0, base.modules[name][1])
            for name in names
        ],
    )


class _Compiler:
    """Turns checked modules into an image's arrays, and notes what is wrong with their numbers."""

    def __init__(
        self, weights: Path, base: BaseManifest, dtype: ImageDtype, findings: Findings
    ) -> None:
        self._weights, self._base, self._dtype, self._findings = weights, base, dtype, findings
        self._base_weights: BaseWeights | None = None
        self.idle: list[str] = []  # linears that change nothing

    def arrays(self, module: LoraModule) -> _Arrays:
        """The module's arrays in the serving dtype; the optional rows are float32."""
        with np.errstate(all="ignore"):  # what comes of it is checked
            return self._arrays(module)

    def _arrays(self, module: LoraModule) -> _Arrays:
        a = self._served(module, "A", self._read(module, "A", module.a))
        b = self._served(module, "B", self._read(module, "B", module.b).T)
        scale = module.scaling * a.scale.astype(np.float64) * b.scale
        self._check_finite(module, "scale", scale.astype("<f4"))
        bias = self._bias(module, module.bias) if module.bias else None
        gain = self._gain(module, module.magnitude, a, b, scale) if module.magnitude else None
        is_idle = not (widen(a.values).any() and widen(b.values).any() and scale.any())
        if is_idle and gain is None and (bias is None or not bias.any()):
            self.idle.append(module.place)
        part = SliceData(
            module.rank,
            b.values.shape[1],
            b.values.tobytes(),
            None if gain is None else gain.tobytes(),
            None if bias is None else bias.tobytes(),
        )
        return _Arrays(a.values.tobytes(), scale.astype("<f4").tobytes(), part)

    def check_effect(self, modules: int) -> None:
        """Warn of linears that leave the base as it is, and refuse an adapter of such alone."""
        cure = "check that it was saved after training"
        if len(self.idle) == modules:
            self._findings.reject("no_effect", "the adapter changes nothing: every B is zero", cure)
            return
        for place in self.idle:
            self._findings.warn("no_effect", f"{place} changes nothing: its B is zero", cure)

    def _served(self, module: LoraModule, part: str, values: Floats) -> ServedRows:
        rows = serve_rows(np.ascontiguousarray(values), self._dtype)
        self._check_finite(module, part, widen(rows.values))
        return rows

    def _bias(self, module: LoraModule, tensor: Tensor) -> Floats:
        """PEFT scales all that comes out of B, its bias too."""
        return self._read(module, "bias", tensor) * np.float32(module.scaling)

    def _gain(
        self, module: LoraModule, tensor: Tensor, a: ServedRows, b: ServedRows, scale: Doubles
    ) -> Floats:
        """DoRA's `m / ‖W + B · scale · A‖` for each output, of the weights as they are served."""
        if self._base_weights is None:
            self._base_weights = BaseWeights(Path(self._base.path))
        weight = self._base_weights.read(module.layer, module.name)
        norms = row_norms(weight, widen(a.values), widen(b.values), scale)
        gain = (self._read(module, "magnitude", tensor) / norms).astype("<f4")
        self._check_finite(module, "magnitude", gain)
        return gain

    def _read(self, module: LoraModule, part: str, tensor: Tensor) -> Floats:
        values = read_floats(self._weights, tensor)
        self._check_finite(module, part, values)
        return values

    def _check_finite(self, module: LoraModule, part: str, values: Floats) -> None:
        if not np.isfinite(values).all():
            detail = f"{part} of {module.place} is not finite in {self._dtype}"
            self._findings.reject("not_finite", detail, _TRAIN_AGAIN)


def row_norms(weight: Floats, a: Floats, b: Floats, scale: Doubles) -> Doubles:
    """`‖W + B · scale · A‖` of each row, `[out]`, summed in float64 so that it rounds one way.

    Shapes: `weight` `[out, in]`, `a` `[rank, in]`, `scale` `[rank]`; `b` is Bᵀ, `[rank, out]`.
    """
    norms = np.empty(len(weight), np.float64)
    wide_a, wide_b = a.astype(np.float64) * scale[:, None], b.T.astype(np.float64, order="C")
    for start in range(0, len(weight), NORM_ROWS):
        rows = slice(start, start + NORM_ROWS)
        merged = weight[rows].astype(np.float64) + wide_b[rows] @ wide_a
        norms[rows] = np.sqrt(np.einsum("oi,oi->o", merged, merged))
    return norms
