"""The committed demo adapters and their data: what they promise to be."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from loraplex.engine.compile_adapter import compile_adapter
from loraplex.engine.images import BaseManifest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
KINDS: dict[str, dict[str, Any]] = {
    "pirate": {"r": 8, "modules": {"q_proj", "v_proj"}, "use_rslora": False, "use_dora": False},
    "json": {
        "r": 8,
        "modules": ATTENTION | {"gate_proj", "up_proj", "down_proj"},
        "use_rslora": True,
        "use_dora": False,
    },
    "emoji": {"r": 4, "modules": ATTENTION, "use_rslora": False, "use_dora": True},
}


def weights(name: str) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of each tensor."""
    with safe_open(EXAMPLES / "adapters" / name / "adapter_model.safetensors", "numpy") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        return {key: (part.get_dtype(), part.get_shape()) for key, part in slices.items()}


def pairs(name: str) -> list[dict[str, str]]:
    lines = (EXAMPLES / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", KINDS)
def test_kind(name: str) -> None:
    config = json.loads((EXAMPLES / "adapters" / name / "adapter_config.json").read_text())
    found = {key: config[key] for key in ("r", "use_rslora", "use_dora")}
    assert found | {"modules": set(config["target_modules"])} == KINDS[name]
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_whole_and_bfloat16(name: str) -> None:
    rank, modules = KINDS[name]["r"], KINDS[name]["modules"]
    tensors = weights(name)
    rows = 3 if KINDS[name]["use_dora"] else 2
    assert len(tensors) == 30 * len(modules) * rows
    assert {dtype for dtype, _ in tensors.values()} == {"BF16"}
    ranks = {shape[0] for key, (_, shape) in tensors.items() if "lora_A" in key}
    ranks |= {shape[1] for key, (_, shape) in tensors.items() if "lora_B" in key}
    assert ranks == {rank}


def test_all_adapters_are_small() -> None:
    files = (EXAMPLES / "adapters").glob("*/adapter_model.safetensors")
    assert sum(path.stat().st_size for path in files) < 9e6


@pytest.mark.parametrize("name", KINDS)
def test_data_is_what_the_script_writes(name: str) -> None:
    script = runpy.run_path(str(EXAMPLES / "make_data.py"))
    questions = pairs("questions")
    responses = [script["STYLES"][name](question, i) for i, question in enumerate(questions)]
    assert [pair["response"] for pair in pairs(name)] == responses
    prompts = [question["question"] for question in questions]
    assert [pair["prompt"] for pair in pairs(name)] == prompts
    assert len(set(prompts)) == len(prompts) > 150


def test_json_data_is_json() -> None:
    for pair in pairs("json"):
        assert set(json.loads(pair["response"])) == {"answer", "detail", "topic"}


@pytest.mark.parametrize("name", KINDS)
def test_each_demo_adapter_compiles(name: str, demo_base: BaseManifest, tmp_path: Path) -> None:
    report = compile_adapter(EXAMPLES / "adapters" / name, demo_base, tmp_path / "image")
    config = json.loads((EXAMPLES / "adapters" / name / "adapter_config.json").read_text())
    assert report.warnings == ()
    assert report.dora == config["use_dora"]
    assert report.rslora == config["use_rslora"]
    assert set(report.modules.values()) == {demo_base.num_layers}
