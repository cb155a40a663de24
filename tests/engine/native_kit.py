"""Tiny models and adapters for the native step, and what they must compute, in fp64.

`dense_logits` is the decoder written down once more without pages, batches and packing.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from loraplex.engine.checkpoint import tensor_shapes
from loraplex.engine.image_builder import ImageBuilder, SliceData
from loraplex.engine.images import PROJECTIONS, read_image
from loraplex.engine.model.adapter import projection_sizes
from loraplex.engine.model.config import ModelConfig, ModelError, RopeConfig
from loraplex.engine.model.rotary import rotary_tables
from loraplex.engine.native.executor import NativeExecutor, Team
from loraplex.engine.native.weights import choose_precision, pack_base
from loraplex.kernels.cpu.library import load_library

BLOCK_SIZE, MAX_ROWS = 16, 512
TINY = ModelConfig(
    vocab_size=97, hidden_size=52, intermediate_size=75, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=16, max_positions=600, norm_eps=1e-6, rope=RopeConfig(10000.0), windows=(None, None),
    tied=False, qk_norm=False, qkv_bias=False, o_bias=False, mlp_bias=False,
)  # fmt: skip


@dataclasses.dataclass
class Tiny:
    """A model of random bf16 numbers, and a source of weights as `pack_base` wants it."""

    config: ModelConfig
    tensors: dict[str, Tensor]

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name not in self.tensors:
            raise ModelError(f"the weights lack {name}")
        assert tuple(self.tensors[name].shape) == shape
        return self.tensors[name].to(dtype)

    def skip(self, suffix: str) -> None: ...

    def close(self) -> None: ...

    def save(self, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
        stored = {name: tensor.to(dtype) for name, tensor in self.tensors.items()}
        safetensors.torch.save_file(stored, directory / "model.safetensors")
        return directory

    def double(self, name: str) -> Tensor | None:
        found = self.tensors.get(name)
        return None if found is None else found.double()


def tiny(seed: int = 0, **changes: Any) -> Tiny:
    """A model like `TINY` with `changes`; its numbers are exact in bf16."""
    config = dataclasses.replace(TINY, **changes)
    if len(config.windows) != config.num_layers:
        config = dataclasses.replace(config, windows=(None,) * config.num_layers)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config):
        spread = 0.15 if len(shape) == 1 else 1.2 * shape[1] ** -0.5
        values = torch.randn(shape, generator=generator) * spread + ("norm" in name)
        tensors[name] = values.bfloat16().float()
    return Tiny(config, tensors)


def executor(
    model: Tiny,
    *,
    isa: str | None = None,
    dtype: str = "float32",
    quantization: str = "none",
    stored_bf16: bool = True,
    threads: int = 1,
    cores: tuple[int, ...] = (),
    blocks: int = 200,
    room: int = 1 << 30,
    block_size: int = BLOCK_SIZE,
    activations: int | None = None,
    w8a8_kind: int | None = None,
    kv_dtype: torch.dtype | None = None,
    adjust: Callable[[Any], object] = lambda struct: None,
) -> NativeExecutor:
    """A native executor of a model; `adjust` may change the struct `Model` before it starts.

    `activations` is what rows are rounded to for bf16 weights, `w8a8_kind` how int8 weights are
    kept for rows of int8; by default what suits the machine.
    """
    library = load_library(isa)
    activations = library.activations if activations is None else activations
    precision = choose_precision(
        dtype, quantization, stored_bf16=stored_bf16, activations=activations,
        w8a8_kind=library.w8a8_kind if w8a8_kind is None else w8a8_kind, kv_dtype=kv_dtype,
    )  # fmt: skip
    base = pack_base(model, model.config, precision, library, model.config.max_positions)
    adjust(base.struct)
    base.struct.block_size = block_size
    return NativeExecutor(
        base, library, block_size=block_size, num_blocks=blocks, max_rows=MAX_ROWS,
        memory_bytes=blocks * library.kv_block_bytes(base.struct) + room,
        max_wanted=MAX_ROWS, team=Team(threads, cores),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Lora:
    """An adapter's part in one linear; what is None is absent."""

    a: Tensor | None = None  # [rank, in]
    b: Tensor | None = None  # [rank, out]
    scale: Tensor | None = None  # [rank]
    gain: Tensor | None = None  # [out]
    bias: Tensor | None = None  # [out]


Adapter = Mapping[tuple[int, str], Lora]  # by layer and linear


def adapter(
    config: ModelConfig,
    ranks: Sequence[int],
    *,
    seed: int = 0,
    dtype: str = "fp32",
    rows: bool = False,
    strength: float = 1.0,
) -> Adapter:
    """An adapter with one of `ranks`, in turn, for each linear; with `rows`, gains and biases.

    Its numbers are those that an image of `dtype` holds.
    """
    generator = torch.Generator().manual_seed(seed + 1000)

    def randn(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator)
        if dtype == "int8":
            return (values * 40).round().clamp(-127, 127)
        return values.bfloat16().float() if dtype == "bf16" else values

    found, place = {}, 0
    for layer in range(config.num_layers):
        for projection, names in PROJECTIONS.items():
            wide, outs = projection_sizes(config)[projection]
            for name, out in zip(names, outs, strict=True):
                rank = ranks[place % len(ranks)]
                place += 1
                unit = (40.0 if dtype == "int8" else 1.0) ** 2 * max(rank, 1) ** 0.5 * wide**0.5
                spread = torch.rand(rank, generator=generator) + 0.5
                found[layer, name] = Lora(
                    randn(rank, wide) if rank else None,
                    randn(rank, out) if rank else None,
                    spread * strength / unit if rank else None,
                    torch.rand(out, generator=generator) * 0.2 + 0.9 if rows else None,
                    torch.randn(out, generator=generator) * 0.1 if rows else None,
                )
    return found


def write_image(path: Path, config: ModelConfig, lora: Adapter, dtype: str) -> str:
    """Write an adapter as an image; its digest. Projections without anything are left out."""
    builder = ImageBuilder("f" * 64, dtype)  # type: ignore[arg-type]
    for layer in range(config.num_layers):
        for projection, names in PROJECTIONS.items():
            wide, outs = projection_sizes(config)[projection]
            parts = [lora.get((layer, name), Lora()) for name in names]
            if all(part == Lora() for part in parts):
                continue
            a = b"".join(_bytes(part.a, dtype) for part in parts)
            scale = b"".join(_bytes(part.scale) for part in parts)
            slices = [
                SliceData(
                    0 if part.a is None else len(part.a),
                    out,
                    _bytes(part.b, dtype),
                    None if part.gain is None else _bytes(part.gain),
                    None if part.bias is None else _bytes(part.bias),
                )
                for part, out in zip(parts, outs, strict=True)
            ]
            builder.add(layer, projection, wide, a, scale, slices)
    return builder.finish(path)


def add_image(target: Any, name: str, config: ModelConfig, lora: Adapter, dtype: str) -> None:
    """Make an adapter resident in an executor under `name`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image"
        digest = write_image(path, config, lora, dtype)
        target.add_image(name, target.prepare_image(*read_image(path, digest)))


def _bytes(tensor: Tensor | None, dtype: str = "fp32") -> bytes:
    if tensor is None:
        return b""
    if dtype == "bf16":
        return tensor.bfloat16().view(torch.int16).numpy().tobytes()
    return tensor.numpy().astype(np.int8 if dtype == "int8" else np.float32).tobytes()


def dense_logits(
    model: Tiny,
    tokens: Sequence[int],
    lora: Adapter | None = None,
    *,
    attention_softcap: float = 0.0,
    logit_softcap: float = 0.0,
    rotary_dim: int | None = None,
    kept: Callable[[Tensor], Tensor] = lambda kv: kv,
) -> Tensor:
    """Logits `[T, vocabulary]` fp64 of all tokens of a sequence.

    `kept` is what the cache makes of keys and values `[T, KV heads, D]`.
    """
    config, get = model.config, model.double
    rotary_dim = rotary_dim or config.head_dim
    cos, sin = (t.double() for t in rotary_tables(config.rope, rotary_dim, len(tokens)))
    x = _need(get("model.embed_tokens.weight"))[torch.tensor(tokens)]

    def linear(x: Tensor, layer: int, block: str, name: str) -> Tensor:
        prefix = f"model.layers.{layer}.{block}.{name}"
        y = x @ _need(get(f"{prefix}.weight")).T
        part = (lora or {}).get((layer, name), Lora())
        if part.a is not None and part.b is not None and part.scale is not None:
            y = y + (x @ part.a.double().T * part.scale.double()) @ part.b.double()
        for row, join in ((part.gain, torch.mul), (part.bias, torch.add)):
            y = y if row is None else join(y, row.double())
        bias = get(f"{prefix}.bias")
        return y if bias is None else y + bias

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, True) + config.norm_eps).rsqrt() * _need(get(name))

    def turn(x: Tensor) -> Tensor:
        half = rotary_dim // 2
        a, b, rest = x.split([half, half, config.head_dim - rotary_dim], -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s, rest], -1)

    def heads(x: Tensor, layer: int, name: str, normed: bool) -> Tensor:
        found = linear(x, layer, "self_attn", f"{name}_proj").unflatten(-1, (-1, config.head_dim))
        weight = f"model.layers.{layer}.self_attn.{name}_norm.weight"
        return norm(found, weight) if normed and config.qk_norm else found

    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        normed = norm(x, f"{prefix}.input_layernorm.weight")
        q, k = (turn(heads(normed, layer, name, True)) for name in "qk")
        v, group = heads(normed, layer, "v", False), config.num_heads // config.num_kv_heads
        k, v = (kept(t).repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * config.head_dim**-0.5
        scores = _cap(scores, attention_softcap) + _mask(len(tokens), config.windows[layer])
        out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
        x = x + linear(out, layer, "self_attn", "o_proj")
        normed = norm(x, f"{prefix}.post_attention_layernorm.weight")
        gate, up = (linear(normed, layer, "mlp", f"{name}_proj") for name in ("gate", "up"))
        x = x + linear(torch.nn.functional.silu(gate) * up, layer, "mlp", "down_proj")
    head = get("model.embed_tokens.weight" if config.tied else "lm_head.weight")
    return _cap(norm(x, "model.norm.weight") @ _need(head).T, logit_softcap)


def _need(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _cap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def _mask(length: int, window: int | None) -> Tensor:
    age = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (age < 0) | (age >= (window or length))
    return torch.zeros(length, length).double().masked_fill_(hidden, -torch.inf)


def tokens(length: int, seed: int = 0, vocabulary: int = 97) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (length,), generator=generator).tolist()
