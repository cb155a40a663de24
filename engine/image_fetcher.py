"""Brings one image from the store to local disk, and from there, verified, into memory.

Runs on threads. This file knows files and what can be wrong with them. It refuses to know who waits
and how much room there is; it never raises: what went wrong is a result.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from loraplex.engine.images import (
    ImageError,
    ImageHeader,
    ImageStore,
    check_digest,
    read_header,
    read_image,
)
from loraplex.engine.protocol import FailureCode

log = logging.getLogger(__name__)

T = TypeVar("T")


class Failure(NamedTuple):
    """Why an image cannot be had, as the engine reports it."""

    code: FailureCode
    message: str


class Located(NamedTuple):
    """An image on local disk, unverified, with the bytes that it will take."""

    path: Path
    block_bytes: int
    most_bytes: int  # of host memory, and then of device memory


class Loaded(NamedTuple):
    """A verified image in host memory."""

    header: ImageHeader
    block: bytearray


class ImageFetcher:
    """Fetches images that were compiled for one base and fit into `budget_bytes`.

    `measure` tells how many bytes an image takes on the device.
    """

    def __init__(
        self,
        store: ImageStore,
        cache: Path,
        base: str,
        budget_bytes: int,
        measure: Callable[[ImageHeader], int],
    ) -> None:
        self._store, self._cache = store, cache
        self._base, self._budget, self._measure = base, budget_bytes, measure

    def locate(self, digest: str) -> Located | Failure:
        """Make sure that the image is on local disk."""
        return _attempt(digest, lambda: self._locate(digest))

    def read(self, digest: str, located: Located) -> Loaded | Failure:
        """Read the image into memory and verify it; a bad copy in the cache is removed."""
        result = _attempt(digest, lambda: self._read(digest, located))
        if isinstance(result, Failure) and located.path.parent == self._cache:
            located.path.unlink(missing_ok=True)
        return result

    def _locate(self, digest: str) -> Located | Failure:
        try:
            check_digest(digest)
        except ImageError as error:
            return Failure("invalid_request", str(error))
        path = self._store.fetch(digest, self._cache)
        with path.open("rb") as file:
            header = read_header(file)
            size = path.stat().st_size - file.tell()
        most = max(size, self._measure(header))
        if most > self._budget:
            room = f"all images together may take {self._budget}"
            return Failure("invalid_request", f"{_short(digest)} takes {most} bytes; {room}")
        return Located(path, size, most)

    def _read(self, digest: str, located: Located) -> Loaded | Failure:
        header, block = read_image(located.path, digest)
        if len(block) != located.block_bytes:
            raise ImageError("the file changed while it was read")
        if header.base != self._base:
            theirs, ours = header.base[:12], self._base[:12]
            detail = f"was compiled for base {theirs}…; this engine serves {ours}…"
            return Failure("image_mismatch", f"{_short(digest)} {detail}")
        return Loaded(header, block)


def _attempt(digest: str, job: Callable[[], T | Failure]) -> T | Failure:
    try:
        return job()
    except FileNotFoundError:
        return Failure("image_missing", f"{_short(digest)} is not in the image store")
    except ImageError as error:
        return Failure("image_corrupt", f"{_short(digest)} is damaged: {error}")
    except Exception:
        log.exception("%s could not be fetched", _short(digest))
        return Failure("internal", f"{_short(digest)} could not be fetched; the log says why")


def _short(digest: str) -> str:
    return f"image {digest[:12]}…"
