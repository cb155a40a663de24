"""The GPU executor in Triton's interpreter against the torch executor: tiny models, fp32."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from numpy.typing import NDArray

from loraplex.engine.batch import Batch
from loraplex.engine.core import Engine
from loraplex.engine.gpu import step_layout
from loraplex.engine.gpu.executor import FIRST_RANKS, GpuExecutor
from loraplex.engine.gpu.step_layout import Limits
from loraplex.engine.model.config import read_model_config
from loraplex.engine.model.decoder import load_decoder
from loraplex.engine.outcome import outcome_of
from loraplex.engine.protocol import Chunk, Failed
from loraplex.engine.settings import EngineSettings

BLOCKS = 12
NAN_BYTE = 0xFF  # floats of nothing else are NaN, scales of int8 rows too
SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen3": (
        transformers.Qwen3Config,
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 9,
         "max_window_layers": 1},
    ),
}  # fmt: skip
KV_DTYPES = {"llama": None, "qwen3": None, "llama, int8 KV": torch.int8}
EITHER = pytest.mark.parametrize("pair", ["llama", "llama, int8 KV"], indirect=True)
STEPS = ((7, 3), (1, 6, 1), (1, 1, 1), (1,), (3, 1))  # rows of each track: mixed, decode, base


@pytest.fixture(scope="module", autouse=True)
def even_numpy() -> Iterator[None]:
    """Products of the interpreter treat rows alike, as a device does; small buckets; no warnings.

    A BLAS gives a row last bits that depend on its place in a tile, and inert rows compute on
    whatever their memory holds.
    """

    def matmul(a: NDArray, b: NDArray, dtype: type) -> NDArray:
        return (a[:, :, None] * b[None]).sum(1, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(np, "matmul", matmul)
        patch.setattr(step_layout, "BUCKETS", (4, 8))
        yield


@dataclass(frozen=True)
class Pair:
    """The same model and images "a" and "b" on both executors, and what `STEPS` gave on each."""

    directory: Path
    plain: Any
    gpu: Any
    expected: list[list[torch.Tensor]]
    found: list[list[torch.Tensor]]


@pytest.fixture(scope="module", params=KV_DTYPES)
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    torch_kit: ModuleType,
    even_numpy: None,
) -> Pair:
    directory, kv_dtype = tmp_path_factory.mktemp("tiny"), KV_DTYPES[request.param]
    save_model(request.param.split(",")[0], directory)
    plain = torch_kit.load(directory, blocks=BLOCKS, kv_dtype=kv_dtype)
    executors = plain, load(directory, kv_dtype)
    for seed, name in enumerate("ab", 2):
        path = directory / name
        config = read_model_config(directory)
        digest = torch_kit.random_image(path, config, seed, projections="qkv o gate_up down")
        for executor in executors:
            torch_kit.add(executor, name, *torch_kit.read_image(path, digest))
    plain, gpu = (torch_kit.Runner(executor) for executor in executors)
    return Pair(directory, plain, gpu, run(plain, torch_kit), run(gpu, torch_kit))


def save_model(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    family, options = MODELS[name]
    model = transformers.AutoModelForCausalLM.from_config(family(**(SIZES | options)))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(std=0.2).add_("norm" in key)
    model.save_pretrained(folder)


def load(directory: Path, kv_dtype: torch.dtype | None = None) -> GpuExecutor:
    """An executor whose cache and scratch hold NaN from the start; rows of its products agree."""
    decoder = load_decoder(directory, read_model_config(directory), torch.float32, 64)
    limits = Limits(sequences=4, tokens=24, length=64, block_size=16)
    executor = GpuExecutor(
        decoder, limits, num_blocks=BLOCKS, memory_bytes=1 << 19, swap_slots=2, kv_dtype=kv_dtype,
        graphs=False,
    )  # fmt: skip
    executor._blocks.fill_(NAN_BYTE)
    executor._scratch.fill_(torch.nan)
    return executor


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 53, (count,), generator=generator).tolist()


def run(runner: Any, kit: ModuleType) -> list[list[torch.Tensor]]:
    """Logits of each step, by track."""
    tracks = [
        kit.Track(tokens(24, 1)),
        *(kit.Track(tokens(24, n), x) for n, x in ((2, "a"), (3, "b"))),
    ]
    return [runner.step(*zip(tracks, counts, strict=False)) for counts in STEPS]


def test_logits_are_those_of_the_torch_executor(pair: Pair) -> None:
    """A last bit may make an int8 code another, which moves logits by less than 3e-3."""
    atol = 3e-3 if pair.gpu.executor._kv[1] is not None else 1e-4
    for expected, found in zip(pair.expected, pair.found, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=atol)
    assert torch.cat(pair.expected[0]).std() > 0.3


def test_company_and_chunks_do_not_change_a_bit(pair: Pair, torch_kit: ModuleType) -> None:
    track = torch_kit.Track(tokens(24, 2), "a")
    alone = [pair.gpu.step((track, count))[0] for count in (9, 1)]
    pieces = torch.cat([step[1] for step in pair.found if len(step) > 1])
    assert torch.equal(pieces[:10], torch.cat(alone))


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_outcome_of_wanted_rows(pair: Pair, torch_kit: ModuleType) -> None:
    """A prefill that wants nothing, then a decode step of two rows in a bucket of four."""
    gpu = pair.gpu.executor
    chosen = [torch_kit.Track(tokens(n, n), "a", [n]) for n in (5, 6)]

    def batch(start: int, count: int, *wants: int) -> Batch:
        parts = [
            torch_kit.Part(track, start, count, wanted)
            for track, wanted in zip(chosen, wants, strict=True)
        ]
        return torch_kit.build(parts, torch_kit.BLOCK_SIZE)[0]

    outcome = gpu.execute(batch(0, 4, 0, 0))
    assert (outcome.logits.shape, outcome.peak.shape) == ((0, 53), (0,))
    outcome = gpu.execute(batch(4, 1, 1, 0))
    expected = outcome_of(outcome.logits)
    assert outcome.logits.shape == (1, 53)
    assert torch.equal(outcome.likeliest, expected.likeliest)
    assert torch.equal(outcome.peak, expected.peak)


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_image_of_a_larger_rank_gets_room(
    pair: Pair, torch_kit: ModuleType, tmp_path: Path
) -> None:
    builder, rank = torch_kit.ImageBuilder("f" * 64, "fp32"), FIRST_RANKS + 3
    a, b, scale = (
        np.random.default_rng(n).normal(size=(rank, n)).astype(np.float32) / n for n in (64, 32, 1)
    )
    slices = [torch_kit.SliceData(rank, 32, b.tobytes())]
    builder.add(1, "o", 64, a.tobytes(), scale.tobytes(), slices)
    digest = builder.finish(tmp_path / "large")
    for runner in (pair.plain, pair.gpu):
        torch_kit.add(runner.executor, "c", *torch_kit.read_image(tmp_path / "large", digest))
    expected, base = pair.plain.logits([5, 9, 1], "c"), pair.plain.logits([5, 9, 1])
    torch.testing.assert_close(pair.gpu.logits([5, 9, 1], "c"), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, base, atol=0.01)
    pair.gpu.executor.remove_image("c")
    with pytest.raises(KeyError):
        pair.gpu.step((torch_kit.Track([1, 2], "c"), 2))


@EITHER
def test_blocks_and_images_move(pair: Pair, torch_kit: ModuleType) -> None:
    """A block through two others and the host; the image to where another was."""
    runner, executor, ids = pair.gpu, pair.gpu.executor, tokens(10, 4)
    expected = runner.logits(ids, "b")
    track = torch_kit.Track(ids, "b")
    found = runner.step((track, 8))
    block, near, far = track.block_table[0], runner.free.pop(), runner.free.pop()
    executor.copy_blocks([(block, near), (near, far)])
    executor.swap_out([(far, 1)])
    executor._blocks[[block, near, far]] = NAN_BYTE
    executor.swap_in([(1, near)])
    track.block_table, runner.free = [near], [*runner.free, block, far]
    executor.remove_image("a")
    before = executor._images._images["b"].begin
    executor._images.set_floor(before + 1)
    assert executor._images._images["b"].begin > before
    found += runner.step((track, 2))
    assert torch.equal(torch.cat(found), expected)
    with pytest.raises(ValueError, match="13 blocks are more than 12"):
        executor.set_blocks(BLOCKS + 1)
    executor.set_blocks(BLOCKS)


@EITHER
def test_a_block_may_serve_two_sequences(pair: Pair, torch_kit: ModuleType) -> None:
    """As a prefix that is cached: what follows it has the bits of a prefill without it."""
    runner, ids = pair.gpu, tokens(20, 6)
    first = torch_kit.Track(ids, "b")
    expected = runner.step((first, 20))[0]
    second = torch_kit.Track(ids, "b", block_table=first.block_table[:1], computed=16)
    assert torch.equal(runner.step((second, 4))[0], expected[16:])
    runner.release(first)
    runner.free += second.block_table[1:]


@pytest.mark.parametrize("pair", ["llama, int8 KV"], indirect=True)
def test_int8_kv_is_near_what_it_stands_for(pair: Pair, torch_kit: ModuleType) -> None:
    """Logits move by little, and blocks are as much smaller as they are said to be."""
    ids = tokens(24, 7)
    plain = torch_kit.Runner(torch_kit.load(pair.directory, blocks=4))
    exact = plain.logits(ids)
    assert 0 < (pair.gpu.logits(ids) - exact).square().mean().sqrt() < 0.02 * exact.std()
    for executor in (pair.gpu.executor, pair.plain.executor):
        assert executor.block_bytes == plain.executor.block_bytes * (16 + 4) // (16 * 4)


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_an_adapter_may_begin_inside_a_sequence(pair: Pair, torch_kit: ModuleType) -> None:
    runner, ids = pair.gpu, tokens(9, 5)
    apart, whole = (torch_kit.Track(ids, "b", adapter_start=4) for _ in range(2))
    expected = torch.cat([runner.step((apart, n))[0] for n in (4, 5)])
    found, base = runner.step((whole, 9), (torch_kit.Track(ids), 9))
    assert torch.equal(found, expected)
    assert torch.equal(found[:4], base[:4]) and not torch.equal(found[4:], base[4:])


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_tokens_are_the_same_when_steps_are_launched_ahead(
    pair: Pair, stand_in: ModuleType, torch_kit: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way a step runs, the device draws; logits that are asked for make it wait."""
    digest = hashlib.sha256((pair.directory / "a").read_bytes()).hexdigest()
    torch_kit.add(pair.gpu.executor, digest, *torch_kit.read_image(pair.directory / "a", digest))
    options: list[dict[str, Any]] = [
        {"image": digest, "max_tokens": 3},
        {"temperature": 0.9, "seed": 5},
        {"image": digest, "temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 6},
        {"temperature": 1.5, "seed": 7, "logprobs": 0, "max_tokens": 2},
    ]
    told: list[dict[str, list[int]]] = []
    executor, launches = pair.gpu.executor, []
    launch = executor.launch
    monkeypatch.setattr(executor, "launch", lambda *each: launches.append(ahead) or launch(*each))
    for ahead in (True, False):
        residency = stand_in.StandInResidency()
        residency.resident.add(digest)
        knobs = EngineSettings(
            max_num_seqs=4, max_num_batched_tokens=24, max_model_len=40, async_scheduling=ahead
        )
        manifest = replace(stand_in.MANIFEST, vocab_size=53)
        engine = Engine(executor, residency, stand_in.StandInGuides(), knobs, manifest)
        found: dict[str, list[int]] = {}
        for name, asked in enumerate(options):
            asked = {"max_tokens": 4, "ignore_eos": True} | asked
            engine.add(stand_in.request(str(name), *tokens(3 + name, name), **asked))
            take(engine.step(), found)
        while engine.has_work:
            take(engine.step(), found)
        engine.check_integrity()
        told.append(found)
    executor.remove_image(digest)
    executor.set_blocks(BLOCKS)
    assert told[0] == told[1]
    assert [len(each) for each in told[0].values()] == [3, 4, 4, 2]
    assert len(launches) >= 3 and all(launches)


def take(events: list[Any], found: dict[str, list[int]]) -> None:
    for event in events:
        assert not isinstance(event, Failed), event
        if isinstance(event, Chunk):
            found.setdefault(event.request_id, []).extend(event.token_ids)
