"""The torch executor on a tiny model: neighbours, images, threads, sizes."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from tiny_model import save_model

from loraplex.engine.images import Entry, ImageError, ImageHeader, Slice
from loraplex.engine.load import load_torch
from loraplex.engine.model.config import read_model_config
from loraplex.engine.settings import EngineSettings

LENGTHS = (3, 40, 129, 17, 64)
IMAGES = (None, "a", "b", "a", None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with biases, and a window in half of its layers."""
    folder = tmp_path_factory.mktemp("qwen2")
    config = transformers.Qwen2Config(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512,
        use_sliding_window=True, sliding_window=50, max_window_layers=2,
    )  # fmt: skip
    save_model(folder, config)
    return folder


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def runner(
    directory: Path, tmp_path: Path, torch_kit: ModuleType, request: pytest.FixtureRequest
) -> Any:
    """A runner with two images; all blocks hold NaN from the start."""
    executor = torch_kit.load(directory, request.param, blocks=80)
    executor._cache.data.fill_(torch.nan)
    for seed, name in enumerate("ab", 2):
        add(torch_kit, executor, name, seed, tmp_path)
    return torch_kit.Runner(executor)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def add(kit: ModuleType, executor: Any, name: str, seed: int, folder: Path) -> None:
    path, config = folder / f"{name}.safetensors", executor._decoder.config
    digest = kit.random_image(path, config, seed, projections="qkv o gate_up down")
    kit.add(executor, name, *kit.read_image(path, digest))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 97, (n,), generator=generator).tolist() for n in LENGTHS]


def test_any_company_and_chunking_gives_the_same_bits(runner: Any, torch_kit: ModuleType) -> None:
    alone = [runner.logits(ids, d) for ids, d in zip(prompts(), IMAGES, strict=True)]
    tracks = [torch_kit.Track(ids, d) for ids, d in zip(prompts(), IMAGES, strict=True)]
    seen: list[list[torch.Tensor]] = [[] for _ in tracks]
    turn = 0
    while left := [
        (t, len(t.token_ids) - t.computed) for t in tracks if t.computed < len(t.token_ids)
    ]:
        parts = [(t, min(n, (7 * i + 5 * turn) % 30 + 1)) for i, (t, n) in enumerate(left)]
        turn += 1
        for (track, _), logits in zip(parts, runner.step(*parts), strict=True):
            seen[tracks.index(track)].append(logits)
    assert max(len(pieces) for pieces in seen) > 5
    for pieces, whole in zip(seen, alone, strict=True):
        assert torch.equal(torch.cat(pieces), whole)


def test_any_number_of_threads_gives_the_same_bits(
    directory: Path, torch_kit: ModuleType, threads: None
) -> None:
    found = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        runner = torch_kit.Runner(torch_kit.load(directory, blocks=20))
        found.append(runner.logits(prompts()[2]))
    assert all(torch.equal(found[0], logits) for logits in found[1:])


def test_base_rows_do_not_see_adapters(runner: Any, torch_kit: ModuleType) -> None:
    base = [torch_kit.Track(ids) for ids in prompts()[:2]]
    among = [torch_kit.Track(ids) for ids in prompts()[:2]]
    other = torch_kit.Track(prompts()[3], "b")
    expected = runner.step(*((t, len(t.token_ids)) for t in base))
    found = runner.step((other, 17), *((t, len(t.token_ids)) for t in among))[1:]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_images_change_their_rows(runner: Any) -> None:
    ids = prompts()[1]
    base, a, b = (runner.logits(ids, image) for image in (None, "a", "b"))
    assert not torch.allclose(base, a, atol=0.1)
    assert not torch.allclose(a, b, atol=0.1)


def test_removed_image_is_gone(runner: Any, torch_kit: ModuleType) -> None:
    runner.executor.remove_image("a")
    with pytest.raises(KeyError):
        runner.step((torch_kit.Track([1, 2], "a"), 2))


def test_only_wanted_rows_have_logits(runner: Any, torch_kit: ModuleType) -> None:
    track = torch_kit.Track(prompts()[1], block_table=[5, 9, 2])
    first, _ = torch_kit.build([torch_kit.Part(track, 0, 30, 0)], torch_kit.BLOCK_SIZE)
    last, _ = torch_kit.build([torch_kit.Part(track, 30, 10, 3)], torch_kit.BLOCK_SIZE)
    assert runner.executor.execute(first).logits.shape == (0, 97)
    logits = runner.executor.execute(last).logits
    assert logits.dtype == torch.float32
    assert torch.equal(logits, runner.logits(prompts()[1])[-3:])


@pytest.mark.parametrize(
    "entry",
    [
        Entry(4, "o", 48, 0, 0, (Slice(1, 48, 0),)),
        Entry(0, "lm_head", 48, 0, 0, (Slice(1, 97, 0),)),
        Entry(0, "o", 47, 0, 0, (Slice(1, 48, 0),)),
        Entry(0, "qkv", 48, 0, 0, (Slice(1, 48, 0),)),
        Entry(0, "o", 48, 0, 1 << 20, (Slice(1, 48, 0),)),
        Entry(0, "o", 48, -4, 0, (Slice(1, 48, 0),)),
        Entry(0, "o", 48, 0, 0, (Slice(1, 48, -1),)),
        Entry(0, "o", 48, 0, 0, (Slice(1, 48, 0, gain=4000),)),
    ],
)
def test_image_that_does_not_fit(runner: Any, entry: Entry) -> None:
    header = ImageHeader("f" * 64, "fp32", 4096, (entry,))
    with pytest.raises(ImageError):
        runner.executor.prepare_image(header, bytearray(4096))


def test_image_without_rank_may_have_rows(runner: Any, torch_kit: ModuleType) -> None:
    gain = Entry(0, "o", 48, 0, 0, (Slice(0, 48, gain=0),))
    header = ImageHeader("f" * 64, "bf16", 4096, (gain,))
    torch_kit.add(runner.executor, "c", header, bytearray(4096))
    assert runner.logits([1, 2, 3], "c").isfinite().all()


def test_load_torch_takes_what_settings_say(directory: Path, threads: None) -> None:
    token = 2 * 4 * 2 * 8 * 2  # K and V, layers, KV heads, head size, bytes of a bf16
    settings = EngineSettings(
        dtype="bfloat16", kv_cache_bytes=10 * 8 * token + 1, block_size=8, threads=1
    )
    executor = load_torch(directory, read_model_config(directory), settings)
    assert (executor.num_blocks, executor.block_size) == (10, 8)
    assert (executor.name, executor.device, executor.dtype) == ("torch", "cpu", "bfloat16")
    assert torch.get_num_threads() == 1
    assert executor.block_bytes == 8 * token
    assert executor.memory_bytes > 10 * executor.block_bytes
