"""Parts on disk: whatever fails, what was acknowledged is there, and only that is gone on with."""

import errno
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.platform import upload_parts
from loraplex.platform.errors import Conflict, StillRunning, StorageFull, TooLarge, WrongOffset
from loraplex.platform.upload_parts import PartFolder

LIMIT = 40
CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Piece = st.tuples(st.binary(max_size=16), st.none() | st.integers(0, 16))


@pytest.fixture
def folder(tmp_path) -> PartFolder:
    made = PartFolder(tmp_path / "upl_one")
    made.make()
    return made


@settings(deadline=None, max_examples=40)
@given(st.lists(Piece, max_size=8), st.sampled_from(CODES))
def test_pieces_add_up_whatever_the_disk_takes_of_each(pieces, code):
    """`room` bytes of a piece fit, then the disk is full; the client goes on from the offset."""
    with tempfile.TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        folder, wanted = PartFolder(Path(path) / "upl_one"), b""
        folder.make()
        for piece, room in pieces:
            _limit_disk(patch, room, code)
            fits = piece if room is None else piece[:room]
            writer = folder.open("archive", len(wanted), 1000)
            if fits == piece:
                writer.write(piece)
            else:
                with pytest.raises(StorageFull):
                    writer.write(piece)
            assert writer.close() == len(wanted + fits)
            wanted += fits
            assert folder.file("archive").read_bytes() == wanted
            assert folder.offsets() == {"archive": len(wanted)}


def _limit_disk(patch, room: int | None, code: int) -> None:
    def write(descriptor: int, data: memoryview) -> int:
        nonlocal room
        if room is None:
            return real(descriptor, data[:5])  # short writes are writes
        if room == 0 and data:
            raise OSError(code, "full")
        written = real(descriptor, data[:room])
        room -= written
        return written

    patch.undo()
    real = upload_parts.write
    patch.setattr(upload_parts, "write", write)


def test_a_disk_that_is_really_full_is_told(tmp_path):
    """The kernel refuses bytes beyond the process's largest file."""
    program = f"""
import resource, sys
from pathlib import Path
from loraplex.platform.errors import StorageFull
from loraplex.platform.upload_parts import PartFolder
folder = PartFolder(Path({str(tmp_path)!r}) / "upl_one")
folder.make()
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {resource.RLIM_INFINITY}))
writer = folder.open("archive", 0, 1 << 20)
try:
    writer.write(b"x" * 4000)
except StorageFull:
    assert writer.close() == 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, ({resource.RLIM_INFINITY},) * 2)
    writer = folder.open("archive", 1000, 1 << 20)
    writer.write(b"x" * 3000)
    print(writer.close(), folder.offsets())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "4000 {'archive': 4000}\n"


def test_only_the_end_of_a_part_is_gone_on_with_and_by_one(folder):
    first = folder.open("archive", 0, LIMIT)
    with pytest.raises(StillRunning):
        folder.open("archive", 0, LIMIT)
    first.write(b"12345")
    first.close()
    for offset in (0, 4, 6):
        with pytest.raises(WrongOffset) as caught:
            folder.open("archive", offset, LIMIT)
        assert caught.value.headers["upload-offset"] == "5"
    second = folder.open("archive", 5, LIMIT)
    second.write(b"6" * 35)
    with pytest.raises(TooLarge):
        second.write(b"7")
    assert second.close() == LIMIT


def test_a_link_in_a_parts_place_is_not_followed(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"")
    folder.file("archive").symlink_to(outside)
    with pytest.raises(OSError, match="symbolic"):
        folder.open("archive", 0, LIMIT)
    assert outside.read_bytes() == b""


def is_refused(folder: PartFolder) -> bool:
    with pytest.raises(Conflict):
        folder.open("archive", 5, LIMIT)
    return True


@pytest.mark.parametrize(
    ("step", "look"),
    [
        ("open", lambda folder: folder.offsets() == {}),
        ("stat", lambda folder: folder.check_offset("archive", 0) is None),
        ("open", is_refused),
    ],
    ids=["offsets", "check_offset", "open"],
)
def test_a_folder_that_goes_while_one_looks_has_no_parts(folder, monkeypatch, step, look):
    """An upload is closed in the midst of a request that asks for it."""
    writer = folder.open("archive", 0, LIMIT)
    writer.write(b"12345")
    writer.close()
    real = getattr(os, step)

    def removing(*given, **options):
        monkeypatch.setattr(os, step, real)
        folder.remove()
        return real(*given, **options)

    monkeypatch.setattr(os, step, removing)
    assert look(folder)
    assert not folder.exists(), "it went under way"


def test_the_folder_is_its_owners_only_and_goes_with_all_in_it(folder):
    assert folder.path.stat().st_mode & 0o077 == 0
    folder.open("archive", 0, LIMIT).close()
    assert folder.file("archive").stat().st_mode & 0o077 == 0
    for _ in range(2):
        folder.remove()
        assert not folder.exists()
    assert folder.offsets() == {}
