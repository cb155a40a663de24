"""The probe that compares a written image with its checkpoint: what passes, and what it catches."""

import runpy
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine import lora_arrays
from loraplex.engine.adapter_report import Parity
from loraplex.engine.compile_adapter import compile_adapter
from loraplex.engine.float_arrays import ServedRows, serve_rows
from loraplex.engine.image_builder import ImageBuilder, SliceData
from loraplex.engine.images import ImageDtype
from loraplex.engine.reasons import Rejected

KIT = runpy.run_path(str(Path(__file__).with_name("adapter_kit.py")))
BASE, CONFIG, SIZES, tensors, write = itemgetter("BASE", "CONFIG", "SIZES", "tensors", "write")(KIT)
DTYPES: tuple[ImageDtype, ...] = ("bf16", "fp32", "int8")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj")


def of(source: Path, config: dict[str, Any], weights: dict[str, Any], dtype: ImageDtype) -> Parity:
    write(source, config, weights)
    return compile_adapter(source, BASE, source / "image", dtype).parity


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 2**-7), ("fp32", 2**-22), ("int8", 0.05)])
def test_an_image_is_as_near_as_its_dtype_allows(
    dtype: ImageDtype, most: float, tmp_path: Path
) -> None:
    parity = of(tmp_path / "one", CONFIG | {"target_modules": ALL}, tensors(2, ALL), dtype)
    assert (parity.probes, parity.modules) == (4, 8)
    assert parity.max_error < most
    assert (parity.max_error > 0) == (0 < parity.of_bound <= 1) == (dtype != "fp32")
    again = of(tmp_path / "two", CONFIG | {"target_modules": ALL}, tensors(2, ALL), dtype)
    assert again == parity, "the inputs are the same each time"


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(
    dtype=st.sampled_from(DTYPES),
    stored=st.sampled_from([np.float16, np.float32]),
    rank=st.integers(1, 3),
    alpha=st.floats(1e-30, 1e25) | st.floats(-1e25, -1e-30),
    scale=st.sampled_from([1e-38, 1e-20, 1e-3, 1.0, 1e4]),
    special=st.lists(numbers, max_size=4),
    rslora=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_rounding_never_looks_like_a_fault(
    dtype: ImageDtype,
    stored: type,
    rank: int,
    alpha: float,
    scale: float,
    special: list[float],
    rslora: bool,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Whatever the weights are: spread over all magnitudes, tiny, zero, huge."""
    random = np.random.default_rng(seed)
    weights = {n: t * scale for n, t in tensors(rank).items()}
    for value in special:
        chosen = sorted(weights)[random.integers(len(weights))]
        weights[chosen].flat[random.integers(weights[chosen].size)] = value
    with np.errstate(over="ignore", under="ignore"):
        weights = {n: t.astype(stored) for n, t in weights.items()}
    config = CONFIG | {"r": rank, "lora_alpha": alpha, "use_rslora": rslora}
    source = write(tmp_path_factory.mktemp("adapter"), config, weights)
    try:
        report = compile_adapter(source, BASE, source / "image", dtype)
    except Rejected as rejected:
        assert {r.code for r in rejected.reasons} <= {"not_finite", "no_effect"}, rejected
    else:
        assert report.parity.of_bound <= 1


def spoiled_rows(values: Any, dtype: ImageDtype) -> ServedRows:
    """Rounds towards zero and not to the nearest: half a step more than there may be."""
    rows = serve_rows(values, dtype)
    return ServedRows(values.view("<u4").__rshift__(16).astype("<u2"), rows.scale)


def swapped(add: Callable[..., None]) -> Callable[..., None]:
    def spoil(
        self: ImageBuilder,
        layer: int,
        projection: str,
        size: int,
        a: bytes,
        scale: bytes,
        slices: list[SliceData],
    ) -> None:
        row = len(a) // (len(scale) // 4)
        add(self, layer, projection, size, a[row:] + a[:row], scale, slices)

    return spoil


def unscaled(add: Callable[..., None]) -> Callable[..., None]:
    def spoil(self: ImageBuilder, *where: Any) -> None:
        layer, projection, size, a, scale, slices = where
        ones = np.ones(len(scale) // 4, "<f4").tobytes()
        add(self, layer, projection, size, a, ones, slices)

    return spoil


def biased(add: Callable[..., None]) -> Callable[..., None]:
    def spoil(self: ImageBuilder, *where: Any) -> None:
        *head, slices = where
        row = np.full(8, 1e-3, "<f4").tobytes()
        add(self, *head, [SliceData(s.rank, 8, s.b, None, row) if i == 0 else s
                          for i, s in enumerate(slices)])  # fmt: skip

    return spoil


def gained(add: Callable[..., None]) -> Callable[..., None]:
    def spoil(self: ImageBuilder, *where: Any) -> None:
        *head, slices = where
        row = np.ones(8, "<f4").tobytes()
        add(self, *head, [SliceData(s.rank, 8, s.b, row, None) if i == 0 else s
                          for i, s in enumerate(slices)])  # fmt: skip

    return spoil


def left_out(add: Callable[..., None]) -> Callable[..., None]:
    def spoil(self: ImageBuilder, layer: int, *where: Any) -> None:
        if layer == 0:
            add(self, layer, *where)

    return spoil


@pytest.mark.parametrize("fault", [swapped, unscaled, biased, gained, left_out])
def test_a_fault_of_the_compiler_is_not_published(
    fault: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageBuilder, "add", fault(ImageBuilder.add))
    source = write(tmp_path / "adapter", CONFIG, tensors())
    with pytest.raises(Rejected) as rejected:
        compile_adapter(source, BASE, tmp_path / "image")
    (reason,) = rejected.value.reasons
    assert reason.code == "parity_failed"
    assert "a fault of the server" in reason.message
    assert not list(tmp_path.glob("image*"))


def test_a_wrong_rounding_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of one sign, so that nothing hides it: each product is off by nearly two steps."""
    monkeypatch.setattr(lora_arrays, "serve_rows", spoiled_rows)
    off = {n: np.full_like(t, np.float32(1 + 2**-7 - 2**-16)) for n, t in tensors().items()}
    source = write(tmp_path / "adapter", CONFIG, off)
    with pytest.raises(Rejected, match="parity_failed"):
        compile_adapter(source, BASE, tmp_path / "image")


def test_what_is_probed_is_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not what was written is no image, whatever it holds."""
    finish = ImageBuilder.finish

    def torn(self: ImageBuilder, path: Path) -> str:
        digest = finish(self, path)
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        return digest

    monkeypatch.setattr(ImageBuilder, "finish", torn)
    source = write(tmp_path / "adapter", CONFIG, tensors())
    with pytest.raises(Rejected) as rejected:
        compile_adapter(source, BASE, tmp_path / "image")
    assert [r.code for r in rejected.value.reasons] == ["parity_failed"]
    assert not list(tmp_path.glob("image*"))


def test_dora_rows_are_probed_against_the_base(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    weights = {
        f"model.layers.{layer}.self_attn.{name}.weight": random.normal(size=SIZES[name][::-1])
        for layer in range(BASE.num_layers)
        for name in SIZES
    }
    base = tmp_path / "base"
    base.mkdir()
    weights = {n: t.astype(np.float32) for n, t in weights.items()}
    safetensors.numpy.save_file(weights, base / "model.safetensors")
    manifest = msgspec.structs.replace(BASE, path=str(base))
    trained = tensors()
    for name in list(trained):
        if "lora_B" in name:
            key = name.replace("lora_B.weight", "lora_magnitude_vector")
            trained[key] = random.normal(size=len(trained[name])).astype(np.float32)
            trained[key][:3] = 0, 1e-30, 1e-44  # rows that are left with nothing of the base
    source = write(tmp_path / "adapter", CONFIG | {"use_dora": True}, trained)
    for dtype in DTYPES:
        report = compile_adapter(source, manifest, tmp_path / "image", dtype)
        assert report.dora
        assert report.parity.of_bound <= 1
    with pytest.MonkeyPatch.context() as patch:
        row_norms = lora_arrays.row_norms
        patch.setattr(lora_arrays, "row_norms", lambda w, *rest: row_norms(w + 0.1, *rest))
        with pytest.raises(Rejected, match="parity_failed"):
            compile_adapter(source, manifest, tmp_path / "other", "fp32")
