"""What strangers send to the upload gate: good adapters, spoiled in ways that a seed decides.

Knows the three formats, and what has broken readers of them before. Refuses to know the gate: what
it makes may be good or bad, and says only how it was made. Load it with `runpy.run_path`.
"""

import gzip
import json
import pickle
import random
import runpy
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, VOCAB = 2, 32
SIZES = {"q_proj": (8, 8), "k_proj": (8, 4), "v_proj": (8, 4), "o_proj": (8, 8)}
ARCHIVES = runpy.run_path(str(Path(__file__).with_name("archives.py")))
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model.model.layers"
Fields = dict[str, Any]
KINDS: tuple[Fields, ...] = (
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": list(SIZES), "use_rslora": True, "rank_pattern": {"k_proj": 3}},
    {"target_modules": r".*\.(q_proj|o_proj)", "alpha_pattern": {"layers.1.self_attn.q_proj": 5}},
    {"target_modules": ["k_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    {"target_modules": ["q_proj", "k_proj"], "use_dora": True},
    {"target_modules": ["o_proj"], "lora_bias": True, "exclude_modules": ["0.self_attn.o_proj"]},
)
NUMBERS = (0, -0.0, -1, True, None, 1e30, 1e308, 1e-300, 2**31, 2**63, 10**60, 0.5, "8", [], {})
NAMES = (
    "", "../../x<script>", "a\0b", "q_proj\u202e", "\uff51_proj", "Q_PROJ", "__proto__", "x" * 300,
    f"{PREFIX}.9999.self_attn.q_proj.lora_A.weight", f"{PREFIX}.00.self_attn.q_proj.lora_A.weight",
    f"{PREFIX}.0.self_attn.q_proj.lora_A.default.weight", "base_model.model.lm_head.lora_A.weight",
    f"{PREFIX}.0.mlp.q_proj.lora_A.weight", "base_model.model.model.embed_tokens.lora_embedding_A",
    "model.layers.0.self_attn.q_proj.lora_A.weight", "a\r\nset-cookie: b", "__metadata__",
)  # fmt: skip
DTYPES = ("F64", "I8", "U8", "BOOL", "F8_E4M3", "f32", "", None, [], 7, "BF16", "F16", "F32")
SPOILS = ("nothing", "config", "weights", "both", "archive", "bytes")
FEW = (1, 1, 1, 2, 3)
EXTREMES = (float("nan"), float("inf"), float("-inf"), 3.4e38, 1e-45, 6.1e4, 0.0)


@dataclass
class Case:
    """Files by the name that they would have, or one archive; and what was done to them."""

    done: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    archive: bytes | None = None


@dataclass
class Weights:
    """A safetensors file in parts; `entries` may name one tensor twice."""

    entries: list[tuple[str, Any]]
    block: bytearray
    prefix: bytes = b""  # in place of the header's length
    pad: str = ""

    def build(self) -> bytes:
        body = ",".join(f"{json.dumps(n)}:{json.dumps(e)}" for n, e in self.entries)
        text = f"{{{body}}}{self.pad}".encode("utf-8", "surrogatepass")
        return (self.prefix or struct.pack("<Q", len(text))) + text + bytes(self.block)


def make(seed: str) -> Case:
    """The case of a seed."""
    rng, case = random.Random(seed), Case()
    config, weights = _good(rng)
    spoil = rng.choices(SPOILS, (1, 4, 6, 2, 4, 2))[0]
    text = json.dumps(config).encode()
    if spoil in ("config", "both"):
        text = _spoil_config(rng, config, case.done)
    if spoil in ("weights", "both"):
        for _ in range(rng.choice(FEW)):
            _apply(rng, WEIGHT_FAULTS, case.done, weights)
    content = weights.build()
    if spoil == "bytes":
        content = _spoil_bytes(rng, content, case.done)
    case.files = {CONFIG: text, WEIGHTS: content}
    if spoil == "archive" or rng.random() < 0.1:
        case.archive = ARCHIVES["pack"](rng, case.files, case.done)
    return case


def _apply(
    rng: random.Random, faults: tuple[Callable[..., Any], ...], done: list[str], *on: Any
) -> Any:
    fault = rng.choice(faults)
    done.append(fault.__name__.lstrip("_"))
    return fault(rng, *on)


def _good(rng: random.Random) -> tuple[Fields, Weights]:
    """An adapter that any gate takes, in one of the stored formats."""
    config = {"peft_type": "LORA", "r": rng.choice((1, 2, 4)), "lora_alpha": rng.choice((1, 4, 16))}
    config |= rng.choice(KINDS)
    dtype, numbers = rng.choice(("F32", "F16", "BF16")), np.random.default_rng(rng.getrandbits(32))
    entries, block = list[tuple[str, Any]](), bytearray()
    for layer in range(LAYERS):
        for name, (wide_in, wide_out) in SIZES.items():
            if not _covers(config, layer, name):
                continue
            rank = config.get("rank_pattern", {}).get(name, config["r"])
            parts = {"lora_A.weight": (rank, wide_in), "lora_B.weight": (wide_out, rank)}
            if config.get("lora_bias"):
                parts["lora_B.bias"] = (wide_out,)
            if config.get("use_dora"):
                parts["lora_magnitude_vector"] = (wide_out,)
            for part, shape in parts.items():
                data = _stored(numbers.normal(size=shape).astype(np.float32), dtype)
                offsets = [len(block), len(block) + len(data)]
                entry = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
                entries.append((f"{PREFIX}.{layer}.self_attn.{name}.{part}", entry))
                block += data
    return config, Weights(entries, block)


def _covers(config: Fields, layer: int, name: str) -> bool:
    targets = config["target_modules"]
    named = name in targets if isinstance(targets, list) else name in ("q_proj", "o_proj")
    excluded = f"{layer}.self_attn.{name}" in config.get("exclude_modules", ())
    return named and not excluded and layer in config.get("layers_to_transform", range(LAYERS))


def _stored(values: Any, dtype: str) -> bytes:
    if dtype == "BF16":
        return bytes((values.view("<u4") >> 16).astype("<u2").tobytes())
    return bytes(values.astype("<f2" if dtype == "F16" else "<f4").tobytes())


def _header_length(rng: random.Random, w: Weights) -> None:
    size = rng.choice((0, 1, 2, 7, 1 << 16, 1 << 31, 1 << 62, (1 << 64) - 1, rng.getrandbits(64)))
    w.prefix = struct.pack("<Q", size) if rng.random() < 0.8 else rng.randbytes(rng.randint(0, 9))


def _duplicate(rng: random.Random, w: Weights) -> None:
    name, entry = rng.choice(w.entries)
    w.entries.insert(rng.randint(0, len(w.entries)), (name, rng.choice((entry, w.entries[0][1]))))


def _offsets(rng: random.Random, w: Weights) -> None:
    at = rng.randrange(len(w.entries))
    bad: tuple[Any, ...] = (
        [0, len(w.block)], [-4, 4], [8, 0], [0, 1 << 50], [True, 32], [0.0, 32.0], [0], [0, 16, 32],
        "0-32", None, [1 << 63, (1 << 63) + 32], [len(w.block), len(w.block) + 32],
    )  # fmt: skip
    w.entries[at] = (w.entries[at][0], _with(w.entries[at][1], data_offsets=rng.choice(bad)))


def _shape(rng: random.Random, w: Weights) -> None:
    at = rng.randrange(len(w.entries))
    bad: tuple[Any, ...] = (
        [], [0], [0, 8], [-2, -8], [1 << 32, 1 << 32], [1 << 63], [2, 8, 1], [1] * 40, [2.0, 8],
        "2x8", None, [[2, 8]], [8, 2], [16], [True, 16], [4, 4],
    )  # fmt: skip
    w.entries[at] = (w.entries[at][0], _with(w.entries[at][1], shape=rng.choice(bad)))


def _dtype(rng: random.Random, w: Weights) -> None:
    at = rng.randrange(len(w.entries))
    w.entries[at] = (w.entries[at][0], _with(w.entries[at][1], dtype=rng.choice(DTYPES)))


def _entry(rng: random.Random, w: Weights) -> None:
    at = rng.randrange(len(w.entries))
    bad = (None, [], {}, 3, "x", {"dtype": "F32"}, _with(w.entries[at][1], extra=1))
    w.entries[at] = (w.entries[at][0], rng.choice(bad))


def _name(rng: random.Random, w: Weights) -> None:
    at = rng.randrange(len(w.entries))
    w.entries[at] = (rng.choice(NAMES), w.entries[at][1])


def _value(rng: random.Random, w: Weights) -> None:
    for _ in range(rng.choice((1, 1, 40))):
        value = rng.choice(EXTREMES)
        data = struct.pack("<f", value) if rng.random() < 0.7 else struct.pack("<H", 0x7F80)
        at = rng.randrange(max(1, len(w.block) - 4)) // 4 * 4
        w.block[at : at + len(data)] = data


def _zeros(rng: random.Random, w: Weights) -> None:
    for name, entry in w.entries:
        if "lora_B" in name and isinstance(entry, dict) and rng.random() < 0.8:
            start, end = _span(entry, len(w.block))
            w.block[start:end] = bytes(end - start)


def _size(rng: random.Random, w: Weights) -> None:
    if rng.random() < 0.5:
        del w.block[rng.randrange(len(w.block) + 1) :]
    else:
        w.block += rng.randbytes(rng.randint(1, 64))


def _missing(rng: random.Random, w: Weights) -> None:
    del w.entries[rng.randrange(len(w.entries))]
    if not w.entries:
        w.entries.append(("__metadata__", {"format": "pt"}))


def _header_text(rng: random.Random, w: Weights) -> None:
    pads = ("   ", "}", "\0", "{}", " " * (4 << 20), "[" * 90_000, "\ud800", "\n" * 5000, ",")
    w.pad = rng.choices(pads, (9, 9, 9, 9, 1, 9, 9, 9, 9))[0]


def _metadata(rng: random.Random, w: Weights) -> None:
    values: tuple[Any, ...] = ({"format": "pt"}, {"a": 1}, [], "x", {"a": "b" * 5000}, None)
    w.entries.insert(0, ("__metadata__", rng.choice(values)))


def _many(rng: random.Random, w: Weights) -> None:
    count = rng.choices((100, 20_001), (9, 1))[0]
    w.entries += [(f"t{i}", w.entries[0][1]) for i in range(count)]


WEIGHT_FAULTS = (
    _header_length, _duplicate, _offsets, _shape, _dtype, _entry, _name, _value, _zeros, _size,
    _missing, _header_text, _metadata, _many,
)  # fmt: skip


def _with(entry: Any, **changes: Any) -> Any:
    return entry | changes if isinstance(entry, dict) else entry


def _span(entry: Fields, most: int) -> tuple[int, int]:
    offsets = entry.get("data_offsets")
    if not (isinstance(offsets, list) and len(offsets) == 2):
        return 0, 0
    start, end = (min(max(0, int(x)), most) for x in offsets)
    return start, max(start, end)


def _spoil_bytes(rng: random.Random, content: bytes, done: list[str]) -> bytes:
    """Other formats under this name, and bytes changed anywhere."""
    whole = {
        "pickle": pickle.dumps({"lora_A": [1.0]}), "zip": b"PK\x03\x04" + bytes(60), "empty": b"",
        "gzip": gzip.compress(content), "elf": b"\x7fELF" + bytes(80), "text": b"<html>",
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    }  # fmt: skip
    if rng.random() < 0.2:
        kind = rng.choice(sorted(whole))
        done.append(kind)
        return whole[kind]
    done.append("flip")
    changed = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) if rng.random() < 0.3 else 400)
        changed[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
    return bytes(changed)


def _spoil_config(rng: random.Random, config: Fields, done: list[str]) -> bytes:
    """Fields changed, or a text that is no configuration."""
    words = ("q_proj", "(a+)+$", ".*", "[", "\\", "all-linear", "layers", "\u202e", "../x", "")
    values: tuple[Any, ...] = (
        *NUMBERS, *words, list(words), dict.fromkeys(words, 3), ["q_proj"] * 9000, [None], [[]],
        {"q_proj": 0}, {"q_proj": 2**70}, {"q_proj": "x"}, [1], [-1], [10**9], ["q_proj", 3],
    )  # fmt: skip
    names = (
        "r", "lora_alpha", "use_rslora", "use_dora", "lora_bias", "rank_pattern", "alpha_pattern",
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "peft_type",
        "init_lora_weights", "alora_invocation_tokens", "modules_to_save", "bias", "auto_mapping",
        "megatron_config", "base_model_name_or_path", "loftq_config", "\u0131nvented", "task_type",
    )  # fmt: skip
    for _ in range(rng.choice(FEW)):
        name = rng.choice(names)
        done.append(f"config {name}")
        config[name] = rng.choice(values)
    text = json.dumps(config)
    odd = {
        "depth": "[" * 90_000, "integer": text.replace(": ", ": " + "9" * 5000, 1),
        "nan": text[:-1] + ', "lora_dropout": NaN}', "twice": text[:-1] + ', "r": 1}',
        "bom": "\ufeff" + text, "array": f"[{text}]", "tail": text + "x",
        "large": text + " " * 66_000,
        "empty": "", "deep": text[:-1] + ', "auto_mapping": ' + "[" * 900 + "]" * 900 + "}",
        "surrogate": text[:-1] + ', "revision": "\\ud800"}', "huge": text[:-1] + ', "x": 1e999}',
    }  # fmt: skip
    if rng.random() < 0.3:
        kind = rng.choice(sorted(odd))
        done.append(f"config {kind}")
        text = odd[kind]
    coding = "utf-16" if rng.random() < 0.03 else "utf-8"
    return pickle.dumps(config) if rng.random() < 0.02 else text.encode(coding)
