"""Brings one image from the store to local disk, and from there, verified and packed, into memory.

A composition is brought part by part and composed here. Runs on threads that must not slow the
engine's steps, so what may be large is read and hashed in pieces. This file knows files and what
can be wrong with them. It refuses to know who waits and how much room there is; it never raises:
what went wrong is a result.
"""

import hashlib
import logging
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from loraplex.engine.compose import (
    Block,
    Component,
    CompositionError,
    compose,
    compose_header,
    merge,
)
from loraplex.engine.images import ImageError, ImageHeader, ImageStore, check_digest, read_header
from loraplex.engine.protocol import FailureCode, Part, composition_digest

PIECE_BYTES = 1 << 20

log = logging.getLogger(__name__)

T = TypeVar("T")
Prepared = Any  # an image as the executor takes it


class Failure(NamedTuple):
    """Why an image cannot be had, as the engine reports it."""

    code: FailureCode
    message: str


class Source(NamedTuple):
    """The unverified file of an image, or of a part of a composition, on local disk."""

    component: Component
    path: Path


class Located(NamedTuple):
    """An image whose files are on local disk, and the bytes that it will take."""

    sources: tuple[Source, ...]
    is_composed: bool
    header: ImageHeader
    host_bytes: int  # while it is in host memory; for a moment, while it is packed, twice these
    device_bytes: int


class Loaded(NamedTuple):
    """A verified image in host memory, as the executor takes it."""

    prepared: Prepared


class ImageFetcher:
    """Fetches images that were compiled for one base.

    `prepare(header, block)` packs a verified image for the executor, and `measure` tells how many
    bytes it takes on the device; both run on threads and raise `ImageError` for an image that does
    not fit the model. No image may take more than `limit_bytes`, the most that all together can
    ever have.
    """

    def __init__(
        self,
        store: ImageStore,
        cache: Path,
        base: str,
        *,
        limit_bytes: int,
        prepare: Callable[[ImageHeader, Any], Prepared],
        measure: Callable[[ImageHeader], int],
    ) -> None:
        self._store, self._cache, self._base = store, cache, base
        self._prepare, self._measure = prepare, measure
        self.limit_bytes = limit_bytes

    def locate(self, digest: str, parts: tuple[Part, ...] = ()) -> Located | Failure:
        """Make sure that the image, or each part of a composition, is on local disk."""
        return _attempt(digest, self._locate, digest, parts)

    def read(self, digest: str, located: Located) -> Loaded | Failure:
        """Read the image into memory, verify and pack it; a bad copy in the cache is removed."""
        return _attempt(digest, self._read, digest, located)

    def _locate(self, digest: str, parts: tuple[Part, ...]) -> Located | Failure:
        if parts and composition_digest(parts) != digest:
            message = f"{_short(digest)} is not the composition of the parts that were given"
            return Failure("invalid_request", message)
        sources = []
        for part in merge(parts) if parts else [Part(digest, 1.0)]:
            source = _attempt(part.image, self._fetch, part)
            if isinstance(source, Failure):
                return source
            sources.append(source)
        header = sources[0].component.header
        if parts:
            header = compose_header([source.component for source in sources])
        ours = header.base == self._base
        size = self._measure(header) if ours else header.block_bytes
        if size > self.limit_bytes:
            room = f"all images together may take {self.limit_bytes}"
            return Failure("invalid_request", f"{_short(digest)} takes {size} bytes; {room}")
        return Located(tuple(sources), bool(parts), header, max(size, header.block_bytes), size)

    def _fetch(self, part: Part) -> Source | Failure:
        try:
            check_digest(part.image)
        except ImageError as error:
            return Failure("invalid_request", str(error))
        path = self._store.fetch(part.image, self._cache)
        with path.open("rb") as file:
            header = read_header(file)
            if path.stat().st_size - file.tell() != header.block_bytes:
                raise ImageError("the image's block is not as long as its header says")
        return Source(Component(part.image, part.weight, header), path)

    def _read(self, digest: str, located: Located) -> Loaded | Failure:
        blocks: list[Block] = []
        for source in located.sources:
            found: Block | Failure = _attempt(source.component.digest, self._verify, source)
            if isinstance(found, Failure):
                if source.path.parent == self._cache:
                    source.path.unlink(missing_ok=True)
                return found
            blocks.append(found)
        header, block = located.header, blocks[0]
        if located.is_composed:
            header, block = compose([s.component for s in located.sources], blocks)
        return Loaded(self._prepare(header, block))

    def _verify(self, source: Source) -> Block | Failure:
        digest, _, header = source.component
        block = read_block(source.path, digest, header)
        if header.base != self._base:
            detail = f"was compiled for base {header.base[:12]}…; this engine serves"
            return Failure("image_mismatch", f"{_short(digest)} {detail} {self._base[:12]}…")
        return block


def read_block(path: Path, digest: str, header: ImageHeader) -> Block:
    """The block of an image, verified; raises `ImageError` when the file is not what it should be.

    Fresh memory is first touched by reads, so all that takes long is done without the interpreter's
    lock.
    """
    block = mmap.mmap(-1, header.block_bytes) if header.block_bytes else bytearray()
    found, view, end = hashlib.sha256(), memoryview(block), 0
    with path.open("rb", buffering=0) as file:
        is_same, start = read_header(file) == header, file.tell()
        file.seek(0)
        found.update(file.read(start))
        while count := file.readinto(view[end : end + PIECE_BYTES]):
            found.update(view[end : end + count])
            end += count
        is_same = is_same and end == header.block_bytes and not file.read(1)
    if found.hexdigest() != digest:
        raise ImageError(f"the image's content is {found.hexdigest()[:12]}…, not {digest[:12]}…")
    if not is_same:
        raise ImageError("the file changed while it was read")
    return block


def _attempt(digest: str, job: Callable[..., T | Failure], *arguments: Any) -> T | Failure:
    try:
        return job(*arguments)
    except FileNotFoundError:
        return Failure("image_missing", f"{_short(digest)} is not in the image store")
    except CompositionError as error:
        return Failure("invalid_request", str(error))
    except ImageError as error:
        return Failure("image_corrupt", f"{_short(digest)} is damaged: {error}")
    except Exception:
        log.exception("%s could not be fetched", _short(digest))
        return Failure("internal", f"{_short(digest)} could not be fetched; the log says why")


def _short(digest: str) -> str:
    return f"image {digest[:12]}…"
