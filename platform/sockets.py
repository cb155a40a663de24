"""Where unix sockets live: in a private folder, under a path short enough for the kernel.

Knows paths and modes; refuses to know who listens.
"""

import hashlib
import os
import stat
import tempfile
from pathlib import Path

MAX_PATH = 107  # bytes; the kernel's limit


def socket_path(folder: Path, name: str) -> Path:
    """Return `folder/name`, or a stand-in below the system's temporary directory if too long.

    The folder is made, with mode 0700. Raises `OSError`, and `PermissionError` for a folder that is
    somebody else's.
    """
    wanted = folder.absolute() / name
    if len(os.fsencode(wanted)) > MAX_PATH:
        digest = hashlib.sha256(os.fsencode(wanted)).hexdigest()[:16]
        wanted = Path(tempfile.gettempdir()) / f"loraplex-{os.geteuid()}-{digest}" / name
    make_private(wanted.parent)
    return wanted


def make_private(folder: Path) -> None:
    """Make a folder that only we can enter; refuses one that others could have prepared."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a folder of ours; remove it")
    folder.chmod(0o700)
