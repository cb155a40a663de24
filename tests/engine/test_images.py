"""The image's format: layout, digest, verification; and the store."""

import hashlib
import math
import os
import struct
import time
from datetime import UTC, datetime
from pathlib import Path

import fsspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.image_builder import ImageBuilder, SliceData
from loraplex.engine.images import (
    ALIGNMENT,
    FRESH_S,
    ImageError,
    ImageStore,
    _modified,
    check_digest,
    read_header,
    read_image,
)

BASE = "b" * 64
ABSENT = "a" * 64


def build(path: Path, fill: int = 1, invocation: tuple[int, ...] = ()) -> str:
    """An image with a gain, a bias, and a slice left alone."""
    builder = ImageBuilder(BASE, "bf16", invocation)
    row = np.full(4, fill, "<f4").tobytes()
    slices = [
        SliceData(3, 8, bytes([fill]) * 48),
        SliceData(0, 4),
        SliceData(2, 4, bytes(16), row, row),
    ]
    builder.add(1, "qkv", 8, bytes(80), bytes(20), slices)
    builder.add(0, "down", 16, bytes(32), bytes(4), [SliceData(1, 8, bytes(16))])
    return builder.finish(path)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(str(tmp_path / "store"))


def test_a_file_is_an_image_that_other_tools_can_read(tmp_path: Path) -> None:
    digest = build(tmp_path / "image")
    content = (tmp_path / "image").read_bytes()
    assert digest == hashlib.sha256(content).hexdigest()
    header, block = read_image(tmp_path / "image", digest)
    assert safetensors.numpy.load(content)["block"].tobytes() == block
    assert (len(content) - len(block)) % ALIGNMENT == 0
    assert (header.base, header.dtype, header.block_bytes) == (BASE, "bf16", len(block))


def test_entries_are_sorted_and_arrays_aligned_and_apart(tmp_path: Path) -> None:
    header, block = read_image(tmp_path / "image", build(tmp_path / "image", fill=7))
    assert [(e.layer, e.projection) for e in header.entries] == [(0, "down"), (1, "qkv")]
    query, key, value = header.entries[1].slices
    assert (query.rank, query.gain, query.bias) == (3, -1, -1)
    assert (key.rank, key.b, key.out_features) == (0, -1, 4)
    offsets = [
        x
        for e in header.entries
        for x in (e.a, e.scale, *(y for s in e.slices for y in (s.b, s.gain, s.bias) if y >= 0))
    ]
    assert len(set(offsets)) == len(offsets) == 9
    assert all(x % ALIGNMENT == 0 for x in offsets)
    assert np.frombuffer(block, "<f4", 4, value.gain).tolist() == [7.0] * 4
    assert block[query.b : query.b + 48] == bytes([7]) * 48


def test_equal_content_is_one_image(tmp_path: Path) -> None:
    assert build(tmp_path / "a") == build(tmp_path / "b")
    assert build(tmp_path / "a") != build(tmp_path / "b", fill=2)


def test_an_invocation_is_part_of_the_image(tmp_path: Path) -> None:
    digest = build(tmp_path / "a", invocation=(7, 300))
    assert read_image(tmp_path / "a", digest)[0].invocation == (7, 300)
    assert digest not in {build(tmp_path / "b"), build(tmp_path / "b", invocation=(7, 301))}


def test_an_image_without_invocation_has_the_bytes_it_always_had(tmp_path: Path) -> None:
    digest = build(tmp_path / "image")
    assert digest == "08dbf910da783a40aec1763ca9352cbc800cea321f78221b835375a757b7e0ae"
    assert read_image(tmp_path / "image", digest)[0].invocation == ()


@pytest.mark.parametrize(
    ("a", "scale", "part", "what"),
    [
        (15, 4, SliceData(1, 4, bytes(8)), "A"),
        (16, 8, SliceData(1, 4, bytes(8)), "scale"),
        (16, 4, SliceData(1, 4, bytes(9)), "B"),
        (16, 4, SliceData(1, 4, bytes(8), gain=bytes(12)), "row"),
        (16, 4, SliceData(1, 4, bytes(8), bias=bytes(20)), "row"),
    ],
)
def test_arrays_of_wrong_size_are_refused(a: int, scale: int, part: SliceData, what: str) -> None:
    with pytest.raises(ImageError, match=f"{what} of layer 0, o has the wrong size"):
        ImageBuilder(BASE, "bf16").add(0, "o", 8, bytes(a), bytes(scale), [part])


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_no_changed_byte_goes_unnoticed(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed"
    digest = build(path)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "grow"])):
        case "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del content[at:]
        case _:
            content += bytes(1 + at)
    path.write_bytes(content)
    with pytest.raises(ImageError):
        read_image(path, digest)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 1 << 50),
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 60_000) + b"[" * 60_000,
        struct.pack("<Q", 30) + b'{"__metadata__":{"loraplex":3}}',
        struct.pack("<Q", 33) + b'{"__metadata__":{"loraplex":"{}"}}',
    ],
)
def test_what_is_no_image_is_an_image_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file, pytest.raises(ImageError):
        read_header(file)


def test_another_format_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "image")
    content = (tmp_path / "image").read_bytes().replace(rb"\"format\":1", rb"\"format\":2")
    (tmp_path / "image").write_bytes(content)
    with (tmp_path / "image").open("rb") as file, pytest.raises(ImageError, match="format 2"):
        read_header(file)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "a" * 63, f"{'a' * 64}\n"])
def test_only_digests_become_paths(digest: str, store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(ImageError):
        check_digest(digest)
    with pytest.raises(ImageError):
        store.fetch(digest, tmp_path)


def test_a_local_store_hands_out_its_own_file(store: ImageStore, tmp_path: Path) -> None:
    digest = build(tmp_path / "image")
    assert digest not in store
    store.put(tmp_path / "image", digest)
    store.put(tmp_path / "image", digest)
    assert digest in store
    (file,) = store.files()
    assert (file.digest, file.is_whole) == (digest, True)
    assert file.bytes == (tmp_path / "image").stat().st_size
    path = store.fetch(digest, tmp_path / "cache")
    assert read_image(path, digest)[0].base == BASE
    assert not (tmp_path / "cache").exists()
    store.delete(digest)
    store.delete(digest)
    assert list(store.files()) == []
    with pytest.raises(FileNotFoundError):
        store.fetch(digest, tmp_path / "cache")


def test_a_remote_store_is_cached_once_and_whole(tmp_path: Path) -> None:
    remote = ImageStore(f"memory://{tmp_path.name}")
    digest = build(tmp_path / "image")
    remote.put(tmp_path / "image", digest)
    cache = tmp_path / "cache"
    first = remote.fetch(digest, cache)
    remote.delete(digest)
    assert remote.fetch(digest, cache) == first
    assert read_image(first, digest)[0].base == BASE
    with pytest.raises(FileNotFoundError):
        remote.fetch(ABSENT, cache)
    assert list(cache.iterdir()) == [first]


def test_an_old_image_is_put_again_and_is_young_then(store: ImageStore, tmp_path: Path) -> None:
    digest = build(tmp_path / "image")
    store.put(tmp_path / "image", digest)
    path = store.fetch(digest, tmp_path)
    for age, is_put in ((FRESH_S / 2, False), (2 * FRESH_S, True)):
        moment = time.time() - age
        os.utime(path, (moment, moment))
        store.put(tmp_path / "image", digest)
        assert (path.stat().st_mtime > moment + 1) == is_put
    assert read_image(path, digest)[0].base == BASE


def test_a_cached_image_is_marked_as_used(tmp_path: Path) -> None:
    remote = ImageStore(f"memory://{tmp_path.name}")
    digest = build(tmp_path / "image")
    remote.put(tmp_path / "image", digest)
    cached = remote.fetch(digest, tmp_path / "cache")
    os.utime(cached, (1, 1))
    remote.fetch(digest, tmp_path / "cache")
    assert cached.stat().st_mtime > 1


@pytest.mark.parametrize("key", ["mtime", "LastModified", "updated"])
def test_each_kind_of_store_tells_when_a_file_was_written(key: str) -> None:
    moment = datetime(2026, 11, 30, tzinfo=UTC)
    for value in (moment, moment.isoformat(), moment.timestamp()):
        assert _modified({"size": 1, key: value}) == moment.timestamp()
    assert _modified({"size": 1}) == math.inf


def test_a_put_that_fails_leaves_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = ImageStore(f"memory://{tmp_path.name}")
    digest = build(tmp_path / "image")

    def fail(*_: object, **__: object) -> None:
        raise OSError("the network is gone")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "mv", fail)
    with pytest.raises(OSError, match="network"):
        remote.put(tmp_path / "image", digest)
    assert digest not in remote
    (left,) = remote.files()
    assert (left.digest, left.is_whole) == (digest, False)
    remote.delete_part(left)
    remote.delete_part(left)
    assert list(remote.files()) == []
