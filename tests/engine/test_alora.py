"""Activated LoRA (Greenewald et al. 2025) on a tiny model: PEFT's logits, from where it begins on.

Rows before that have the bits of the bare base.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import save_model
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine.activation import activation
from loraplex.engine.compile_adapter import compile_adapter
from loraplex.engine.images import BaseManifest, read_image

INVOCATION = (5, 9, 5)
SIZES = {
    "q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 32), "o_proj": (64, 64),
    "gate_proj": (64, 96), "up_proj": (64, 96), "down_proj": (96, 64),
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj"]},
    "bias": {"r": 3, "lora_bias": True, "use_rslora": True, "target_modules": "all-linear"},
}
PROMPTS = {
    "mid-prompt": ([*range(20, 37), *INVOCATION, 3, 4], 17),
    "at the start": ([*INVOCATION, *range(30, 50)], 0),
    "at the end": ([*range(20, 41), *INVOCATION], 21),
    "twice": ([8, *INVOCATION, *range(20, 35), *INVOCATION, 7], 19),
    "overlapping": ([8, 11, 5, 9, 5, 9, 5, 12], 4),
    "absent": ([*range(20, 40), 5, 9], None),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*lora_bias=True"),
    pytest.mark.filterwarnings("ignore:.*lora_B.bias"),
]


@pytest.mark.parametrize("case", PROMPTS)
def test_the_adapter_begins_with_the_last_invocation(case: str) -> None:
    prompt, start = PROMPTS[case]
    assert activation(prompt, INVOCATION) == start


def test_an_adapter_without_invocation_is_always_active() -> None:
    assert activation([1, 2], ()) == 0


@given(
    st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=4)
)
def test_activation_is_what_peft_finds(prompt: list[int], invocation: list[int]) -> None:
    config = {"default": peft.LoraConfig(alora_invocation_tokens=invocation, task_type="CAUSAL_LM")}
    (offset,) = peft.tuners.lora.variants.calculate_alora_offsets(
        config, "default", torch.tensor([prompt], dtype=torch.long)
    )
    wanted = None if offset is None else len(prompt) - offset
    assert activation(prompt, tuple(invocation)) == wanted


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseManifest:
    path = tmp_path_factory.mktemp("base")
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    save_model(path, config)
    return BaseManifest("tiny", str(path), "f" * 64, 2, 64, 61, 128, (2,), SIZES)


@pytest.fixture(scope="module")
def sources(base: BaseManifest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters whose weights look trained, as PEFT saves them."""
    found = {}
    for kind, settings in KINDS.items():
        torch.manual_seed(1)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", alora_invocation_tokens=list(INVOCATION), **settings
        )
        model = peft.get_peft_model(LlamaForCausalLM.from_pretrained(base.path), config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        found[kind] = tmp_path_factory.mktemp("adapter")
        model.save_pretrained(found[kind])
    return found


@pytest.fixture(scope="module")
def runner(
    base: BaseManifest,
    sources: dict[str, Path],
    torch_kit: ModuleType,
    executor_name: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """An executor in fp32 with the adapters resident under their kinds."""
    found = torch_kit.Runner(torch_kit.LOAD[executor_name](Path(base.path), "float32"))
    for kind, source in sources.items():
        path = tmp_path_factory.mktemp("images") / "image"
        report = compile_adapter(source, base, path, "fp32")
        header, block = read_image(path, report.digest)
        assert header.invocation == report.invocation == INVOCATION
        torch_kit.add(found.executor, kind, header, block)
    return found


@pytest.fixture(scope="module")
def models(base: BaseManifest, sources: dict[str, Path]) -> dict[str, peft.PeftModel]:
    return {
        kind: peft.PeftModel.from_pretrained(
            LlamaForCausalLM.from_pretrained(base.path), source
        ).eval()
        for kind, source in sources.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", PROMPTS)
def test_logits_are_those_of_peft(
    kind: str, case: str, runner: Any, models: dict[str, peft.PeftModel], torch_kit: ModuleType
) -> None:
    prompt, start = PROMPTS[case]
    with torch.inference_mode():
        expected = models[kind](torch.tensor([prompt])).logits[0]
    track = torch_kit.Track(prompt, kind, adapter_start=start)
    (found,) = runner.step((track, len(prompt)))
    runner.release(track)
    bare = runner.logits(prompt)
    assert (found - expected).abs().max() <= 1e-4
    assert torch.equal(found[:start], bare[:start])
    if start is not None:
        assert (found[start:] - bare[start:]).abs().amax(1).min() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_generation_goes_on_under_the_adapter(
    kind: str, runner: Any, models: dict[str, peft.PeftModel], torch_kit: ModuleType
) -> None:
    """Greedy, all prompts in common batches and cut anywhere, as PEFT generates from each alone."""
    tracks = [
        torch_kit.Track(list(prompt), kind, adapter_start=start)
        for prompt, start in PROMPTS.values()
    ]
    runner.greedy(tracks, 12, chunks=(5, 1, 9))
    runner.release(*tracks)
    for track, (prompt, _) in zip(tracks, PROMPTS.values(), strict=True):
        ids = torch.tensor([prompt])
        expected = models[kind].generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert track.token_ids == expected[0].tolist()


def test_company_and_chunks_do_not_change_a_bit(runner: Any, torch_kit: ModuleType) -> None:
    prompt, start = PROMPTS["mid-prompt"]
    alone = torch_kit.Track(prompt, "bias", adapter_start=start)
    (expected,) = runner.step((alone, len(prompt)))
    cut = torch_kit.Track(prompt, "bias", adapter_start=start)
    others = [
        torch_kit.Track(p, kind, adapter_start=s) for kind in KINDS for p, s in PROMPTS.values()
    ]
    found = []
    for count in (16, 2, len(prompt) - 18):
        found.append(runner.step((others.pop(), 5), (cut, count), (others.pop(0), 8))[1])
    assert torch.equal(torch.cat(found), expected)
