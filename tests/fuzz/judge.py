"""Judges what the gate took, by other means: the official reader, PEFT's rules, dense products.

Knows formats from their documents. Refuses to use the gate's own readers, apart from what reads a
finished image. Load it with `runpy.run_path`.
"""

import io
import json
import math
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from loraplex.engine.images import PROJECTIONS, BaseManifest, read_image

SERVED = {"bf16": "<u2", "fp32": "<f4", "int8": "i1"}
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
Arrays = dict[str, Any]


def unpacked(archive: bytes, source: Path) -> None:
    """What was unpacked is what the entries hold, and nothing in the archive is of another kind."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        names = [info.filename for info in opened.infolist()]
        assert len({name.casefold() for name in names}) == len(names)
        assert set(names) <= {"adapter_config.json", "adapter_model.safetensors", "README.md"}
        assert not any((i.external_attr >> 28) not in (0, 4, 8) for i in opened.infolist())
        for path in source.iterdir():
            assert opened.read(path.name) == path.read_bytes()


def accepted(source: Path, image: Path, digest: str, base: BaseManifest) -> None:
    """The image adds what PEFT adds by this configuration and these tensors, and nothing else."""
    config = json.loads((source / "adapter_config.json").read_bytes(), object_pairs_hook=_unique)
    assert config["peft_type"] == "LORA"
    tensors = _tensors((source / "adapter_model.safetensors").read_bytes())
    header, block = read_image(image, digest)
    assert header.base == base.fingerprint
    entries = {(e.layer, e.projection): e for e in header.entries}
    adapted = 0
    for layer in range(base.num_layers):
        for name in base.modules:
            path = f"model.layers.{layer}.self_attn.{name}"
            own = {n: t for n, t in tensors.items() if f"layers.{layer}.self_attn.{name}." in n}
            projection = next(p for p, names in PROJECTIONS.items() if name in names)
            at = PROJECTIONS[projection].index(name)
            entry = entries.get((layer, projection))
            if not _is_target(config, path, layer):
                assert not own
                assert entry is None or entry.slices[at].rank == 0
                continue
            assert entry is not None
            _compare(config, path, own, entry, at, block, header.dtype)
            adapted += len(own)
    assert adapted == len(tensors), "every tensor belongs to a linear"


def _unique(pairs: list[tuple[str, Any]]) -> Arrays:
    assert len({key for key, _ in pairs}) == len(pairs)
    return dict(pairs)


def _tensors(content: bytes) -> Arrays:
    """Through the official reader, which takes the last of duplicates; so those are counted."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size], object_pairs_hook=_unique)
    found = {}
    for name, each in safetensors.deserialize(content):
        stored = np.frombuffer(each["data"], DTYPES[each["dtype"]])
        if each["dtype"] == "BF16":
            stored = (stored.astype("<u4") << 16).view("<f4")
        assert np.isfinite(stored).all()
        assert stored.size > 0
        found[name] = stored.astype(np.float64).reshape(each["shape"])
    assert found.keys() == header.keys() - {"__metadata__"}
    return found


def _is_target(config: Arrays, path: str, layer: int) -> bool:
    """As `check_target_module_exists` of PEFT's tuners."""
    excluded = config.get("exclude_modules") or []
    if _selects(excluded, path):
        return False
    targets = config["target_modules"]
    everything = isinstance(targets, str) and targets.lower() == "all-linear"
    if not everything and not _selects(targets, path):
        return False
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    return layer in ([layers] if isinstance(layers, int) else layers)


def _selects(names: Any, path: str) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Any, path: str, otherwise: Any) -> Any:
    """As `get_pattern_key` of PEFT's: the first key that is the end of the path."""
    for key, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return otherwise


def _compare(
    config: Arrays, path: str, own: Arrays, entry: Any, at: int, block: bytearray, dtype: str
) -> None:
    part = {n.split(".lora_", 1)[1].replace(".default", ""): t for n, t in own.items()}
    a, b = part.pop("A.weight"), part.pop("B.weight")
    rank = _by_pattern(config.get("rank_pattern"), path, config.get("r", 8))
    alpha = _by_pattern(config.get("alpha_pattern"), path, config.get("lora_alpha", 8))
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    assert a.shape == (rank, entry.in_features)
    found = entry.slices[at]
    assert (found.rank, found.out_features) == (rank, len(b))
    ranks = [each.rank for each in entry.slices]
    rows = slice(sum(ranks[:at]), sum(ranks[: at + 1]))
    ours_a = _read(block, entry.a, dtype, sum(ranks), entry.in_features)[rows]
    scale = _read(block, entry.scale, "fp32", sum(ranks))[rows]
    ours_b = _read(block, found.b, dtype, rank, len(b)).T
    off_a, off_b = _rounding(a, dtype, 1), _rounding(b, dtype, 0)
    most = (abs(b) + off_b) @ off_a + off_b @ abs(a) + 1e-6 * abs(b) @ abs(a)
    off = abs((ours_b * scale) @ ours_a - scaling * b @ a)
    assert (off <= 1.01 * abs(scaling) * most + 1e-30).all()
    assert (found.bias >= 0) == bool(config.get("lora_bias")) == ("B.bias" in part)
    if found.bias >= 0:
        bias = scaling * part.pop("B.bias")
        assert np.allclose(_read(block, found.bias, "fp32", len(b)), bias, rtol=1e-6, atol=1e-30)
    assert (found.gain >= 0) == bool(config.get("use_dora"))
    left = {name.removesuffix(".weight") for name in part}
    assert left == ({"magnitude_vector"} if config.get("use_dora") else set())


def _rounding(values: Any, dtype: str, axis: int) -> Any:
    """By how much each number may be off in the image; int8 has a step for each rank."""
    if dtype == "int8":
        return abs(values).max(axis=axis, keepdims=True) / 254 + 0 * values
    return abs(values) * (2.0**-8 if dtype == "bf16" else 0)


def _read(block: bytearray, offset: int, dtype: str, *shape: int) -> Any:
    stored = np.frombuffer(block, SERVED[dtype], math.prod(shape), offset)
    if dtype == "bf16":
        stored = (stored.astype("<u4") << 16).view("<f4")
    return stored.reshape(shape).astype(np.float64)
