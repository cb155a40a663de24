"""Images on the native executor: what is refused, and the memory that they take."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loraplex.engine.images import Entry, ImageError, ImageHeader, Slice, read_image


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
        executor.add_image("c", header, bytearray(4096))


def test_a_projection_that_is_there_twice(executor: Any) -> None:
    entry = Entry(0, "o", 96, 0, 0, (Slice(1, 52, 0),))
    header = ImageHeader("f" * 64, "fp32", 4096, (entry, entry))
    with pytest.raises(ImageError, match="o of layer 0 does not fit the model"):
        executor.add_image("c", header, bytearray(4096))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_bytes_are_known_before(
    dtype: str, executor: Any, native_kit: ModuleType, tmp_path: Path
) -> None:
    config = executor._base.config
    lora = native_kit.adapter(config, (1, 0, 16, 5), dtype=dtype, rows=True)
    digest = native_kit.write_image(tmp_path / "image", config, lora, dtype)
    header, block = read_image(tmp_path / "image", digest)
    executor.add_image("a", header, block)
    assert executor._images["a"].arena.used == executor.image_bytes(header)
    executor.remove_image("a")
    assert not executor._images and not executor._adapters
