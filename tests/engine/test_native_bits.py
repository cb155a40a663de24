"""The promise of the native step: a request's logits are the same bits in any company.

Alone, among strangers, under any chunking, on any number of threads, with every kind of base.
"""

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.kernels.cpu.library import ACT_BF16, ACT_FP32, ACT_INT16, OFFSET8, QUANT8

LENGTHS = (3, 40, 129, 17, 64, 290)
IMAGES = (None, "a", "b", "a", None, "c")
PRECISIONS = {
    "float32": {"dtype": "float32"},
    "wide": {"dtype": "float32", "stored_bf16": False},
    "bfloat16": {"dtype": "bfloat16", "activations": ACT_FP32},
    "bfloat16 rows": {"dtype": "bfloat16", "activations": ACT_BF16},
    "fixed point": {"dtype": "bfloat16", "activations": ACT_INT16},
    "int8": {"quantization": "int8"},
    "int8-w8a8 pairs": {"quantization": "int8-w8a8", "w8a8_kind": QUANT8},
    "int8-w8a8 fours": {"quantization": "int8-w8a8", "w8a8_kind": OFFSET8},
    "int8 KV": {"dtype": "bfloat16", "kv_dtype": torch.int8},
}


@pytest.fixture(scope="module")
def model(native_kit: ModuleType) -> Any:
    return native_kit.tiny(
        num_layers=3, windows=(None, 50, None), num_heads=6, num_kv_heads=2, hidden_size=100,
        intermediate_size=170, qkv_bias=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def make(model: Any, native_kit: ModuleType, torch_kit: ModuleType) -> Any:
    """Makes a runner with three images, whose blocks hold NaN from the start."""

    def runner(**options: Any) -> Any:
        executor = native_kit.executor(model, **options)
        executor._region.blocks.fill(255)
        for name, dtype, ranks in (
            ("a", "bf16", (16,)),
            ("b", "int8", (5, 0, 33)),
            ("c", "fp32", (1, 64)),
        ):
            lora = native_kit.adapter(
                model.config, ranks, dtype=dtype, seed=ord(name), rows=name == "b"
            )
            native_kit.add_image(executor, name, model.config, lora, dtype)
        return torch_kit.Runner(executor)

    return runner


@pytest.mark.parametrize("precision", PRECISIONS)
def test_any_company_and_chunking(
    precision: str, isa: str, make: Any, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    runner = make(isa=isa, threads=2, **PRECISIONS[precision])
    ids = prompts(native_kit)
    alone = [runner.logits(tokens, image) for tokens, image in zip(ids, IMAGES, strict=True)]
    assert all(logits.isfinite().all() for logits in alone)
    tracks = [torch_kit.Track(t, image) for t, image in zip(ids, IMAGES, strict=True)]
    sizes = iter([(7 * i + 5 * turn) % 30 + 1 for turn in range(200) for i in range(6)])
    check(runner, tracks, alone, lambda: next(sizes))


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "int8"])
def test_decoding_under_many_adapters(
    dtype: str, isa: str, make: Any, model: Any, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    """Rows alone under their adapters are taken together, some at a time, by rank."""
    runner = make(isa=isa, threads=2)
    ranks = (16, 16, 16, 16, 16, 16, 7, 16, 200)
    for i, rank in enumerate(ranks):
        lora = native_kit.adapter(model.config, (rank,), dtype=dtype, seed=i, rows=i == 4)
        native_kit.add_image(runner.executor, f"one {i}", model.config, lora, dtype)
    images = [f"one {i}" for i in range(len(ranks))]
    images[2:2] = [None, "b"]
    tokens = native_kit.tokens(12)
    alone = [runner.logits(tokens, image) for image in images]
    check(runner, [torch_kit.Track(list(tokens), image) for image in images], alone, lambda: 1)


@pytest.mark.parametrize("precision", ["bfloat16", "fixed point", "int8", "int8 KV"])
def test_any_number_of_threads(
    precision: str, isa: str, make: Any, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    ids, found = prompts(native_kit), []
    for threads in (1, 2, 3, 5):
        runner = make(isa=isa, threads=threads, **PRECISIONS[precision])
        tracks = [torch_kit.Track(t, image) for t, image in zip(ids, IMAGES, strict=True)]
        first = runner.step(*((track, len(track.token_ids) - 1) for track in tracks[:4]))
        last = runner.step((tracks[4], 64), *((track, 1) for track in tracks[:4]))
        found.append(torch.cat([*first, *last]))
        runner.executor.close()
    assert all(torch.equal(found[0], logits) for logits in found[1:])


@pytest.mark.parametrize("precision", ["bfloat16 rows", "fixed point", "int8 KV"])
def test_any_rows_may_be_wanted(
    precision: str, isa: str, make: Any, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    """Only these go on once the last layer's keys are kept; some attend to a long context."""
    runner = make(isa=isa, threads=3, **PRECISIONS[precision])
    ids = [native_kit.tokens(length, length) for length in (560, 3, 40, 129, 17, 64)]
    tracks = [torch_kit.Track(tokens, image) for tokens, image in zip(ids, IMAGES, strict=True)]
    runner.step((tracks[0], 505))
    batch, *_ = runner.batch((tracks[0], 55), *((t, len(t.token_ids)) for t in tracks[1:]))
    rows, last = len(batch.token_ids), [span.end - 1 for span in batch.spans]
    everything = runner.executor.execute(batch).logits.clone()
    for wanted in ([], [rows - 1], last, range(0, rows, 3), range(50, rows - 70), [0, 1, 2, *last]):
        some = dataclasses.replace(batch, wanted=np.unique(np.array(wanted, np.int32)))
        assert torch.equal(runner.executor.execute(some).logits, everything[some.wanted])


def test_removed_images_leave_nothing(
    make: Any, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    runner = make()
    tokens = native_kit.tokens(20)
    before = runner.logits(tokens, "a")
    runner.executor.remove_image("c")
    assert torch.equal(runner.logits(tokens, "a"), before)
    with pytest.raises(KeyError):
        runner.step((torch_kit.Track([1, 2], "c"), 2))


@pytest.mark.parametrize("precision", ["float32", "int8 KV"])
def test_a_request_that_computes_nan_harms_nobody(
    precision: str, isa: str, make: Any, model: Any, native_kit: ModuleType, torch_kit: ModuleType
) -> None:
    """Not beside it, and not after it in its blocks and in the same scratch memory."""
    runner, ids = make(isa=isa, **PRECISIONS[precision]), prompts(native_kit)[1:5]
    broken = native_kit.adapter(model.config, (20,))
    for part in broken.values():
        part.scale.fill_(torch.inf)
    native_kit.add_image(runner.executor, "broken", model.config, broken, "fp32")
    expected = [runner.logits(tokens, image) for tokens in ids for image in (None, "b")]
    bad = torch_kit.Track(native_kit.tokens(200), "broken")
    tracks = [torch_kit.Track(tokens, image) for tokens in ids for image in (None, "b")]
    some = torch_kit.Track(ids[0])
    harmed, found = runner.step((bad, 200), (some, 40))
    assert harmed.isnan().any() and torch.equal(found, expected[0])
    runner.release(bad, some)
    check(runner, tracks, expected, lambda: 25)


@pytest.fixture(scope="module")
def alone(
    make: Any, native_kit: ModuleType
) -> tuple[Any, list[list[int]], dict[Any, torch.Tensor]]:
    """A runner, prompts, and the logits of each prompt alone under each image."""
    runner, ids = make(dtype="bfloat16", threads=2), prompts(native_kit)
    found = {
        (i, image): runner.logits(tokens, image)
        for i, tokens in enumerate(ids)
        for image in (None, "a", "b", "c")
    }
    return runner, ids, found


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_mix(data: st.DataObject, alone: Any, torch_kit: ModuleType) -> None:
    """Requests of any length under any image, whose prompts are cut anywhere."""
    runner, ids, expected = alone
    request = st.tuples(st.integers(0, len(ids) - 1), st.sampled_from([None, "a", "b", "c"]))
    chosen = data.draw(st.lists(request, min_size=1, max_size=8))
    tracks = [torch_kit.Track(list(ids[i]), image) for i, image in chosen]
    size = st.integers(1, 60)
    check(runner, tracks, [expected[key] for key in chosen], lambda: data.draw(size))


def prompts(kit: ModuleType) -> list[list[int]]:
    return [kit.tokens(length, seed) for seed, length in enumerate(LENGTHS)]


def check(runner: Any, tracks: list[Any], expected: list[torch.Tensor], size: Any) -> None:
    """Run all tracks in common steps, in pieces of some size; each row's bits are as expected."""
    seen: list[list[torch.Tensor]] = [[] for _ in tracks]
    try:
        while left := [t for t in tracks if t.computed < len(t.token_ids)]:
            parts = [(t, min(len(t.token_ids) - t.computed, size())) for t in left]
            for (track, _), logits in zip(parts, runner.step(*parts), strict=True):
                seen[tracks.index(track)].append(logits)
    finally:  # Hypothesis may end an example anywhere
        runner.release(*tracks)
    for pieces, whole in zip(seen, expected, strict=True):
        assert torch.equal(torch.cat(pieces), whole)
