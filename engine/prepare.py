"""Prepares a base model: `python -m loraplex.engine.prepare MODEL --out DIR [--name NAME]`.

MODEL is a Hugging Face id (`owner/name` or `owner/name@revision`), a model directory, which is
used in place, or a `.gguf` file, which is converted once into `DIR/model`. The result is
`DIR/base.json`, a `BaseManifest`. Progress goes to stderr; a mistake of the user's ends with one
sentence there and exit code 2. A second run on an unchanged model takes a moment and loads neither
torch nor Transformers; it keeps a downloaded model even if the hub has a newer one.

This file knows where models come from and what has been prepared before. It refuses to know how
a model is run.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from loraplex.engine.checkpoint import (
    PrepareError,
    check_weights,
    linear_sizes,
    read_config,
    read_eos,
    weight_files,
)
from loraplex.engine.fingerprint import Known, Stamp, file_digest, fingerprint
from loraplex.engine.images import BaseManifest

Report = Callable[[str], None]

WANTED = ["*.safetensors", "*.json", "*.jinja"]
UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_QUANTISATION = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)


class Memory(msgspec.Struct):
    """What the last run learnt, in `DIR/prepare.json`, which also marks DIR as Loraplex's own."""

    source: str = ""  # MODEL, as it was resolved
    stamp: Stamp | None = None  # of the GGUF file that was converted
    directory: str = ""
    digests: dict[str, Known] = {}


def prepare(model: str, out: Path, name: str | None = None, report: Report = print) -> BaseManifest:
    """Write `out/base.json` for `model` and return it; raises `PrepareError` or `OSError`.

    The name defaults to the model's own, without owner, extension and quantisation.
    """
    name = _check_name(name or _default_name(model))
    out.mkdir(parents=True, exist_ok=True)
    memory = _recall(out)
    directory = _locate(model, out.resolve(), memory, report)
    manifest = _describe(name, directory, memory, report)
    _write(out / "base.json", manifest)
    _write(out / "prepare.json", memory)
    return manifest


def _default_name(model: str) -> str:
    repo = model.partition("@")[0] if _HUB_ID.fullmatch(model) else model
    last = Path(repo).expanduser().absolute().name
    return _QUANTISATION.sub("", last[:-5]) if last.lower().endswith(".gguf") else last


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PrepareError(
            f"{name!r} cannot name a base: use letters, digits, '.', '_' and '-' (see --name)"
        )
    return name


def _recall(out: Path) -> Memory:
    try:
        return msgspec.json.decode((out / "prepare.json").read_bytes(), type=Memory)
    except (FileNotFoundError, msgspec.DecodeError):
        return Memory()


def _write(path: Path, content: msgspec.Struct) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    part.replace(path)


def _locate(model: str, out: Path, memory: Memory, report: Report) -> Path:
    """Directory of the model's files, fetched or converted if need be."""
    path = Path(model).expanduser().absolute()
    if path.is_dir():
        return path
    if path.is_file():
        return _convert(path, out, memory, report)
    match = _HUB_ID.fullmatch(model)
    if match and not model.startswith(".") and not model.lower().endswith(".gguf"):
        return _download(match["repo"], match["revision"], memory, report)
    raise PrepareError(f"{model} does not exist; a Hugging Face id has the form owner/name")


def _convert(path: Path, out: Path, memory: Memory, report: Report) -> Path:
    from loraplex.engine.gguf_file import convert

    target, stamp = out / "model", Stamp.of(path)
    if target.is_dir() and (memory.source, memory.stamp) == (str(path), stamp):
        return target
    if target.exists() and not (out / "prepare.json").exists():
        raise PrepareError(f"{target} exists and is not Loraplex's own; choose another --out")
    _write(out / "prepare.json", Memory())
    convert(path, target, report)
    memory.source, memory.stamp, memory.directory = str(path), stamp, str(target)
    return target


def _download(repo: str, revision: str | None, memory: Memory, report: Report) -> Path:
    source = f"hub:{repo}@{revision or ''}"
    whole = memory.digests and all(Path(path).is_file() for path in memory.digests)
    if memory.source != source or not whole:
        report(f"downloading {repo} from the Hugging Face hub")
        memory.directory = _snapshot(repo, revision)
        memory.source, memory.stamp = source, None
    return Path(memory.directory)


def _snapshot(repo: str, revision: str | None) -> str:
    from huggingface_hub import snapshot_download

    try:
        return str(
            snapshot_download(
                repo, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED
            )
        )
    except Exception as error:  # the hub's, the HTTP client's and the file system's own errors
        cause = error.__cause__ or error
        reason = str(cause).strip().partition("\n")[0] or type(cause).__name__
        raise PrepareError(f"{repo} cannot be downloaded: {reason}") from error


def _describe(name: str, directory: Path, memory: Memory, report: Report) -> BaseManifest:
    content, config = read_config(directory)
    files = weight_files(directory)
    check_weights(files, config)
    eos = read_eos(directory, content)
    digests = _digests(files, memory, report)
    return BaseManifest(
        name=name,
        path=str(directory),
        fingerprint=fingerprint(content, digests),
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_positions,
        eos_token_ids=eos,
        modules=linear_sizes(config),
    )


def _digests(files: list[Path], memory: Memory, report: Report) -> dict[str, str]:
    """SHA-256 of each file by its name."""
    memory.digests = {
        str(path): file_digest(path, memory.digests.get(str(path)), report) for path in files
    }
    return {path.name: memory.digests[str(path)].sha256 for path in files}


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="loraplex.engine.prepare", description="Prepare a base.")
    parser.add_argument("model", help="Hugging Face id, model directory or .gguf file")
    parser.add_argument("--out", type=Path, required=True, help="directory for base.json")
    parser.add_argument("--name", help="the base's public name")
    options = parser.parse_args(arguments)
    try:
        manifest = prepare(options.model, options.out, options.name, _report)
    except (PrepareError, OSError) as error:
        _report(str(error))
        return 2
    _report(f"{manifest.name} is prepared ({manifest.fingerprint[:12]})")
    return 0


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
