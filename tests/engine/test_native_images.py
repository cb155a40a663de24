"""Images on the native executor: what is refused, and the memory that they take."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loraplex.engine.images import (
    PROJECTIONS,
    Entry,
    ImageError,
    ImageHeader,
    Slice,
    read_image,
)
from loraplex.engine.model.adapter import projection_sizes
from loraplex.engine.native.images import POINTERS, WORD, packed_bytes
from loraplex.kernels.cpu.library import LoraProjection, LoraSlice, load_library

LINEARS = tuple(name for names in PROJECTIONS.values() for name in names)


@pytest.fixture(scope="module")
def executor(native_kit: ModuleType) -> Iterator[Any]:
    """A model of 2 layers, hidden 52, q, k and v 96, 32 and 32."""
    made = native_kit.executor(native_kit.tiny())
    yield made
    made.close()


@pytest.mark.parametrize(
    "entry",
    [
        Entry(2, "o", 96, 0, 0, (Slice(1, 52, 0),)),
        Entry(-1, "o", 96, 0, 0, (Slice(1, 52, 0),)),
        Entry(0, "lm_head", 52, 0, 0, (Slice(1, 97, 0),)),
        Entry(0, "o", 95, 0, 0, (Slice(1, 52, 0),)),
        Entry(0, "qkv", 52, 0, 0, (Slice(1, 96, 0),)),
        Entry(0, "qkv", 52, 0, 0, (Slice(1, 96, 0), Slice(-1, 32, 0), Slice(0, 32))),
        Entry(0, "o", 96, 0, 1 << 20, (Slice(1, 52, 0),)),
        Entry(0, "o", 96, -4, 0, (Slice(1, 52, 0),)),
        Entry(0, "o", 96, 0, 0, (Slice(1, 52, -1),)),
        Entry(0, "o", 96, 0, 0, (Slice(1, 52, 0, gain=4000),)),
        Entry(0, "o", 96, 0, 0, (Slice(513, 52, 0),)),
    ],
)
def test_image_that_does_not_fit(executor: Any, entry: Entry) -> None:
    header = ImageHeader("f" * 64, "fp32", 4096, (entry,))
    with pytest.raises(ImageError):
        executor.prepare_image(header, bytearray(4096))


def test_a_projection_that_is_there_twice(executor: Any) -> None:
    entry = Entry(0, "o", 96, 0, 0, (Slice(1, 52, 0),))
    header = ImageHeader("f" * 64, "fp32", 4096, (entry, entry))
    with pytest.raises(ImageError, match="o of layer 0 does not fit the model"):
        executor.prepare_image(header, bytearray(4096))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_bytes_are_known_before(
    dtype: str, executor: Any, native_kit: ModuleType, tmp_path: Path
) -> None:
    config = executor._base.config
    lora = native_kit.adapter(config, (1, 0, 16, 5), dtype=dtype, rows=True)
    digest = native_kit.write_image(tmp_path / "image", config, lora, dtype)
    header, block = read_image(tmp_path / "image", digest)
    assert len(executor.prepare_image(header, block)) == executor.image_bytes(header)


@pytest.mark.parametrize(
    ("rank", "linears"), [(16, LINEARS), (8, ("q_proj", "v_proj"))], ids=["all", "q and v"]
)
def test_packing_adds_next_to_nothing(
    rank: int, linears: tuple[str, ...], native_kit: ModuleType, tmp_path: Path
) -> None:
    """Adapters like those of the demo, whose linears have these sizes."""
    model = native_kit.tiny(
        num_layers=3, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3,
        head_dim=64,
    )  # fmt: skip
    config, library = model.config, load_library()
    whole = native_kit.adapter(config, (rank,), dtype="bf16")
    lora = {key: part for key, part in whole.items() if key[1] in linears}
    path = tmp_path / "image"
    header, _ = read_image(path, native_kit.write_image(path, config, lora, "bf16"))
    taken = packed_bytes(header, config.num_layers, projection_sizes(config), library)
    assert taken <= 1.02 * path.stat().st_size


def test_pointers_are_those_of_the_struct() -> None:
    """Each word of a projection is either relocated or a number."""
    projection, part = (
        [kind is ctypes.c_void_p for _, kind in struct._fields_]
        for struct in (LoraProjection, LoraSlice)
    )
    words = [*projection[:-1], *part * 3]
    assert ctypes.sizeof(LoraProjection) == len(words) * WORD
    assert [place for place, is_pointer in enumerate(words) if is_pointer] == POINTERS
