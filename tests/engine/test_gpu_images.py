"""Images on the device: what the tables point to, before and after images move."""

import numpy as np
import pytest
import torch

from loraplex.engine.gpu.images import DeviceImages, kinds_of, largest_rank
from loraplex.engine.images import Entry, ImageError, ImageHeader, Slice
from loraplex.engine.model.config import ModelConfig, RopeConfig
from loraplex.kernels.triton.sgmv_plan import ALIGNMENT, no_record

CONFIG = ModelConfig(
    97, 16, 24, 3, 4, 2, 4, 64, 1e-5, RopeConfig(1e4), (None,) * 3,
    tied=False, qk_norm=False, qkv_bias=False, o_bias=False, mlp_bias=False,
)  # fmt: skip
ENTRY = Entry(1, "qkv", 16, 0, 256, (Slice(2, 16, 384), Slice(0, 8), Slice(1, 8, 512, 640, 768)))
HEADER = ImageHeader("f" * 64, "fp32", 896, (ENTRY,))


def block(value: float, size: int = 896) -> bytearray:
    return bytearray(np.full(size // 4, value, np.float32).tobytes())


def images(budget: int, most: int = 4) -> DeviceImages:
    return DeviceImages(CONFIG, torch.zeros(budget, dtype=torch.uint8), most)


def add(found: DeviceImages, digest: str, header: ImageHeader, block: bytearray) -> None:
    found.add(digest, found.stage(header, block))


def points_to(found: DeviceImages, digest: str, value: float) -> None:
    """Every array of the image lies where the tables say, and holds its value."""
    kind, line = found.places[digest]
    record = found.table(1, "qkv")[line].tolist()
    slices = [record[3 + 5 * n : 8 + 5 * n] for n in range(3)]
    assert record[2] == 3
    assert [s[:2] for s in slices] == [[0, 2], [2, 0], [2, 1]]
    assert slices[1][2:] == [-1, -1, -1]
    unit = ALIGNMENT // 4
    for place, count in ((record[0], 48), (record[1], 3), (slices[0][2], 32), (slices[2][4], 8)):
        values = found.arenas[kind].fp32[place * unit : place * unit + count]
        assert values.tolist() == [value] * count


def test_tables_point_to_the_arrays() -> None:
    found = images(4096)
    for value, digest in enumerate("abc", 1):
        add(found, digest, HEADER, block(value))
    for value, digest in enumerate("abc", 1):
        points_to(found, digest, value)
    line = found.places["a"][1]
    assert found.table(0, "qkv")[line].tolist() == no_record().tolist()
    assert found.table(1, "o")[line].tolist() == no_record().tolist()
    assert largest_rank(HEADER) == 3


def test_images_move_to_make_room() -> None:
    found = images(4 * 896)
    for value, digest in enumerate("abcd", 1):
        add(found, digest, HEADER, block(value))
    found.remove("a")
    found.remove("c")
    large = replace_header(block_bytes=2 * 896)
    add(found, "e", large, block(5, 2 * 896))
    for digest, value in (("b", 2), ("d", 4), ("e", 5)):
        points_to(found, digest, value)
    assert sorted(found.places) == ["b", "d", "e"]


def test_images_move_above_a_floor() -> None:
    found = images(6 * 896)
    for value, digest in enumerate("abcd", 1):
        add(found, digest, HEADER, block(value))
    found.remove("b")
    with pytest.raises(MemoryError):
        found.set_floor(3 * 896 + 1)
    found.set_floor(3 * 896)
    for digest, value in (("a", 1), ("c", 3), ("d", 4)):
        points_to(found, digest, value)
    with pytest.raises(MemoryError):
        add(found, "e", HEADER, block(5))
    found.set_floor(2 * 896)
    add(found, "e", HEADER, block(5))
    points_to(found, "e", 5)


@pytest.mark.parametrize("gap", [128, 512, 896, 4096])
def test_images_move_in_pieces(gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not where they go overlaps where they were, and without memory for it."""
    monkeypatch.setattr("loraplex.engine.gpu.images.PIECE", 256)
    monkeypatch.setattr(torch.Tensor, "clone", lambda _: 1 / 0)
    found = images(2 * 896 + gap)
    data = np.random.default_rng(0).integers(0, 256, 896, np.uint8)
    add(found, "above", replace_header(block_bytes=gap, entries=()), bytearray(gap))
    add(found, "moved", HEADER, bytearray(data))
    before = found._images["moved"].begin
    found.remove("above")
    found.set_floor(before + gap)
    begin = found._images["moved"].begin
    assert begin == before + gap
    assert np.array_equal(found._region[begin : begin + 896].numpy(), data)


def replace_header(**changes: object) -> ImageHeader:
    fields = {name: getattr(HEADER, name) for name in ("base", "dtype", "block_bytes", "entries")}
    return ImageHeader(**(fields | changes))


def test_memory_and_lines_run_out() -> None:
    found = images(896 + 512)
    add(found, "a", HEADER, block(1))
    with pytest.raises(MemoryError, match="896 bytes are asked for, and 512 are free"):
        add(found, "b", HEADER, block(1))
    found.remove("a")
    add(found, "b", HEADER, block(2))
    points_to(found, "b", 2)
    few = images(4096, most=1)
    add(few, "a", HEADER, block(1))
    with pytest.raises(MemoryError, match="as many as can be"):
        add(few, "b", HEADER, block(1))


def test_an_image_without_arrays() -> None:
    found = images(1024)
    header = replace_header(block_bytes=0, entries=())
    add(found, "a", header, bytearray())
    assert largest_rank(header) == 0
    found.remove("a")
    assert found.places == {}


def test_kinds_of() -> None:
    places = {"a": ("int8", 0), "b": ("bf16", 1), "c": ("int8", 2)}
    assert kinds_of({"c", "b", "a"}, places) == ("bf16", "int8")
    assert kinds_of(set(), places) == ()
    with pytest.raises(KeyError):
        kinds_of({"d"}, places)


@pytest.mark.parametrize(
    "entry",
    [
        Entry(3, "o", 16, 0, 0, (Slice(1, 16, 0),)),
        Entry(-1, "o", 16, 0, 0, (Slice(1, 16, 0),)),
        Entry(0, "lm_head", 16, 0, 0, (Slice(1, 97, 0),)),
        Entry(0, "o", 15, 0, 0, (Slice(1, 16, 0),)),
        Entry(0, "qkv", 16, 0, 0, (Slice(1, 16, 0),)),
        Entry(0, "o", 16, 0, 0, (Slice(-1, 16, 0),)),
        Entry(0, "o", 16, 0, 1 << 20, (Slice(1, 16, 0),)),
        Entry(0, "o", 16, -128, 0, (Slice(1, 16, 0),)),
        Entry(0, "o", 16, 4, 0, (Slice(1, 16, 0),)),
        Entry(0, "o", 16, 0, 0, (Slice(1, 16, -1),)),
        Entry(0, "o", 16, 0, 0, (Slice(1, 16, 0, gain=896),)),
        Entry(0, "o", 16, 0, 0, (Slice(1, 16, 0, bias=-2),)),
    ],
)
def test_image_that_does_not_fit(entry: Entry) -> None:
    found = images(4096)
    with pytest.raises(ImageError):
        found.stage(replace_header(entries=(entry,)), block(1))
    assert found.places == {}


def test_bytes_are_seen_in_the_image_s_dtype() -> None:
    found = images(1024)
    weights = torch.arange(48, dtype=torch.int8)
    content = bytearray(weights.numpy().tobytes() + bytes(896 - 48))
    add(found, "a", replace_header(dtype="int8"), content)
    kind, line = found.places["a"]
    place = int(found.table(1, "qkv")[line][0]) * ALIGNMENT
    assert found.arenas[kind].weights[place : place + 48].equal(weights)
