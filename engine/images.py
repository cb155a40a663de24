"""The adapter image: its format, its digest, where images are kept; and the base's manifest.

An image is a safetensors file with a canonical JSON header (in `__metadata__`) and one flat tensor
of bytes, the block, in which every array starts on a 128-byte boundary. Its digest is the SHA-256
of the whole file, so `sha256sum` checks one. For each (layer, projection) that the adapter touches
the header gives, with slices as in `PROJECTIONS`:

- `a`: offset of A, `[sum of the slices' ranks, in_features]` in the image's dtype, slices stacked
- `scale`: offset of one fp32 multiplier per row of A (scaling, composition weight, quantisation: in
  an int8 image, what a step of that row of A times a step of that row of Bᵀ is worth)
- per slice: `rank`, and offsets of Bᵀ `[rank, out_features]` in the image's dtype, of an fp32 gain
  row `[out_features]` (DoRA) and of an fp32 bias row `[out_features]`; -1 where there is none.

*Semantics*, per slice: `y = gain * (W x + (scale * (x Aᵀ)) Bᵀᵀ) + W_bias + bias`. The header of an
activated adapter names its invocation, and tokens before that have none of this (`activation.py`).

This file knows bytes, offsets and files. It refuses to know torch, PEFT and adapters' names.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import struct
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal, cast

import fsspec
import msgspec

ALIGNMENT = 128
FORMAT = 1
PROJECTIONS: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
ITEM_SIZE = {"bf16": 2, "fp32": 4, "int8": 1}
MAX_HEADER_BYTES = 16 << 20
FRESH_S = 3600.0  # after it was put, an image is not put again
_DIGEST = re.compile(r"[0-9a-f]{64}")
_STORED = re.compile(r"([0-9a-f]{64})\.safetensors(\.[0-9a-f]{32})?")

ImageDtype = Literal["bf16", "fp32", "int8"]


class ImageError(ValueError):
    """A file is not an image, or not the image that its name says."""


class BaseManifest(msgspec.Struct, frozen=True):
    """What the house may know of the base model; `base.json`, written by `engine.prepare`.

    `modules` maps a linear's name, as in `PROJECTIONS`, to `(in_features, out_features)`.
    `fingerprint` is the SHA-256 of the configuration and of every weight file.
    """

    name: str
    path: str  # directory with config.json, *.safetensors and tokenizer.json
    fingerprint: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    modules: dict[str, tuple[int, int]]


class Slice(msgspec.Struct, frozen=True):
    """One linear's part of a fused projection; offsets are bytes into the block, -1 for none."""

    rank: int
    out_features: int
    b: int = -1
    gain: int = -1
    bias: int = -1


class Entry(msgspec.Struct, frozen=True):
    """The adapter's part in one projection of one layer."""

    layer: int
    projection: str
    in_features: int
    a: int
    scale: int
    slices: tuple[Slice, ...]


class ImageHeader(msgspec.Struct, frozen=True):
    """All that an image says of itself, apart from its weights.

    `invocation` are the tokens that activate it; one without any is active from the first token.
    """

    base: str
    dtype: ImageDtype
    block_bytes: int
    entries: tuple[Entry, ...]
    format: int = FORMAT
    invocation: tuple[int, ...] = ()  # not written when empty


def encode_header(header: ImageHeader) -> bytes:
    """The file up to its block: equal headers give equal bytes, padded to the alignment."""
    fields = msgspec.to_builtins(header)
    if not header.invocation:
        del fields["invocation"]
    meta = msgspec.json.encode(fields, order="sorted").decode()
    tensors = {
        "__metadata__": {"loraplex": meta},
        "block": {
            "dtype": "U8",
            "shape": [header.block_bytes],
            "data_offsets": [0, header.block_bytes],
        },
    }
    text = json.dumps(tensors, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def read_header(file: IO[bytes]) -> ImageHeader:
    """Read the header and leave `file` at the first byte of the block; raises `ImageError`."""
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ImageError("the file is too short to be an image")
    (size,) = struct.unpack("<Q", prefix)
    if size > MAX_HEADER_BYTES:
        raise ImageError("the image's header is too large")
    try:
        tensors = json.loads(file.read(size))
        header = msgspec.json.decode(tensors["__metadata__"]["loraplex"], type=ImageHeader)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ImageError(f"the image's header cannot be read: {error}") from error
    if header.format != FORMAT:
        raise ImageError(f"image format {header.format} is not format {FORMAT}")
    return header


def read_image(path: Path, digest: str) -> tuple[ImageHeader, bytearray]:
    """Read and verify an image: its header and its block, writable so that tensors can view it.

    Raises `ImageError` when the content is not what `digest` names, `FileNotFoundError` if absent.
    """
    with path.open("rb") as file:
        header = read_header(file)
        start = file.tell()
        if path.stat().st_size - start != header.block_bytes:
            raise ImageError("the image's block is not as long as its header says")
        block = bytearray(header.block_bytes)
        file.readinto(block)
        file.seek(0)
        found = hashlib.sha256(file.read(start))
    found.update(block)
    if found.hexdigest() != digest:
        raise ImageError(f"the image's content is {found.hexdigest()[:12]}…, not {digest[:12]}…")
    return header, block


def check_digest(digest: str) -> str:
    """Return `digest` if it is 64 hex digits, else raise `ImageError`: it becomes a path."""
    if not _DIGEST.fullmatch(digest):
        raise ImageError("a digest is 64 hexadecimal digits")
    return digest


@dataclass(frozen=True)
class StoredFile:
    """A file of the store: an image, or what an interrupted `put` left of one.

    `modified` is seconds since the epoch, infinity where the store does not say.
    """

    name: str
    digest: str
    is_whole: bool
    bytes: int
    modified: float


class ImageStore:
    """Images by digest under a URL that fsspec understands (a directory, `s3://…`, `gs://…`)."""

    def __init__(self, url: str) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)

    def put(self, source: Path, digest: str) -> None:
        """Copy an image file in, unless it was put less than `FRESH_S` ago.

        So each `put` keeps it from those who remove images that lie there unnamed for longer.
        """
        target = self._path(digest)
        if self._age(target) < FRESH_S:
            return
        self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        part = f"{target}.{uuid.uuid4().hex}"
        self._fs.put_file(str(source), part)
        self._fs.mv(part, target)

    def fetch(self, digest: str, cache: Path) -> Path:
        """Path of a local copy, made under `cache` where the store is not a local directory.

        Raises `FileNotFoundError` when the store has no such image.
        """
        source = self._path(digest)
        if self._is_local:
            if not self._fs.exists(source):
                raise FileNotFoundError(source)
            return Path(source)
        target = cache / f"{check_digest(digest)}.safetensors"
        with contextlib.suppress(FileNotFoundError):
            os.utime(target)  # used now: what was used longest ago leaves the cache first
            return target
        cache.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{uuid.uuid4().hex}")
        try:
            self._fs.get_file(source, str(part))
            os.utime(part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return target

    def delete(self, digest: str) -> None:
        """Remove an image; one that is not there is no error."""
        self._remove(self._path(digest))

    def delete_part(self, file: StoredFile) -> None:
        """Remove what an interrupted `put` left; no error where it is gone already."""
        if not file.is_whole:
            self._remove(file.name)

    def __contains__(self, digest: str) -> bool:
        return bool(self._fs.exists(self._path(digest)))

    def files(self) -> Iterator[StoredFile]:
        """All files of ours; others that lie there are passed over."""
        for name, info in self._fs.find(self._root, detail=True).items():
            if match := _STORED.fullmatch(name.rsplit("/", 1)[-1]):
                digest, part = match.groups()
                yield StoredFile(name, digest, part is None, info["size"] or 0, _modified(info))

    def _age(self, name: str) -> float:
        """Seconds since a file was written; infinity where it is not there."""
        try:
            return time.time() - _modified(self._fs.info(name))
        except FileNotFoundError:
            return math.inf

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(name)

    @property
    def _is_local(self) -> bool:
        return "file" in cast("tuple[str, ...] | str", self._fs.protocol)

    def _path(self, digest: str) -> str:
        check_digest(digest)
        return f"{self._root}/{digest[:2]}/{digest}.safetensors"


def _modified(info: Mapping[str, Any]) -> float:
    """When a file was written, as the several stores tell it."""
    keys = ("mtime", "LastModified", "updated", "last_modified", "created")
    moment = next((info[key] for key in keys if info.get(key)), math.inf)
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    return moment.timestamp() if isinstance(moment, datetime) else float(moment)
