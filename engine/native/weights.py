"""The base's weights, packed for the native step.

The weights are read one by one and freed as soon as they are packed, several at a time. What holds
for `engine.model.decoder` holds here: a tensor that is missing, left over or of another shape is
refused. This file knows tensors' names; it refuses to know batches, blocks and images.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from loraplex.engine.checkpoint import tensor_shapes, weight_files
from loraplex.engine.model.config import ModelConfig
from loraplex.engine.model.rotary import rotary_tables
from loraplex.engine.native.memory import Memory, aligned
from loraplex.kernels.cpu import library as abi
from loraplex.kernels.cpu.library import Library

LINEARS = {  # of a layer: field of the struct → name in the checkpoint
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
KV_KINDS = {torch.bfloat16: abi.BF16, torch.float32: abi.FP32, torch.int8: abi.INT8}

Shape = tuple[int, ...]


class Weights(Protocol):
    """Where tensors come from, such as `engine.model.weights.Checkpoint`."""

    def read(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        """A tensor as `dtype`; raises `ModelError`."""
        ...

    def skip(self, suffix: str) -> None:
        """Leave tensors with this ending unread."""
        ...

    def close(self) -> None:
        """Raise `ModelError` when a tensor was not read."""
        ...


@dataclass(frozen=True)
class Precision:
    """How the base is kept and computed: `kind` and `activations` as in `abi.h`."""

    kind: int
    activations: int
    dtype: torch.dtype  # of the embedding and what is not a matrix
    kv_dtype: torch.dtype  # of the KV cache; int8 as in `kernels.kv_rows`
    name: str  # as the engine reports it

    @property
    def matrix_dtype(self) -> torch.dtype:
        """Dtype of what a matrix is packed from."""
        return torch.float32 if self.kind == abi.FP32 else torch.bfloat16


def choose_precision(
    dtype: str,
    quantization: str,
    *,
    stored_bf16: bool,
    activations: int,
    w8a8_kind: int = abi.QUANT8,
    kv_dtype: torch.dtype | None = None,
) -> Precision:
    """The precision that the settings ask for; "auto" is bfloat16.

    `activations` is what the machine's library best rounds rows to for products with bf16 weights,
    `w8a8_kind` how it best keeps int8 weights for rows of int8.
    float32 with weights that are `stored_bf16` keeps them as they are: the products are the same.
    KV is kept in the computation's dtype unless `kv_dtype` is given.
    """
    wide = torch.float32 if dtype == "float32" else torch.bfloat16
    kv = kv_dtype or wide
    if quantization == "int8":
        return Precision(abi.QUANT8, abi.ACT_INT16, wide, kv, quantization)
    if quantization != "none":
        return Precision(w8a8_kind, abi.ACT_INT8, wide, kv, quantization)
    if wide == torch.float32:
        kind = abi.BF16 if stored_bf16 else abi.FP32
        return Precision(kind, abi.ACT_FP32, wide, kv, "float32")
    kind = abi.FIXED16 if activations == abi.ACT_INT16 else abi.BF16
    return Precision(kind, activations, wide, kv, "bfloat16")


def are_bf16(directory: Path) -> bool:
    """Whether all matrices of a checkpoint are stored as bfloat16."""
    return all(dtype == "BF16" for path in weight_files(directory) for dtype in _dtypes(path))


def _dtypes(path: Path) -> Iterator[str]:
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            if len(part.get_shape()) == 2:
                yield part.get_dtype()


@dataclass(frozen=True)
class _Job:
    """A matrix to be packed."""

    name: str
    shape: tuple[int, int]
    address: int


@dataclass(frozen=True)
class PackedBase:
    """A base in memory; `struct` has no KV cache yet."""

    config: ModelConfig
    precision: Precision
    struct: abi.Model
    arena: Memory


def pack_base(
    weights: Weights,
    config: ModelConfig,
    precision: Precision,
    library: Library,
    positions: int,
    threads: int = 1,
) -> PackedBase:
    """Read and pack all weights, `threads` matrices at a time; raises `ModelError`."""
    packer = _Packer(weights, config, precision, library, positions)
    struct = packer.model()
    with ThreadPoolExecutor(threads, thread_name_prefix="pack") as pool:
        list(pool.map(packer.run, packer.jobs))
    if config.tied:
        weights.skip(HEAD)
    weights.skip("rotary_emb.inv_freq")
    weights.close()
    return PackedBase(config, precision, struct, packer.arena)


class _Packer:
    """Lays a base out in one arena; matrices become jobs, all else is written at once."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        precision: Precision,
        library: Library,
        positions: int,
    ) -> None:
        self._weights, self._config = weights, config
        self._precision, self._library = precision, library
        self._positions = positions
        self._shapes = dict(tensor_shapes(config))
        self.arena = Memory(self._total_bytes())
        self.jobs: list[_Job] = []

    def model(self) -> abi.Model:
        config, precision = self._config, self._precision
        layers = (abi.Layer * config.num_layers)(*map(self._layer, range(config.num_layers)))
        cos, sin = rotary_tables(config.rope, config.rotary_dim, self._positions)
        return abi.Model(
            layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            vocab=config.vocab_size,
            rotary_dim=config.rotary_dim,
            kind=precision.kind,
            activations=precision.activations,
            kv_kind=KV_KINDS[precision.kv_dtype],
            norm_eps=config.norm_eps,
            attention_scale=config.head_dim**-0.5,
            layer=layers,
            head=abi.Matrix(self._matrix(EMBEDDING if config.tied else HEAD)),
            norm=self._vector(NORM),
            embedding=self._embedding(),
            embedding_fp32=precision.dtype == torch.float32,
            rotary=self._put(torch.cat([cos, sin], 1)),
        )

    def run(self, job: _Job) -> None:
        """Read and pack one matrix."""
        source = self._weights.read(job.name, job.shape, self._precision.matrix_dtype).contiguous()
        strides = (job.shape[1], 1)
        self._library.pack(self._precision.kind, source.data_ptr(), job.shape, strides, job.address)

    def _layer(self, number: int) -> abi.Layer:
        prefix, window = f"model.layers.{number}", self._config.windows[number]
        matrices = {
            key: abi.Matrix(
                self._matrix(f"{prefix}.{name}.weight"), self._vector(f"{prefix}.{name}.bias")
            )
            for key, name in LINEARS.items()
        }
        norms = {key: self._vector(f"{prefix}.{name}.weight") for key, name in NORMS.items()}
        return abi.Layer(**matrices, **norms, window=window or 0)

    def _matrix(self, name: str) -> int:
        rows, columns = self._shapes[name]
        address = self.arena.take(self._library.packed_bytes(self._precision.kind, rows, columns))
        self.jobs.append(_Job(name, (rows, columns), address))
        return address

    def _vector(self, name: str) -> int | None:
        """An fp32 copy; None where the model has no such tensor."""
        if name not in self._shapes:
            return None
        return self._put(self._weights.read(name, self._shapes[name], self._precision.dtype))

    def _embedding(self) -> int:
        table = self._weights.read(EMBEDDING, self._shapes[EMBEDDING], self._precision.dtype)
        bits = table if table.dtype == torch.float32 else table.view(torch.int16)
        return self.arena.put(bits.numpy())

    def _put(self, tensor: Tensor) -> int:
        return self.arena.put(tensor.float().numpy())

    def _total_bytes(self) -> int:
        config = self._config
        rotary = 4 * self._positions * config.rotary_dim
        embedding = math.prod(self._shapes[EMBEDDING]) * self._precision.dtype.itemsize
        sizes = [rotary, embedding, *map(self._bytes, self._shapes.values())]
        return sum(map(aligned, sizes))

    def _bytes(self, shape: Shape) -> int:
        if len(shape) == 1:
            return 4 * shape[0]
        return self._library.packed_bytes(self._precision.kind, *shape)
