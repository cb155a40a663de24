"""The native step as Python sees it: mirrors of the structs of `abi.h`, and its functions.

Addresses are plain ints. Whoever fills a struct keeps alive what it points to. This file knows the
C ABI; it refuses to know how a struct's contents come about.
"""

import ctypes
import functools
import logging
from ctypes import POINTER, Structure, c_char_p, c_double, c_int64, c_void_p

import numpy as np
from numpy.typing import NDArray

from loraplex.kernels.cpu.build import BuildError, NoCompiler, build
from loraplex.kernels.cpu.isa import BY_NAME, Isa, candidates

ALIGNMENT = 64  # of what is packed
MAX_RANK = 512  # of one linear
PHASES = ("norm", "shrink", "qkv", "attention", "o", "gate_up", "down", "head")

# Kinds of packed matrices.
BF16, FP32, INT8, QUANT8, FIXED16, OFFSET8 = range(6)
# What the rows that enter a base matrix are rounded to.
ACT_FP32, ACT_BF16, ACT_INT16, ACT_INT8 = range(4)

log = logging.getLogger(__name__)


class Matrix(Structure):
    """A packed matrix `[n, k]` and its optional bias `[n]`, fp32."""

    _fields_ = (("panels", c_void_p), ("bias", c_void_p))


class Layer(Structure):
    """One layer's weights; norms are fp32."""

    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        ("window", c_int64),
    )


class Model(Structure):
    """A whole decoder and its KV cache."""

    _fields_ = (
        *((name, c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, c_int64) for name in ("inner", "vocab", "rotary_dim", "kind", "activations")),
        *((name, c_int64) for name in ("kv_kind", "block_size", "blocks")),
        *((name, c_double) for name in ("norm_eps", "attention_scale")),
        *((name, c_double) for name in ("attention_softcap", "logit_softcap")),
        ("layer", POINTER(Layer)),
        ("head", Matrix),
        ("norm", c_void_p),
        ("embedding", c_void_p),
        ("embedding_fp32", c_int64),
        ("rotary", c_void_p),
        ("kv", c_void_p),
    )


class LoraSlice(Structure):
    """An adapter's part in one linear of a fused projection."""

    _fields_ = (
        *((name, c_void_p) for name in ("b", "gain", "bias")),
        *((name, c_int64) for name in ("rank", "first_rank")),
    )


class LoraProjection(Structure):
    """An adapter's part in one fused projection."""

    _fields_ = (
        *((name, c_void_p) for name in ("a", "scale")),
        ("ranks", c_int64),
        ("slice", LoraSlice * 3),
    )


class Adapter(Structure):
    """An adapter: `[layers][4]` projections."""

    _fields_ = (("kind", c_int64), ("projection", POINTER(LoraProjection)))


class Segment(Structure):
    """Rows `[start, end)` that run under an adapter."""

    _fields_ = (("start", c_int64), ("end", c_int64), ("adapter", c_void_p))


class Sequence(Structure):
    """Rows `[start, end)`, the last of `context` tokens."""

    _fields_ = (
        *((name, c_int64) for name in ("start", "end", "context")),
        ("block_table", c_void_p),
    )


class Batch(Structure):
    """A step's rows and where its results go."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "sequences", "segments", "wanted")),
        *((name, c_void_p) for name in ("tokens", "positions", "sequence", "segment", "want")),
        *((name, c_void_p) for name in ("logits", "likeliest", "peak", "seconds")),
    )


class Draw(Structure):
    """How a row draws its token, and which that is."""

    _fields_ = (
        ("logits", c_void_p),
        ("top_k", c_int64),
        *((name, c_double) for name in ("peak", "factor", "top_p", "min_p", "share")),
        ("token", c_int64),
    )


STRUCTS = (
    Matrix, Layer, Model, LoraSlice, LoraProjection, Adapter, Segment, Sequence, Batch, Draw,
)  # fmt: skip


class Library:
    """The functions of one shared object."""

    def __init__(self, isa: Isa) -> None:
        """Load the object for `isa`, built if need be; raises `BuildError`."""
        path = build(isa)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"{path} cannot be loaded: {error}") from error
        _declare(library)
        self._library = library
        self.isa = isa.name
        self.activations = int(library.lpx_activations())
        self.w8a8_kind = int(library.lpx_w8a8_kind())

    def packed_bytes(self, kind: int, n: int, k: int) -> int:
        """Bytes of a packed matrix `[n, k]`."""
        return int(self._library.lpx_packed_bytes(kind, n, k))

    def pack(
        self, kind: int, source: int, shape: tuple[int, int], strides: tuple[int, int], to: int
    ) -> None:
        """Pack a matrix `[n, k]` at `source`, whose strides are in elements, to a 64-byte place.

        The source is int8 for `INT8`, fp32 for `FP32` and bf16 otherwise.
        """
        self._library.lpx_pack(kind, source, *shape, *strides, to)

    def pack_all(self, kind: int, jobs: NDArray[np.int64], source: int, to: int) -> None:
        """Pack matrices of one kind; other Python threads run meanwhile.

        Jobs `[count, 6]` are source, n, k, strides and target, as for `pack`, but source and target
        in bytes from the addresses `source` and `to`.
        """
        self._library.lpx_pack_all(kind, len(jobs), jobs.ctypes.data, source, to)

    def copy_all(self, jobs: NDArray[np.int64], source: int, to: int) -> None:
        """Copy, for jobs `[count, 3]`: source, target (bytes from the addresses) and bytes."""
        self._library.lpx_copy_all(len(jobs), jobs.ctypes.data, source, to)

    def kv_block_bytes(self, model: Model) -> int:
        """Bytes of one KV block of all layers."""
        return int(self._library.lpx_kv_block_bytes(ctypes.byref(model)))

    def start(
        self, model: Model, max_rows: int, max_wanted: int, threads: int, cores: tuple[int, ...]
    ) -> int:
        """A handle for steps on `threads` threads, pinned to `cores` unless these are none."""
        pinned = (ctypes.c_int32 * len(cores))(*cores) if cores else None
        handle = self._library.lpx_start(ctypes.byref(model), max_rows, max_wanted, threads, pinned)
        return int(handle)

    def step(self, handle: int, batch: Batch) -> None:
        """Run a step; other Python threads run meanwhile."""
        self._library.lpx_step(handle, ctypes.byref(batch))

    def draw(self, handle: int, rows: ctypes.Array[Draw]) -> None:
        """Set each row's token, between steps; other Python threads run meanwhile."""
        self._library.lpx_draw(handle, len(rows), rows)

    def stop(self, handle: int) -> None:
        """End the threads and free the scratch memory of a handle."""
        self._library.lpx_stop(handle)


def _declare(library: ctypes.CDLL) -> None:
    i64, address = c_int64, c_void_p
    signatures = {
        "lpx_isa": (c_char_p, ()),
        "lpx_activations": (i64, ()),
        "lpx_w8a8_kind": (i64, ()),
        "lpx_packed_bytes": (i64, (i64, i64, i64)),
        "lpx_pack": (None, (i64, address, i64, i64, i64, i64, address)),
        "lpx_pack_all": (None, (i64, i64, address, address, address)),
        "lpx_copy_all": (None, (i64, address, address, address)),
        "lpx_kv_block_bytes": (i64, (address,)),
        "lpx_start": (address, (address, i64, i64, i64, address)),
        "lpx_step": (None, (address, address)),
        "lpx_draw": (None, (address, i64, address)),
        "lpx_stop": (None, (address,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


@functools.cache
def load_library(isa: str | None = None) -> Library:
    """The library for an instruction set, by default the best that can be built here.

    Raises `BuildError` when there is none, `IsaError` when `LORAPLEX_ISA` cannot run here.
    """
    if isa is not None:
        return Library(BY_NAME[isa])
    *better, last = candidates()
    for one in better:
        try:
            return Library(one)
        except NoCompiler:
            raise
        except BuildError as error:
            log.warning("%s; trying a lesser instruction set", error)
    return Library(last)
