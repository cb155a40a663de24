"""Opens a PEFT adapter's files in a folder below a root, and never one outside it.

Links are followed where they stay below the root, as those in a Hugging Face cache do. What was
found is then opened name by name without following any, so that a link which is put there meanwhile
leads nowhere. Knows paths; refuses to know who may use which root.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from loraplex.platform.errors import NotFound

Key = TypeVar("Key", bound=str)


def open_files(root: Path, asked: str, names: Mapping[Key, str]) -> dict[Key, int]:
    """Descriptors, for reading, of the files `names` (by part) in the folder `asked`.

    `asked` is relative to `root`, or absolute. Raises `NotFound`, always the same, where a file is
    absent, is no regular file, or is not below `root`.
    """
    opened: dict[Key, int] = {}
    try:
        for part, name in names.items():
            opened[part] = _open(root.resolve(strict=True), root / asked / name)
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: NUL; RuntimeError: a loop
        for descriptor in opened.values():
            os.close(descriptor)
        raise NotFound(
            f"No adapter found for {asked[:256]!r}. It must be a folder with "
            f"{' and '.join(names.values())} below the one that the operator has set for you.",
            param="lora_path",
        ) from error
    return opened


def _open(root: Path, path: Path) -> int:
    *folders, name = path.resolve(strict=True).relative_to(root).parts
    here = os.open(root, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            below = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = below
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return _regular(os.open(name, flags, dir_fd=here))
    finally:
        os.close(here)


def _regular(descriptor: int) -> int:
    """The same descriptor, of a regular file; raises `OSError` and closes any other."""
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise FileNotFoundError("not a regular file")
