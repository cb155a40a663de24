"""The parts of one upload on disk: appended where they ended, on the disk before it is said so.

A part's offset is the length of its file, under a name that this file chooses, in a folder that
only the server's user can enter. When the upload is closed, the folder goes, whoever is looking at
it: no part is there any more. Knows files and a full disk; refuses to know tenants, HTTP and what
the parts hold.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from loraplex.platform.errors import Conflict, StillRunning, StorageFull, TooLarge, WrongOffset

Part = Literal["adapter_config", "adapter_model", "archive"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)
FILES: Final[dict[Part, str]] = {
    "adapter_config": "adapter_config.json",
    "adapter_model": "adapter_model.safetensors",
    "archive": "adapter.zip",
}
WHOLE: Final = (frozenset({"archive"}), frozenset({"adapter_config", "adapter_model"}))
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
CHUNK: Final = 1 << 20
REMOVED: Final = "The upload was closed meanwhile: it takes no more bytes. Begin a new one."


def raise_if_full(error: OSError) -> None:
    """Raise `StorageFull` for an error that says so."""
    if error.errno in FULL:
        raise StorageFull from error


def write(descriptor: int, data: memoryview) -> int:
    """Write some of `data`, at least a byte, and return how many; raises `OSError`."""
    return os.write(descriptor, data)


class Writer:
    """Appends to one part, alone; `close` returns its length once all of it is on the disk."""

    def __init__(self, descriptor: int, part: Part, offset: int, limit: int) -> None:
        self._descriptor, self._part, self._limit = descriptor, part, limit
        self.offset = offset

    def write(self, data: bytes) -> None:
        """Append `data`; raises `TooLarge` beyond the limit, and `StorageFull`."""
        if self.offset + len(data) > self._limit:
            raise TooLarge(f"The part {self._part} has more than {self._limit} bytes.")
        rest = memoryview(data)
        try:
            while rest:
                written = write(self._descriptor, rest)
                self.offset += written
                rest = rest[written:]
        except OSError as error:
            raise_if_full(error)
            raise

    def close(self) -> int:
        """Sync and close the file; returns its length. Raises `StorageFull`."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise_if_full(error)
            raise
        finally:
            os.close(self._descriptor)
        return self.offset


@dataclass(frozen=True)
class PartFolder:
    """The folder of one upload."""

    path: Path

    def make(self) -> None:
        """Make it, for its owner only; raises `StorageFull`."""
        try:
            self.path.mkdir(mode=0o700, parents=True)
            _sync(self.path.parent)
        except OSError as error:
            raise_if_full(error)
            raise

    def remove(self) -> None:
        """Remove it with all that is in it; once is enough."""
        shutil.rmtree(self.path, ignore_errors=True)

    def exists(self) -> bool:
        """Whether this server has it."""
        return self.path.is_dir()

    def file(self, part: Part) -> Path:
        """Where a part lies, or would."""
        return self.path / FILES[part]

    def offsets(self) -> dict[Part, int]:
        """How many bytes of each part are on the disk, for those that were begun."""
        found = {part: _synced(self.file(part)) for part in PARTS}
        return {part: size for part, size in found.items() if size is not None}

    def check_offset(self, part: Part, offset: int) -> None:
        """Raise `WrongOffset` unless the part ends there now."""
        size = 0
        with contextlib.suppress(FileNotFoundError):
            size = self.file(part).stat().st_size
        if size != offset:
            raise WrongOffset(part, offset, size)

    def open(self, part: Part, offset: int, limit: int) -> Writer:
        """Go on with a part at `offset`, up to `limit` bytes.

        Raises `WrongOffset` where it ends elsewhere, `StillRunning` while another request writes
        it, `Conflict` once the folder is removed, and `StorageFull`.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.file(part), flags, 0o600)
            try:
                return self._take(descriptor, part, offset, limit)
            except BaseException:
                os.close(descriptor)
                raise
        except FileNotFoundError as error:
            raise Conflict(REMOVED) from error
        except OSError as error:
            raise_if_full(error)
            raise

    def _take(self, descriptor: int, part: Part, offset: int, limit: int) -> Writer:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StillRunning(f"Another request is sending the part {part}.") from error
        size = os.fstat(descriptor).st_size
        if size != offset:
            raise WrongOffset(part, offset, size)
        _sync(self.path)
        return Writer(descriptor, part, offset, limit)

    def digest(self, part: Part) -> str:
        """The SHA-256 of a part, in hex."""
        with self.file(part).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def _synced(path: Path) -> int | None:
    """A file's length, once that much is on the disk; None where there is none, or no more."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    """See that names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
