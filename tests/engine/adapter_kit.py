"""What the compiler's tests of bad uploads share: a tiny adapter without a model, and a judge.

Test folders are not on the import path: use `runpy.run_path`.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from loraplex.engine.compile_adapter import compile_adapter
from loraplex.engine.images import BaseManifest
from loraplex.engine.reasons import Rejected

SIZES = {"q_proj": (8, 8), "k_proj": (8, 4), "v_proj": (8, 4), "o_proj": (8, 8)}
BASE = BaseManifest("tiny", "/nowhere", "f" * 64, 2, 8, 16, 32, (2,), SIZES)
PREFIX = "base_model.model.model.layers"
Q0 = f"{PREFIX}.0.self_attn.q_proj"
Q1 = f"{PREFIX}.1.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}

Fields = dict[str, Any]
Tensors = dict[str, np.ndarray]


def tensors(rank: int = 2, names: tuple[str, ...] = ("q_proj", "v_proj")) -> Tensors:
    random = np.random.default_rng(0)
    found = {}
    for layer in range(BASE.num_layers):
        for name in names:
            wide_in, wide_out = SIZES[name]
            linear = f"{PREFIX}.{layer}.self_attn.{name}"
            found[f"{linear}.lora_A.weight"] = random.normal(size=(rank, wide_in))
            found[f"{linear}.lora_B.weight"] = random.normal(size=(wide_out, rank))
    return {name: tensor.astype(np.float32) for name, tensor in found.items()}


def write(source: Path, config: Fields | bytes, weights: Tensors | bytes) -> Path:
    source.mkdir(exist_ok=True)
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    content = weights if isinstance(weights, bytes) else safetensors.numpy.save(weights)
    (source / "adapter_config.json").write_bytes(text)
    (source / "adapter_model.safetensors").write_bytes(content)
    return source


def raw(header: object, block: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + block


def reasons(source: Path) -> dict[str, str]:
    """The reasons for which `source` is refused; no image may be left behind."""
    with pytest.raises(Rejected) as rejected:
        compile_adapter(source, BASE, source / "image")
    assert not list(source.glob("image*"))
    found = {reason.code: reason.message for reason in rejected.value.reasons}
    assert all(len(message) < 1000 and message.endswith(".") for message in found.values())
    return found
