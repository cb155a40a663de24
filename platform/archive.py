"""Takes the adapter's files out of a zip that a stranger made.

Every entry is looked at before any byte is unpacked, and all that is wrong is listed at once.
Output goes to names that this file chooses; bytes are counted as they come out, whatever the
archive says of itself. Refuses to know what the files hold.
"""

import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from loraplex.platform.errors import AdapterRejected, TooLarge

REQUIRED: Final = ("adapter_config.json", "adapter_model.safetensors")
OPTIONAL: Final = ("README.md",)
MAX_ENTRIES: Final = 16
MAX_DIRECTORY_BYTES: Final = 64 << 10
CHUNK: Final = 1 << 20
PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
CONVERT: Final = (
    "Convert it where it was trained: "
    'python -c "import torch, safetensors.torch as s; '
    "w = torch.load('adapter_model.bin', map_location='cpu', weights_only=True); "
    "s.save_file({k: v.clone().contiguous() for k, v in w.items()}, "
    "'adapter_model.safetensors')\"."
)
FIX: Final = "Zip the two files alone: zip -j adapter.zip adapter_config.json " + REQUIRED[1]

_END = struct.Struct("<4s4H2LH")  # end of central directory, APPNOTE.TXT 4.3.16
_END_SIGNATURE, _ZIP64_LOCATOR = b"PK\x05\x06", b"PK\x06\x07"

# what `zipfile` raises for bytes that are no zip, or one of features that it has not
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, struct.error, ValueError, RuntimeError)

Reason = tuple[str, str]


def unpack(archive: Path, target: Path, max_bytes: int) -> None:
    """Write the required files of `archive` into the folder `target`.

    Raises `AdapterRejected` with every reason, and `TooLarge` when more than `max_bytes` come out.
    """
    with archive.open("rb") as file:
        _check_directory(file)
        try:
            with zipfile.ZipFile(file) as opened:
                _check_entries(opened.infolist())
                _extract(opened, target, max_bytes)
        except _DAMAGE as error:
            raise _rejected(("archive_broken", "The archive is damaged.")) from error


def _check_directory(file: BinaryIO) -> None:
    """Bound the list of entries before `zipfile` reads all of it into memory."""
    size = file.seek(0, 2)
    file.seek(max(0, size - _END.size - 0xFFFF - 20))
    tail = file.read()
    at = tail.rfind(_END_SIGNATURE)
    if at < 0 or len(tail) - at < _END.size:
        raise _rejected(("archive_broken", f"The archive is not a zip file. {FIX}"))
    _, _, _, _, entries, directory_bytes, _, _ = _END.unpack_from(tail, at)
    if tail[max(0, at - 20) : at].startswith(_ZIP64_LOCATOR):
        raise _rejected(("archive_zip64", f"The archive is a zip64 file. {FIX}"))
    if entries > MAX_ENTRIES or directory_bytes > MAX_DIRECTORY_BYTES:
        raise _rejected(("archive_entries", f"The archive has too many entries. {FIX}"))


def _check_entries(entries: list[zipfile.ZipInfo]) -> None:
    reasons = [reason for entry in entries for reason in _faults(entry)]
    reasons += _clashes([entry.orig_filename for entry in entries])
    names = {entry.orig_filename for entry in entries}
    reasons += [
        ("archive_missing", f"The archive has no {name}. {FIX}")
        for name in REQUIRED
        if name not in names
    ]
    if reasons:
        raise _rejected(*reasons)


def _faults(entry: zipfile.ZipInfo) -> Iterator[Reason]:
    """What is wrong with one entry, by its raw name, mode, flags and method."""
    name, shown = entry.orig_filename, _shown(entry.orig_filename)
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if name.startswith(("/", "\\")) or name[1:2] == ":":
        yield "archive_path", f"The entry {shown} has an absolute path. {FIX}"
    elif ".." in name.replace("\\", "/").split("/"):
        yield "archive_path", f"The entry {shown} leads out of the archive. {FIX}"
    elif "/" in name or "\\" in name:
        yield "archive_nesting", f"The entry {shown} is in a folder. {FIX}"
    elif name.endswith(PICKLES):
        yield (
            "archive_pickle",
            f"The entry {shown} is a pickle, which may run code. {CONVERT} {FIX}",
        )
    elif name not in REQUIRED + OPTIONAL:
        yield "archive_name", f"The entry {shown} is not part of an adapter. {FIX}"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        yield "archive_link", f"The entry {shown} is a link or a device, not a file. {FIX}"
    if entry.header_offset < 0:
        yield "archive_broken", f"The entry {shown} begins before the archive."
    if entry.flag_bits & 0x1:
        yield "archive_encrypted", f"The entry {shown} is encrypted. {FIX}"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        yield "archive_method", f"The entry {shown} is not stored or deflated. {FIX}"


def _clashes(names: list[str]) -> list[Reason]:
    """Names that are there twice, or would be on a disk that ignores case."""
    folded = [name.casefold() for name in names]
    twice = sorted({name for name in folded if folded.count(name) > 1})
    return [("archive_clash", f"The name {_shown(name)} is there twice. {FIX}") for name in twice]


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 80 else f"{name[:80]}…")


def _extract(archive: zipfile.ZipFile, target: Path, max_bytes: int) -> None:
    left = max_bytes
    for name in REQUIRED:
        with archive.open(name) as packed, (target / name).open("xb") as out:
            while chunk := packed.read(CHUNK):
                left -= len(chunk)
                if left < 0:
                    raise TooLarge(f"The archive unpacks to more than {max_bytes} bytes.")
                out.write(chunk)


def _rejected(*reasons: Reason) -> AdapterRejected:
    return AdapterRejected(reasons, param="archive")
