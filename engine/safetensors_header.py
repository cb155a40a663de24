"""The header of a safetensors file from a stranger, checked before anything believes it.

The usual reader takes the last of duplicate keys, shapes with a zero and any name at all; this one
refuses them. It knows the container: names, dtypes, shapes, offsets. It refuses to know what the
tensors are for, and it never reads their contents.
"""

import math
import re
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from loraplex.engine.reasons import Findings, shown
from loraplex.engine.strict_json import JsonError, is_int, parse_object

MAX_HEADER_BYTES = 4 << 20
MAX_TENSORS = 20_000
MAX_DIMENSIONS = 4
ITEM_SIZES = {"F16": 2, "BF16": 2, "F32": 4}
UNPICKLE = (
    "convert it where it was trained, and send the result: "
    'python -c "import torch, safetensors.torch as s; '
    "w = torch.load('adapter_model.bin', map_location='cpu', weights_only=True); "
    "s.save_file({k: v.clone().contiguous() for k, v in w.items()}, "
    "'adapter_model.safetensors')\""
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_PICKLE = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04")
_SAVE_AGAIN = "save the adapter again with PEFT's save_pretrained and send the whole file"
_ONLY_ADAPTER = "save only the adapter's own tensors, with PEFT's save_pretrained"


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: `start` counts bytes from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def read_tensors(path: Path, findings: Findings) -> dict[str, Tensor]:
    """The tensors of a file by name; what is wrong goes to `findings`, and is left out.

    Raises `OSError` when the file cannot be read.
    """
    file_size = path.stat().st_size
    with path.open("rb") as file:
        prefix, text = file.read(8), file.read(MAX_HEADER_BYTES)
    size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not _check_prefix(prefix, size, file_size, findings):
        return {}
    try:
        entries = parse_object(text[:size])
    except JsonError as error:
        findings.reject("weights_header", f"the weights' header is broken: {error}", _SAVE_AGAIN)
        return {}
    return _tensors(entries, 8 + size, file_size, findings)


def _check_prefix(prefix: bytes, size: int, file_size: int, findings: Findings) -> bool:
    """Whether the first eight bytes may be those of a safetensors file: the header's size.

    Pickles and zips begin with bytes that would make it absurd; a sane size may look like theirs.
    """
    if 2 <= size <= min(file_size - 8, MAX_HEADER_BYTES):
        return True
    if _PICKLE.match(prefix):
        findings.reject("weights_pickle", "the weights are a pickle under another name", UNPICKLE)
    elif 2 <= size <= file_size - 8:
        detail = f"the weights' header takes {size} bytes, more than {MAX_HEADER_BYTES}"
        findings.reject("weights_header_too_large", detail, _ONLY_ADAPTER)
    else:
        detail = "the weights are no safetensors file, or one cut short"
        findings.reject("weights_header", detail, _SAVE_AGAIN)
    return False


def _tensors(
    entries: dict[str, Any], block: int, file_size: int, findings: Findings
) -> dict[str, Tensor]:
    if not _is_metadata(entries.pop("__metadata__", {})):
        detail = "__metadata__ in the weights' header is no object of texts"
        findings.reject("weights_header", detail, _SAVE_AGAIN)
    if len(entries) > MAX_TENSORS:
        detail = f"the weights hold {len(entries)} tensors, more than {MAX_TENSORS}"
        findings.reject("weights_too_many_tensors", detail, _ONLY_ADAPTER)
        return {}
    tensors = {n: t for n, e in entries.items() if (t := _tensor(n, e, block, findings))}
    if len(tensors) == len(entries):
        _check_layout(tensors, block, file_size, findings)
    return tensors


def _is_metadata(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _tensor(name: str, entry: object, block: int, findings: Findings) -> Tensor | None:
    if not _NAME.fullmatch(name):
        findings.reject("tensor_name", f"{shown(name)} is no tensor's name", _SAVE_AGAIN)
        return None
    if not _is_entry(entry):
        findings.reject("weights_header", f"the entry of {name} is malformed", _SAVE_AGAIN)
        return None
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in ITEM_SIZES:
        cure = f"cast the adapter to one of {', '.join(ITEM_SIZES)} and save it again"
        findings.reject("tensor_dtype", f"{name} is stored as {shown(dtype)}", cure)
    elif 0 in shape:
        cure = "gather the shards (DeepSpeed ZeRO-3, FSDP) before save_pretrained and save again"
        findings.reject("tensor_empty", f"{name} has the shape {list(shape)}", cure)
    elif end - start != math.prod(shape) * ITEM_SIZES[dtype]:
        detail = f"{name} has {end - start} bytes, which is not what its shape and dtype take"
        findings.reject("weights_layout", detail, _SAVE_AGAIN)
    else:
        return Tensor(dtype, shape, block + start, end - start)
    return None


def _is_entry(entry: object) -> TypeGuard[dict[str, Any]]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return False
    shape, offsets = entry["shape"], entry["data_offsets"]
    return (
        isinstance(entry["dtype"], str)
        and isinstance(shape, list)
        and len(shape) <= MAX_DIMENSIONS
        and isinstance(offsets, list)
        and len(offsets) == 2
        and all(is_int(x) and 0 <= x < 1 << 48 for x in (*shape, *offsets))
    )


def _check_layout(
    tensors: dict[str, Tensor], block: int, file_size: int, findings: Findings
) -> None:
    """Every byte after the header belongs to exactly one tensor."""
    placed = sorted((t.start, t.start + t.size) for t in tensors.values())
    for (_, end), (start, _) in pairwise([(block, block), *placed, (file_size, file_size)]):
        if start != end:
            what = "bytes belong to no tensor" if start > end else "tensors overlap or are cut off"
            detail = f"the weights are not whole: at byte {min(start, end)}, {what}"
            findings.reject("weights_layout", detail, _SAVE_AGAIN)
            return
