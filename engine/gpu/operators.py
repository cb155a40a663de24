"""The decoder's operators on Triton's kernels, for one step whose metadata is on the device.

Products are left in fp32 and rounded by the operator that takes them, which spares a launch each.
All addresses are those of buffers that stay, so the launches of a step can be captured in a graph.
This file knows tensors; it refuses to know batches and where the metadata came from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from loraplex.engine.gpu.images import DeviceImages
from loraplex.engine.model.adapter import projection_sizes
from loraplex.engine.model.decoder import Decoder
from loraplex.engine.model.operators import Norms
from loraplex.engine.model.projection import Projection
from loraplex.kernels.triton.paged_attention import AttentionStep, paged_attention
from loraplex.kernels.triton.rms_norm import add_rms_norm
from loraplex.kernels.triton.rope_kv import rope_kv
from loraplex.kernels.triton.sgmv import SgmvStep, sgmv_
from loraplex.kernels.triton.silu_mul import silu_mul


@dataclass(frozen=True)
class DeviceStep:
    """A step's metadata, int32 on the device; `adapters` has a plan for each dtype of image."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T], block · block size + offset, negative for inert rows
    wanted: Tensor  # [W]
    attention: AttentionStep
    adapters: Sequence[tuple[str, SgmvStep]]


class TritonOperators:
    """Operators of a decoder's step that reads and writes `kv`, see `BlockLayout.split`."""

    def __init__(
        self,
        decoder: Decoder,
        kv: tuple[Tensor, Tensor | None],
        images: DeviceImages,
        step: DeviceStep,
    ) -> None:
        self._config, self._rotary, self._dtype = decoder.config, decoder.rotary, decoder.dtype
        self._cache, self._scales = kv
        self._images, self._step = images, step
        self._sizes = projection_sizes(decoder.config)

    def embed(self, table: Tensor) -> Tensor:
        """See `Operators`."""
        return table.index_select(0, self._step.token_ids)

    def add_norm(self, x: Tensor, residual: Tensor, gain: Tensor) -> Tensor:
        """See `Operators`."""
        return add_rms_norm(x, residual, gain, self._config.norm_eps)

    def project(self, x: Tensor, projection: Projection, layer: int, name: str) -> Tensor:
        """See `Operators`; fp32."""
        y = projection.linear.apply(x)
        for kind, plan in self._step.adapters:
            table = self._images.table(layer, name)
            sgmv_(y, x, self._images.arenas[kind], table, plan, self._sizes[name][1])
        return y if projection.bias is None else y.add_(projection.bias)

    def attend(self, qkv: Tensor, norms: Norms, layer: int) -> Tensor:
        """See `Operators`."""
        config, step = self._config, self._step
        q = rope_kv(
            qkv, self._cache, layer, self._rotary, norms, config.norm_eps,
            step.positions, step.slots, dtype=self._dtype, scales=self._scales,
        )  # fmt: skip
        out = paged_attention(
            q, self._cache, layer, step.attention, config.head_dim**-0.5,
            window=config.windows[layer], scales=self._scales,
        )  # fmt: skip
        return out.view(q.shape[0], -1)

    def silu_mul(self, x: Tensor) -> Tensor:
        """See `Operators`."""
        return silu_mul(x, self._dtype)

    def wanted(self, x: Tensor) -> Tensor:
        """See `Operators`."""
        return x.index_select(0, self._step.wanted)
