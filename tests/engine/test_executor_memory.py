"""KV blocks and images in one region: whatever is copied, swapped and moved, no logit changes."""

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from tiny_model import save_model

from loraplex.engine.images import ImageHeader, read_image
from loraplex.engine.model.config import read_model_config

BLOCKS, SLOTS = 12, 4
IMAGES = tuple("abcdef")
FITTING = 3  # images that there is room for beside all blocks

Files = dict[str, tuple[ImageHeader, bytearray]]
Make = Callable[..., Any]
Logits = dict[str | None, torch.Tensor]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=53, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    )  # fmt: skip
    save_model(folder, config)
    return folder


@pytest.fixture(scope="module")
def files(directory: Path, torch_kit: ModuleType) -> Files:
    """Images of different sizes."""
    found, config = {}, read_model_config(directory)
    for seed, name in enumerate(IMAGES, 1):
        projections = " ".join(("qkv", "o", "gate_up", "down")[: 1 + seed % 4])
        digest = torch_kit.random_image(directory / name, config, seed, projections=projections)
        found[name] = read_image(directory / name, digest)
    return found


@pytest.fixture(scope="module", params=["torch", "native", "native, int8 KV"])
def make(
    request: pytest.FixtureRequest, directory: Path, files: Files, torch_kit: ModuleType
) -> Iterator[Make]:
    """Makes a runner with images, whose region has room for all blocks and a few images."""
    load = torch_kit.load if request.param == "torch" else torch_kit.load_native
    if "int8" in request.param:
        load = functools.partial(load, kv_dtype=torch.int8)
    probe = load(directory, blocks=1)
    made = [probe]
    room = sum(sorted(probe.image_bytes(header) for header, _ in files.values())[-FITTING:])

    def runner(*images: str) -> Any:
        made.append(load(directory, blocks=BLOCKS, swap_slots=SLOTS, room=room))
        for name in images:
            torch_kit.add(made[-1], name, *files[name])
        return torch_kit.Runner(made[-1])

    yield runner
    if request.param == "native":
        for executor in made:
            executor.close()


@pytest.fixture(scope="module")
def alone(make: Make) -> Logits:
    """Logits of one prompt under each image and none, each alone in an executor."""
    found: Logits = {image: make(image).logits(PROMPT, image) for image in IMAGES}
    return found | {None: make().logits(PROMPT)}


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 53, (count,), generator=generator).tolist()


PROMPT = tokens(30, 3)


def test_blocks_are_copied_in_order(make: Make, torch_kit: ModuleType) -> None:
    """From block to block, the second pair reading what the first wrote."""
    runner = make("a")
    track = torch_kit.Track(tokens(60, 1), "a")
    expected = runner.logits(track.token_ids, "a")
    runner.step((track, 40))
    (first, *rest), (middle, last) = track.block_table, [runner.free.pop() for _ in range(2)]
    runner.executor.copy_blocks([(first, middle), (middle, last), (rest[0], middle)])
    track.block_table = [last, middle, *rest[1:]]
    runner.free += [first, rest[0]]
    spoil(runner, torch_kit)
    assert torch.equal(runner.step((track, 20))[0], expected[40:])


def test_blocks_come_back_from_the_host(make: Make, torch_kit: ModuleType) -> None:
    """Into other blocks, after theirs were written by others."""
    runner = make("a")
    track, short = torch_kit.Track(tokens(60, 1), "a"), torch_kit.Track(tokens(20, 2))
    expected = [runner.logits(t.token_ids, t.image) for t in (track, short)]
    runner.step((track, 40), (short, 10))
    old = [*short.block_table, *track.block_table]
    runner.executor.swap_out([(block, slot) for block, slot in zip(old, (2, 3, 0, 1), strict=True)])
    runner.free += old
    spoil(runner, torch_kit)
    new = [runner.free.pop() for _ in old]
    runner.executor.swap_in([(slot, block) for slot, block in zip((2, 3, 0, 1), new, strict=True)])
    short.block_table, track.block_table = new[:1], new[1:]
    found = runner.step((track, 20), (short, 10))
    assert torch.equal(found[0], expected[0][40:])
    assert torch.equal(found[1], expected[1][10:])


class Traffic:
    """Images and sequences that come and go in one executor."""

    def __init__(self, runner: Any, files: Files, alone: Logits, kit: ModuleType) -> None:
        self.runner, self.executor, self.kit, self.alone = runner, runner.executor, kit, alone
        self.prepared = {n: self.executor.prepare_image(*file) for n, file in files.items()}
        self.sizes = {n: self.executor.image_bytes(header) for n, (header, _) in files.items()}
        self.resident: list[str] = []
        self.tracks: list[Any] = []
        self.refused = 0
        self.random = random.Random(0)

    def add(self, name: str) -> None:
        taken = sum(self.sizes[n] for n in self.resident)
        if taken + self.sizes[name] > room_of(self.executor):
            with pytest.raises(MemoryError):
                self.executor.add_image(name, self.prepared[name])
            self.refused += 1
        else:
            self.executor.add_image(name, self.prepared[name])
            self.resident.append(name)

    def remove_one(self) -> None:
        held = {track.image for track in self.tracks}
        if idle := [name for name in self.resident if name not in held]:
            gone = self.random.choice(idle)
            self.executor.remove_image(gone)
            self.resident.remove(gone)

    def run(self) -> None:
        """Rows of all tracks, each as if it were alone."""
        left = [(t, min(self.random.randint(1, 12), 30 - t.computed)) for t in self.tracks]
        for (track, count), logits in zip(left, self.runner.step(*left), strict=True):
            whole = self.alone[track.image]
            assert torch.equal(logits, whole[track.computed - count : track.computed])
        done = [track for track in self.tracks if track.computed == 30]
        self.runner.release(*done)
        self.tracks = [track for track in self.tracks if track not in done]


def test_images_come_and_go_while_sequences_run(
    make: Make, files: Files, alone: Logits, torch_kit: ModuleType
) -> None:
    """In a region that holds few, so that they move."""
    traffic = Traffic(make(), files, alone, torch_kit)
    for _ in range(80):
        if absent := sorted(set(IMAGES) - set(traffic.resident)):
            traffic.add(traffic.random.choice(absent))
        if traffic.random.random() < 0.7:
            traffic.remove_one()
        if len(traffic.tracks) < 4:
            image = traffic.random.choice([None, *traffic.resident])
            traffic.tracks.append(torch_kit.Track(PROMPT, image))
        traffic.run()
    assert traffic.refused > 3


def test_an_image_that_does_not_fit_changes_nothing(
    make: Make, files: Files, alone: Logits, torch_kit: ModuleType
) -> None:
    traffic = Traffic(make(), files, alone, torch_kit)
    for name in IMAGES:
        traffic.add(name)
    assert traffic.refused
    absent = next(name for name in IMAGES if name not in traffic.resident)
    with pytest.raises(KeyError):
        traffic.runner.step((torch_kit.Track(PROMPT, absent), 3))
    traffic.tracks = [torch_kit.Track(PROMPT, image) for image in (None, *traffic.resident)]
    while traffic.tracks:
        traffic.run()


def test_blocks_and_images_trade_memory(
    make: Make, files: Files, alone: Logits, torch_kit: ModuleType
) -> None:
    """All images in the place of most blocks; all blocks again once there is room."""
    runner = make("a")
    executor = runner.executor
    executor.set_blocks(2)
    runner.free = [0, 1]
    for name in IMAGES[1:]:
        torch_kit.add(executor, name, *files[name])
    track = torch_kit.Track(PROMPT, "a")
    found = runner.step((track, 20))
    with pytest.raises(MemoryError):
        executor.set_blocks(BLOCKS)
    found += runner.step((track, 5))
    for name in "bdf":
        executor.remove_image(name)
    executor.set_blocks(BLOCKS)
    runner.free = list(range(2, BLOCKS))
    spoil(runner, torch_kit)
    found += runner.step((track, 5))
    assert torch.equal(torch.cat(found), alone["a"])
    for image in (None, *"ace"):
        assert torch.equal(runner.logits(PROMPT, image), alone[image])


def test_more_blocks_than_there_can_be(make: Make) -> None:
    with pytest.raises(ValueError, match="13 blocks are more than 12"):
        make().executor.set_blocks(BLOCKS + 1)


@pytest.mark.parametrize("start", [1, 15, 16, 17, 29])
def test_an_adapter_may_begin_inside_a_sequence(
    start: int, make: Make, alone: Logits, torch_kit: ModuleType
) -> None:
    """One step with rows of both kinds, among others, is two steps with rows of one kind."""
    runner = make("a", "b")
    apart = torch_kit.Track(PROMPT, "a", adapter_start=start)
    expected = torch.cat([runner.step((apart, n))[0] for n in (start, 30 - start)])
    runner.release(apart)
    tracks = [torch_kit.Track(PROMPT, image, adapter_start=start) for image in "aba"]
    tracks += [torch_kit.Track(PROMPT, "a"), torch_kit.Track(PROMPT, "a", adapter_start=None)]
    first, other, second, whole, never = runner.step(*((track, 30) for track in tracks))
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert torch.equal(whole, alone["a"]) and torch.equal(never, alone[None])
    for logits in (first, other):
        assert torch.equal(logits[:start], never[:start])
        assert not torch.equal(logits[start:], never[start:])
    assert not torch.equal(first[start:], other[start:])
    assert not torch.equal(first[start:], whole[start:])


def room_of(executor: Any) -> int:
    """Bytes for images beside all blocks."""
    return int(executor.memory_bytes - executor.num_blocks * executor.block_bytes)


def spoil(runner: Any, kit: ModuleType) -> None:
    """Have another sequence write all free blocks."""
    count = len(runner.free) * runner.executor.block_size
    other = kit.Track(tokens(count, 9))
    runner.step((other, count))
    runner.release(other)
