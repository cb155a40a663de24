"""Turns a GGUF file into a model directory, once; Transformers does the work.

This file knows the GGUF header and Transformers' GGUF reader. It refuses to know the engine.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import functools
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from loraplex.engine.checkpoint import PrepareError, check_architecture

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by type
_STRING, _ARRAY = 8, 9
_MAX_STRING = 1 << 20


def read_architecture(path: Path) -> str:
    """Value of `general.architecture`; raises `PrepareError` when the file is not a GGUF."""
    try:
        with path.open("rb") as file:
            return _find_architecture(file)
    except (ValueError, KeyError, struct.error) as error:
        raise PrepareError(f"{path} is not a GGUF file that can be read") from error


def _find_architecture(file: IO[bytes]) -> str:
    magic, _version, _tensors, pairs = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF":
        raise ValueError(magic)
    for _ in range(pairs):
        key, kind = _string(file), _number(file, "<I")
        if key == b"general.architecture" and kind == _STRING:
            return _string(file).decode()
        _skip(file, kind)
    raise KeyError("general.architecture")


def _skip(file: IO[bytes], kind: int) -> None:
    if kind == _STRING:
        _string(file)
    elif kind == _ARRAY:
        item, count = _number(file, "<I"), _number(file, "<Q")
        if item in _SCALARS:
            file.seek(_SCALARS[item] * count, 1)
        else:
            for _ in range(count):
                _skip(file, item)
    else:
        file.seek(_SCALARS[kind], 1)


def _string(file: IO[bytes]) -> bytes:
    length = _number(file, "<Q")
    if length > _MAX_STRING:
        raise ValueError(length)
    return file.read(length)


def _number(file: IO[bytes], form: str) -> int:
    (value,) = struct.unpack(form, file.read(struct.calcsize(form)))
    return int(value)


def convert(path: Path, target: Path, report: Callable[[str], None]) -> None:
    """Write `target` (replacing it) as bfloat16 safetensors with the tokenizer and chat template.

    Raises `PrepareError` when the file cannot be read or is of an unsupported architecture.
    """
    check_architecture(read_architecture(path), path)
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        _convert(path, part, report)
    except Exception as error:  # the reader raises whatever its parts raise on a damaged file
        shutil.rmtree(part, ignore_errors=True)
        raise PrepareError(f"{path} cannot be converted: {error}") from error
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)


def _convert(path: Path, target: Path, report: Callable[[str], None]) -> None:
    report("loading Transformers")
    torch, transformers = _libraries()
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
    }
    with _parsing_once():
        report(f"reading {path.name} ({path.stat().st_size / 1e6:.0f} MB); once, about a minute")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **source,
            quantization_config=transformers.GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        report("writing bfloat16 weights")
        model.save_pretrained(target)
        report("converting the tokenizer")
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(target)


def _libraries() -> tuple[Any, Any]:
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    import transformers

    logging: Any = transformers.logging
    logging.set_verbosity_error()
    return torch, transformers


@contextmanager
def _parsing_once() -> Iterator[None]:
    """Remember what `gguf` parsed: Transformers opens the file three times, at ten seconds each."""
    import gguf

    plain = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in plain.items():
        setattr(gguf, name, functools.cache(function))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(gguf, name, function)
