"""The demo adapters against PEFT, and the promise that neighbours do not matter, on the demo base.

Transformers and PEFT run in fp32; adapters are bf16, in their files and in their images.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
import transformers

from loraplex.engine.compile_adapter import compile_adapter
from loraplex.engine.images import BaseManifest, read_image

ADAPTERS = Path(__file__).resolve().parents[2] / "examples" / "adapters"
NAMES = ("pirate", "json", "emoji")
STEPS = {"torch": 20, "native": 64}  # more than a block's tokens; a step of torch's takes long

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")


@pytest.fixture(scope="module")
def runner(
    demo_runner: Callable[..., Any],
    demo_base: BaseManifest,
    torch_kit: ModuleType,
    tmp_path_factory: Any,
) -> Any:
    """The demo base in fp32 with all demo adapters resident, under their names."""
    found, folder = demo_runner(), tmp_path_factory.mktemp("images")
    for name in NAMES:
        path = folder / f"{name}.safetensors"
        digest = compile_adapter(ADAPTERS / name, demo_base, path).digest
        torch_kit.add(found.executor, name, *read_image(path, digest))
    return found


@pytest.fixture(scope="module")
def model(demo_base: BaseManifest) -> peft.PeftModel:
    base = transformers.AutoModelForCausalLM.from_pretrained(demo_base.path, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, ADAPTERS / NAMES[0], NAMES[0])
    for name in NAMES[1:]:
        adapted.load_adapter(ADAPTERS / name, name)
    return adapted.eval()


def prompt(seed: int, length: int) -> list[int]:
    """Ids drawn from the first ones, which are the frequent ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 4000, (length,), generator=generator).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_peft(runner: Any, model: peft.PeftModel, name: str) -> None:
    ids = prompt(0, 150)
    model.set_adapter(name)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    found = runner.logits(ids, name)
    assert (found - runner.logits(ids)).abs().max() > 1
    assert (found - expected).abs().max() <= 1e-4


def test_base_rows_have_the_same_bits_among_adapters(runner: Any, torch_kit: ModuleType) -> None:
    ids = [prompt(seed, 20 + 13 * seed) for seed in range(4)]
    base = [torch_kit.Track(tokens) for tokens in ids]
    expected = runner.step(*((track, len(track.token_ids)) for track in base))
    among = [torch_kit.Track(tokens) for tokens in ids]
    others = [torch_kit.Track(prompt(9, 30), name) for name in NAMES]
    found = runner.step(*((track, len(track.token_ids)) for track in [*others, *among]))
    runner.release(*base, *among, *others)
    assert all(torch.equal(a, b) for a, b in zip(expected, found[3:], strict=True))


def test_greedy_tokens_are_the_same_in_any_batch(
    runner: Any, torch_kit: ModuleType, executor_name: str
) -> None:
    """Steps alone, and in a batch with strangers while prompts of others are cut up between."""
    images, steps = (None, *NAMES), STEPS[executor_name]
    prompts = [prompt(20 + i, 5 + 41 * i) for i in range(len(images))]
    alone = [torch_kit.Track(list(ids), name) for ids, name in zip(prompts, images, strict=True)]
    for track in alone:
        runner.greedy([track], steps)
        runner.release(track)
    mixed = [torch_kit.Track(list(ids), name) for ids, name in zip(prompts, images, strict=True)]
    strangers = [torch_kit.Track(prompt(30 + i, 70 + 60 * i), NAMES[i]) for i in range(3)]
    runner.greedy([strangers[0], *mixed, *strangers[1:]], steps, chunks=(7, 1, 32))
    runner.release(*mixed, *strangers)
    assert [track.token_ids for track in mixed] == [track.token_ids for track in alone]
