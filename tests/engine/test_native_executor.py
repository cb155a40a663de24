"""The native executor against the decoder written down once more in fp64, feature by feature."""

import os
from types import ModuleType
from typing import Any

import pytest
import torch

from loraplex.engine.model.config import RopeConfig
from loraplex.kernels.cpu.library import OFFSET8, QUANT8

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "head 64, grouped 3 to 1": {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3},
    "head 80, every head its own": {"head_dim": 80, "num_heads": 3, "num_kv_heads": 3},
    "head 96, one kv head": {"head_dim": 96, "num_heads": 4, "num_kv_heads": 1},
    "head 128": {"head_dim": 128, "num_heads": 2, "num_kv_heads": 1},
    "head 256": {"head_dim": 256, "num_heads": 2, "num_kv_heads": 2},
    "odd widths": {"hidden_size": 51, "intermediate_size": 131, "vocab_size": 211},
    "one of each": {"hidden_size": 1, "intermediate_size": 1, "num_heads": 1, "num_kv_heads": 1},
    "wide": {"hidden_size": 600, "intermediate_size": 1000, "vocab_size": 300},
    "tied": {"tied": True},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "norms of q and k": {"qk_norm": True, "qkv_bias": True},
    "windows": {"num_layers": 3, "windows": (None, 7, 40)},
    "llama3": {
        "rope": RopeConfig(500.0, "llama3", factor=8.0, original_positions=64),
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits(shape: str, native_kit: ModuleType, torch_kit: ModuleType) -> None:
    model = native_kit.tiny(**SHAPES[shape])
    check(native_kit, torch_kit, model)


@pytest.mark.parametrize("stored_bf16", [True, False])
def test_each_instruction_set(
    isa: str, stored_bf16: bool, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    model = native_kit.tiny(qk_norm=True, qkv_bias=True, windows=(None, 50), tied=True)
    check(native_kit, torch_kit, model, isa=isa, stored_bf16=stored_bf16)


def test_weights_that_are_no_bf16(native_kit: ModuleType, torch_kit: ModuleType) -> None:
    model = native_kit.tiny()
    for tensor in model.tensors.values():
        tensor.mul_(1 + 1e-3 * torch.rand(tensor.shape))
    check(native_kit, torch_kit, model, stored_bf16=False)


@pytest.mark.parametrize("attention", [0.0, 2.0])
@pytest.mark.parametrize("rotary", [16, 8, 2])
def test_soft_caps_and_partial_rotary(
    attention: float, rotary: int, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    """What no family of ours has, yet the C ABI: the struct is changed before the start."""
    model = native_kit.tiny()
    table = torch.cat(native_kit.rotary_tables(model.config.rope, rotary, 600), 1).contiguous()

    def adjust(struct: Any) -> None:
        struct.attention_softcap, struct.logit_softcap = attention, 3.0
        struct.rotary_dim, struct.rotary = rotary, table.data_ptr()

    runner = torch_kit.Runner(native_kit.executor(model, adjust=adjust))
    tokens = native_kit.tokens(70)
    expected = native_kit.dense_logits(
        model, tokens, attention_softcap=attention, logit_softcap=3.0, rotary_dim=rotary
    )
    close(runner.logits(tokens), expected)


def test_long_context(isa: str, native_kit: ModuleType, torch_kit: ModuleType) -> None:
    """3,300 tokens in uneven pieces, and one more alone: contexts cross blocks and parts."""
    model = native_kit.tiny(max_positions=3400, num_heads=3, num_kv_heads=1)
    runner = torch_kit.Runner(native_kit.executor(model, isa=isa, blocks=220, threads=2))
    tokens = native_kit.tokens(3301)
    track, expected = torch_kit.Track(tokens), native_kit.dense_logits(model, tokens)
    pieces = [500, 499, 1, 512, 300, 512, 512, 464, 1]
    for count in pieces:
        start = track.computed
        close(runner.step((track, count))[0], expected[start : start + count])


@pytest.mark.parametrize("size", [32, 128, 512])
def test_block_sizes(size: int, native_kit: ModuleType, torch_kit: ModuleType) -> None:
    """Larger blocks hold the same keys, and windows may begin within one."""
    model = native_kit.tiny(max_positions=1300, windows=(None, 600))
    executor = native_kit.executor(model, block_size=size, threads=2)
    runner, track = torch_kit.Runner(executor), torch_kit.Track(native_kit.tokens(1203))
    found = torch.cat([runner.step((track, count))[0] for count in (500, 201, 501, 1)])
    close(found, native_kit.dense_logits(model, track.token_ids))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("rows", [False, True])
def test_adapters(
    dtype: str, rows: bool, isa: str, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    model = native_kit.tiny()
    ranks = (1, 3, 0, 5, 16, 33, 64)
    lora = native_kit.adapter(model.config, ranks, dtype=dtype, rows=rows)
    check_adapter(native_kit, torch_kit, model, lora, dtype, isa=isa)


@pytest.mark.parametrize("rank", [1, 3, 5, 16, 33, 64, 512])
def test_ranks(rank: int, native_kit: ModuleType, torch_kit: ModuleType) -> None:
    model = native_kit.tiny(hidden_size=96)
    lora = native_kit.adapter(model.config, (rank,), dtype="bf16")
    check_adapter(native_kit, torch_kit, model, lora, "bf16")


@pytest.mark.parametrize("linear", ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
def test_one_linear_in_one_layer(
    linear: str, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    model = native_kit.tiny()
    whole = native_kit.adapter(model.config, (7,), rows=True)
    check_adapter(native_kit, torch_kit, model, {(1, linear): whole[1, linear]}, "fp32")


@pytest.mark.parametrize("narrow", [{"intermediate_size": 1}, {"hidden_size": 5}])
def test_adapters_of_narrow_models(
    narrow: dict[str, int], native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    """Products of fewer inputs than a tile looks ahead by."""
    model = native_kit.tiny(**narrow)
    lora = native_kit.adapter(model.config, (1, 16), dtype="bf16")
    check_adapter(native_kit, torch_kit, model, lora, "bf16")


def test_rows_without_rank(native_kit: ModuleType, torch_kit: ModuleType) -> None:
    model = native_kit.tiny()
    lora = native_kit.adapter(model.config, (0,), rows=True)
    check_adapter(native_kit, torch_kit, model, lora, "bf16")


@pytest.mark.parametrize("linear", ["o_proj", "down_proj"])
def test_a_gain_is_not_for_what_a_projection_is_added_to(
    linear: str, isa: str, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    """Rounded rows of residual projections are summed in place, with base rows beside them."""
    model, tokens = native_kit.tiny(), native_kit.tokens(40)
    whole = native_kit.adapter(model.config, (0, 3), rows=True, dtype="bf16")
    lora = {key: part for key, part in whole.items() if key[1] == linear}
    executor = native_kit.executor(model, isa=isa, dtype="bfloat16")
    native_kit.add_image(executor, "a", model.config, lora, "bf16")
    tracks = [torch_kit.Track(tokens), torch_kit.Track(tokens, "a")]
    found = torch_kit.Runner(executor).step(*((track, 40) for track in tracks))
    for logits, under in zip(found, (None, lora), strict=True):
        off = logits.double() - native_kit.dense_logits(model, tokens, under)
        assert off.pow(2).mean().sqrt() < 0.02


def test_bfloat16_is_near(isa: str, native_kit: ModuleType, torch_kit: ModuleType) -> None:
    model = native_kit.tiny(qkv_bias=True)
    runner = torch_kit.Runner(native_kit.executor(model, isa=isa, dtype="bfloat16"))
    tokens = native_kit.tokens(150)
    off = runner.logits(tokens).double() - native_kit.dense_logits(model, tokens)
    assert 1e-5 < off.pow(2).mean().sqrt() < 0.02


@pytest.mark.parametrize(("quantization", "most"), [("int8", 2e-4), ("int8-w8a8", 0.05)])
def test_quantised_base(
    quantization: str, most: float, isa: str, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    """Against the same weights, rounded the same way: what is left is how rows are rounded."""
    model = native_kit.tiny(tied=False, hidden_size=128)
    runner = torch_kit.Runner(
        native_kit.executor(model, isa=isa, dtype="float32", quantization=quantization)
    )
    for name, tensor in model.tensors.items():
        if tensor.dim() == 2 and "embed" not in name:
            top = tensor.abs().amax(1, keepdim=True)
            steps = (tensor * (torch.tensor(127.0) / top)).round()  # 127 / top is no division
            tensor.copy_(steps * (top / 127))
    tokens = native_kit.tokens(150)
    off = runner.logits(tokens).double() - native_kit.dense_logits(model, tokens)
    assert off.pow(2).mean().sqrt() < most


def test_fours_of_bytes_are_pairs_of_int16(
    isa: str, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    """W8A8 has the same sums, whichever instruction multiplies: weights with 128 more, too."""
    model, tokens = native_kit.tiny(hidden_size=135, qkv_bias=True), native_kit.tokens(150)
    model.tensors["model.layers.0.mlp.up_proj.weight"][3].zero_()
    pairs, fours = (
        torch_kit.Runner(
            native_kit.executor(model, isa=isa, quantization="int8-w8a8", w8a8_kind=kind)
        ).logits(tokens)
        for kind in (QUANT8, OFFSET8)
    )
    assert torch.equal(pairs, fours)


def test_outcome_tells_the_likeliest(native_kit: ModuleType, torch_kit: ModuleType) -> None:
    model = native_kit.tiny(tied=True)
    model.tensors["model.embed_tokens.weight"][50:].copy_(  # each token from 50 on has a twin
        model.tensors["model.embed_tokens.weight"][:47]
    )
    executor = native_kit.executor(model)
    lora = native_kit.adapter(model.config, (2,))
    broken = {key: part for key, part in lora.items() if key == (0, "o_proj")}
    broken[0, "o_proj"].scale.fill_(torch.inf)
    native_kit.add_image(executor, "broken", model.config, broken, "fp32")
    tracks = [
        torch_kit.Track(native_kit.tokens(9)),
        torch_kit.Track(native_kit.tokens(5), "broken"),
    ]
    for place, track in enumerate(tracks):
        track.block_table = [place]
    counts = [len(track.token_ids) for track in tracks]
    parts = [torch_kit.Part(t, 0, n, n) for t, n in zip(tracks, counts, strict=True)]
    batch, _ = torch_kit.build(parts, native_kit.BLOCK_SIZE)
    outcome = executor.execute(batch)
    assert outcome.likeliest.dtype == torch.int64
    assert torch.equal(outcome.likeliest[:9], outcome.logits[:9].argmax(-1))
    assert outcome.likeliest[:9].max() < 50, "the first of equals"
    assert torch.equal(outcome.peak[:9], outcome.logits[:9].amax(-1))
    assert outcome.peak[9:].isnan().all()


def test_only_wanted_rows_have_logits(native_kit: ModuleType, torch_kit: ModuleType) -> None:
    model = native_kit.tiny()
    executor, tokens = native_kit.executor(model), native_kit.tokens(40)
    track = torch_kit.Track(tokens, block_table=[5, 9, 2])
    first, _ = torch_kit.build([torch_kit.Part(track, 0, 30, 0)], native_kit.BLOCK_SIZE)
    last, _ = torch_kit.build([torch_kit.Part(track, 30, 10, 3)], native_kit.BLOCK_SIZE)
    assert executor.execute(first).logits.shape == (0, 97)
    close(executor.execute(last).logits, native_kit.dense_logits(model, tokens)[-3:])


def test_more_rows_than_it_was_made_for(native_kit: ModuleType, torch_kit: ModuleType) -> None:
    runner = torch_kit.Runner(native_kit.executor(native_kit.tiny()))
    with pytest.raises(ValueError, match="at most 512 rows"):
        runner.logits(native_kit.tokens(513))


def test_threads_are_pinned(native_kit: ModuleType, torch_kit: ModuleType) -> None:
    """Each to its core; the caller may use all, and so may what it starts later."""
    before, tasks = os.sched_getaffinity(0), {*os.listdir("/proc/self/task")}
    cores = tuple(sorted(before))
    try:
        executor = native_kit.executor(native_kit.tiny(), threads=len(cores), cores=cores)
        torch_kit.Runner(executor).logits([1, 2, 3])
        assert {*cores} == os.sched_getaffinity(0)
        started = {*os.listdir("/proc/self/task")} - tasks
        allowed = [os.sched_getaffinity(int(task)) for task in started]
        assert sorted(a.pop() for a in allowed if len(a) == 1) == [*cores[1:]]
        executor.close()
    finally:
        os.sched_setaffinity(0, before)


def check(kit: ModuleType, torch_kit: ModuleType, model: Any, **options: Any) -> None:
    """All positions of a prompt longer than a part of keys, in two pieces."""
    tokens = kit.tokens(290, vocabulary=model.config.vocab_size)
    runner = torch_kit.Runner(kit.executor(model, **options))
    track = torch_kit.Track(tokens)
    found = torch.cat([runner.step((track, 150))[0], runner.step((track, 140))[0]])
    expected = kit.dense_logits(model, tokens)
    assert expected.std() > 0.1
    close(found, expected)


def check_adapter(
    kit: ModuleType, torch_kit: ModuleType, model: Any, lora: Any, dtype: str, **options: Any
) -> None:
    """Rows under the adapter, with base rows beside them."""
    executor, tokens = kit.executor(model, **options), kit.tokens(40)
    kit.add_image(executor, "a", model.config, lora, dtype)
    runner = torch_kit.Runner(executor)
    base, under = torch_kit.Track(tokens), torch_kit.Track(tokens, "a")
    plain, adapted = runner.step((base, 40), (under, 40))
    close(plain, kit.dense_logits(model, tokens))
    close(adapted, kit.dense_logits(model, tokens, lora))
    assert not torch.allclose(plain, adapted, atol=1e-3)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5 * scale_of(expected))


def scale_of(expected: torch.Tensor) -> float:
    return max(1.0, float(expected.abs().max()) / 5)
