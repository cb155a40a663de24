"""Int8 KV on the native step: what a block holds, and what attention makes of it.

Stored bytes are those of `kernels.kv_rows`, to the bit, where keys and values are; logits are those
of a decoder whose keys and values were rounded so.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from tiny_model import save_model
from torch import Tensor

from loraplex.engine.load import load_native
from loraplex.engine.model.config import read_model_config
from loraplex.engine.settings import EngineSettings
from loraplex.kernels.cpu.library import load_library
from loraplex.kernels.kv_cache import BlockLayout
from loraplex.kernels.kv_rows import LEAST_SCALE, MOST, dequantise, quantise

SIZE = 16
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the model's, the executor's
    "plain": ({}, {}),
    "head 64, grouped 3 to 1": ({"head_dim": 64, "num_heads": 9, "num_kv_heads": 3}, {}),
    "head 80": ({"head_dim": 80, "num_heads": 3, "num_kv_heads": 3}, {"block_size": 64}),
    "head 256": ({"head_dim": 256, "num_heads": 2, "num_kv_heads": 1}, {"block_size": 32}),
    "windows": ({"num_layers": 3, "windows": (None, 7, 40)}, {"threads": 2}),
    "wide blocks": ({"windows": (None, 300), "max_positions": 700}, {"block_size": 512}),
    "parts": ({"max_positions": 700, "num_heads": 3, "num_kv_heads": 1}, {"threads": 2}),
}


def kept(x: Tensor) -> Tensor:
    """What the cache makes of keys and values."""
    return dequantise(*quantise(x.float())).double()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_rounded_keys_and_values(
    shape: str, isa: str, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    changes, options = SHAPES[shape]
    model = native_kit.tiny(**changes)
    executor = native_kit.executor(model, isa=isa, blocks=90, kv_dtype=torch.int8, **options)
    runner, track = torch_kit.Runner(executor), torch_kit.Track(native_kit.tokens(290))
    pieces = (150, 139, 1)
    if model.config.max_positions > 600:
        track.token_ids, pieces = native_kit.tokens(655), (400, 254, 1)
    found = torch.cat([runner.step((track, count))[0] for count in pieces])
    near(found, native_kit, model, track.token_ids)


def test_soft_caps(isa: str, native_kit: ModuleType, torch_kit: ModuleType) -> None:
    model = native_kit.tiny()

    def adjust(struct: Any) -> None:
        struct.attention_softcap = 2.0

    executor = native_kit.executor(model, isa=isa, kv_dtype=torch.int8, adjust=adjust)
    tokens = native_kit.tokens(70)
    found = torch_kit.Runner(executor).logits(tokens)
    near(found, native_kit, model, tokens, attention_softcap=2.0)


def near(found: Tensor, kit: ModuleType, model: Any, tokens: list[int], **caps: float) -> None:
    """A key that lies between two codes may take either: that moves few logits, and by little."""
    exact, rounded = (kit.dense_logits(model, tokens, **caps, **k) for k in ({}, {"kept": kept}))
    lost = (rounded - exact).square().mean().sqrt()
    assert 0 < (found - rounded).square().mean().sqrt() < 0.1 * lost < 0.004 * exact.std()


def chunks(executor: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Views of all blocks `[blocks, layers, …]`: keys `[KV heads, D, block size]`, values
    `[KV heads, block size, D]`, and `[2, KV heads, block size]` scales, of both; some may be empty.
    """
    config, dtype = executor._base.config, executor._base.precision.kv_dtype
    layers, heads, dim, size = config.num_layers, config.num_kv_heads, config.head_dim, SIZE
    assert executor.block_bytes == BlockLayout(layers, heads, size, dim, dtype).block_bytes
    region = torch.from_numpy(executor._region.blocks)
    parts = region.view(len(region), layers, 2, heads, -1)
    panel = size * dim * dtype.itemsize
    keys, values = parts[..., :panel].view(dtype).unbind(2)
    scales = parts[..., panel:].view(torch.float32)
    return keys.unflatten(-1, (dim, size)), values.unflatten(-1, (size, dim)), scales


def both(model: Any, isa: str, kit: ModuleType, torch_kit: ModuleType, count: int) -> Any:
    """Keys and values `[blocks, layers, 2, KV heads, block size, D]` of `count` tokens.

    As fp32 blocks hold them, then as int8 blocks do, and their scales.
    """
    found = []
    for kv_dtype in (None, torch.int8):
        executor = kit.executor(model, isa=isa, blocks=-(-count // SIZE), kv_dtype=kv_dtype)
        executor._region.blocks.fill(255)
        torch_kit.Runner(executor).logits(kit.tokens(count))
        keys, values, scales = chunks(executor)
        found += [torch.stack([keys.mT, values], 2), scales]
    exact, _, codes, scales = found
    return exact, codes, scales


def test_stored_bytes_are_those_of_the_reference(
    isa: str, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    """One layer: its keys and values do not depend on how they are kept."""
    model = native_kit.tiny(num_layers=1, windows=(None,), head_dim=48, qkv_bias=True)
    exact, codes, scales = both(model, isa, native_kit, torch_kit, 43)
    expected_codes, expected_scales = quantise(exact)
    assert torch.equal(codes, expected_codes) and torch.equal(scales, expected_scales)
    written = scales != 0
    assert int(written.sum()) == 2 * 2 * 43
    lost = (dequantise(codes, scales).double() - exact.double()).abs().amax(-1)
    assert (lost <= scales.double() * (0.5 + 2 * MOST * 2.0**-24)).all()
    assert (codes.abs().amax(-1)[written] == MOST).all()


WORST = (
    [127.0, 0.5, 1.5, -2.5, -0.5, 126.5],  # halves
    [0.0, -0.0],
    [1e30, 1.0, -3e28],
    [127 * LEAST_SCALE, LEAST_SCALE],
    [126 * LEAST_SCALE, LEAST_SCALE],
    [1e-40, -1e-42],
    [torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max],
    [torch.nan, 5.0],
    [5.0, torch.nan, 7.0],
    [torch.inf, 1.0],
    [-torch.inf, torch.inf, torch.nan],
)


def test_the_worst_rows_are_stored_as_by_the_reference(
    isa: str, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    """Values are biases alone, so that they can be anything."""
    heads = len(WORST)
    model = native_kit.tiny(
        num_layers=1, windows=(None,), num_heads=heads, num_kv_heads=heads, qkv_bias=True
    )
    for name in "kv":
        model.tensors[f"model.layers.0.self_attn.{name}_proj.weight"].zero_()
        bias = model.tensors[f"model.layers.0.self_attn.{name}_proj.bias"].view(heads, -1)
        for row, numbers in zip(bias.zero_(), WORST, strict=True):
            row[-len(numbers) :] = torch.tensor(numbers)
    exact, codes, scales = both(model, isa, native_kit, torch_kit, 1)
    assert torch.equal(codes, quantise(exact)[0])
    torch.testing.assert_close(scales, quantise(exact)[1], rtol=0, atol=0, equal_nan=True)
    first = exact.movedim(-2, 0).flatten(1, 2)[0]
    assert first.isnan().any() and first.isinf().any()


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_key_that_is_not_finite_shows(
    softcap: float, kv_dtype: Any, isa: str, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    """In rows that see it, though its value is sound, and in no others."""
    for window in (None, 6):
        model = native_kit.tiny(num_layers=1, windows=(window,))

        def adjust(struct: Any) -> None:
            struct.attention_softcap = struct.logit_softcap = softcap

        executor = native_kit.executor(model, isa=isa, blocks=1, kv_dtype=kv_dtype, adjust=adjust)
        track = torch_kit.Track(native_kit.tokens(12))
        runner = torch_kit.Runner(executor)
        runner.step((track, 10))
        keys, _, scales = chunks(executor)
        if kv_dtype is None:
            keys[..., 4] = torch.nan
        else:
            keys[..., 4], scales[:, :, 0, :, 4] = 0, torch.inf
        logits = runner.step((track, 2))[0]
        assert logits.isnan().all() if window is None else logits.isfinite().all()


def test_both_executors_compute_the_same(tmp_path: Path, isa: str, torch_kit: ModuleType) -> None:
    """Loaded by the settings, with as many blocks as so many bytes hold."""
    config = transformers.Qwen2Config(
        vocab_size=97, hidden_size=96, intermediate_size=80, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    save_model(tmp_path, config)
    settings = EngineSettings(
        dtype="float32", kv_cache_dtype="int8", kv_cache_bytes=400_000, max_num_seqs=200
    )
    native = load_native(tmp_path, read_model_config(tmp_path), settings, load_library(isa))
    reference = torch_kit.load(tmp_path, kv_dtype=torch.int8)
    assert native.block_bytes == reference.block_bytes
    assert native.num_blocks == 400_000 // native.block_bytes
    tokens = [(7 * i) % 97 for i in range(200)]
    found, expected = (
        torch_kit.Runner(executor).logits(tokens) for executor in (native, reference)
    )
    assert expected.std() > 0.2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-3)
