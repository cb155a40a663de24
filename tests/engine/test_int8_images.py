"""int8 images: how far they are from what was trained, and that they run as they are."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from loraplex.engine.compile_adapter import compile_adapter
from loraplex.engine.float_arrays import serve_rows
from loraplex.engine.image_builder import ImageBuilder, SliceData
from loraplex.engine.images import BaseManifest, Entry, ImageError, ImageHeader, Slice, read_image
from loraplex.engine.model.adapter import read_adapter
from loraplex.kernels.sgmv import sgmv_

ADAPTERS = Path(__file__).resolve().parents[2] / "examples" / "adapters"
WORST, MEAN = 0.2, 0.02  # of logits: how far an int8 demo adapter may be from its bf16 image
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
PROMPT = [int(token) for token in np.random.default_rng(0).integers(100, 4000, 40)]


@given(arrays.arrays(np.float32, (3, 7), elements=FINITE))
def test_a_number_is_off_by_half_a_step_at_most(values: np.ndarray) -> None:
    rows = serve_rows(values, "int8")
    assert rows.values.dtype == np.int8 and rows.scale.dtype == np.float32
    largest = np.abs(values).max(axis=1).astype(np.float64)
    found = rows.values * rows.scale[:, None].astype(np.float64)
    assert (np.abs(found - values) <= largest[:, None] / 253 + 1e-42).all()
    assert (np.abs(rows.values).max(axis=1)[largest > 1e-36] == 127).all()
    assert np.array_equal(serve_rows(-values, "int8").values, -rows.values)


def test_a_row_of_zeros_has_scale_0() -> None:
    rows = serve_rows(np.array([[0, 0], [1, -2]], np.float32), "int8")
    assert rows.scale.tolist() == [0, np.float32(2 / 127)]
    assert rows.values.tolist() == [[0, 0], [64, -127]]


def image(path: Path, dtype: str, a: np.ndarray, b: np.ndarray, scale: np.ndarray) -> Any:
    """The adapter of `o` of layer 0, resident as the torch executor holds it."""
    kind = {"int8": np.int8, "fp32": np.float32}[dtype]
    builder = ImageBuilder("f" * 64, dtype)
    part = SliceData(len(a), b.shape[1], b.astype(kind).tobytes())
    builder.add(0, "o", a.shape[1], a.astype(kind).tobytes(), scale.tobytes(), [part])
    header, block = read_image(path, builder.finish(path))
    assert header.dtype == dtype
    return read_adapter(header, block, tiny_config(a.shape[1]))[0, "o"]


def tiny_config(hidden: int) -> Any:
    class Config:
        num_layers, hidden_size, intermediate_size = 1, hidden, 8
        query_size, kv_size = hidden, 8

    return Config


def test_an_int8_image_is_computed_without_another_rounding(tmp_path: Path) -> None:
    """It gives the bits of an fp32 image of the same whole numbers."""
    random = np.random.default_rng(1)
    a, b = (random.integers(-127, 128, (3, 24)) for _ in range(2))
    scale = random.uniform(1e-4, 1e-3, 3).astype(np.float32)
    x, found = torch.randn(5, 24), []
    for dtype in ("int8", "fp32"):
        y = torch.zeros(5, 24)
        sgmv_(y, x, [(0, 5, image(tmp_path / dtype, dtype, a, b, scale))])
        found.append(y)
    assert torch.equal(*found)
    wanted = (x.numpy().astype(np.float64) @ a.T * scale) @ b
    assert np.abs(found[0].numpy() - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_a_header_that_says_more_than_the_block_holds_is_refused() -> None:
    entry = Entry(0, "o", 24, 0, 128, (Slice(8, 24, 256),))
    header = ImageHeader("f" * 64, "int8", 512, (entry,))
    read_adapter(header, bytearray(512), tiny_config(24))
    with pytest.raises(ImageError, match="outside its block"):
        read_adapter(header, bytearray(447), tiny_config(24))


@pytest.fixture(scope="module")
def runner(
    demo_runner: Callable[..., Any],
    demo_base: BaseManifest,
    tmp_path_factory: Any,
    torch_kit: ModuleType,
) -> Any:
    """The demo base in fp32, with each demo adapter as bf16 and as int8."""
    found, folder = demo_runner(), tmp_path_factory.mktemp("images")
    for source in sorted(ADAPTERS.iterdir()):
        for dtype in ("bf16", "int8"):
            path = folder / f"{source.name}-{dtype}"
            digest = compile_adapter(source, demo_base, path, dtype).digest
            torch_kit.add(found.executor, path.name, *read_image(path, digest))
    return found


@pytest.mark.parametrize("name", sorted(path.name for path in ADAPTERS.iterdir()))
def test_a_demo_adapter_keeps_its_quality(runner: Any, name: str) -> None:
    wanted, found = (runner.logits(PROMPT, f"{name}-{dtype}") for dtype in ("bf16", "int8"))
    apart = (found - wanted).abs()
    assert apart.max() < WORST and apart.mean() < MEAN
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
