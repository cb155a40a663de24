"""The decoder against Transformers: tiny random models of each family, all positions, fp32."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from loraplex.engine.model.config import ModelError, read_model_config

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    name: str
    config: type
    options: dict[str, Any]


FAMILIES = [
    Family("llama", transformers.LlamaConfig, {}),
    Family("llama, tied", transformers.LlamaConfig, {"tie_word_embeddings": True}),
    Family("llama, explicit head_dim", transformers.LlamaConfig, {"head_dim": 20}),
    Family("llama, one kv head", transformers.LlamaConfig, {"num_key_value_heads": 1}),
    Family("llama, biases", transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    Family(
        "llama, linear rope",
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}},
    ),
    Family("llama, llama3 rope", transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    Family("llama, yarn", transformers.LlamaConfig, {"rope_parameters": YARN}),
    Family(
        "llama, yarn with mscale",
        transformers.LlamaConfig,
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}},
    ),
    Family("mistral", transformers.MistralConfig, {"sliding_window": None, "head_dim": 16}),
    Family("mistral, window", transformers.MistralConfig, {"sliding_window": 37}),
    Family("qwen2", transformers.Qwen2Config, {}),
    Family(
        "qwen2, window in some layers",
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 2},
    ),
    Family("qwen3", transformers.Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
]
BY_NAME = {family.name: family for family in FAMILIES}


def make(family: Family, directory: Path, **saving: Any) -> transformers.PreTrainedModel:
    """A model with numbers everywhere, biases and norms too, and logits that spread."""
    torch.manual_seed(0)
    config = family.config(**(SIZES | family.options))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.15).add_("norm" in name)
    model.save_pretrained(directory, **saving)
    return model.eval()


def difference(kit: ModuleType, directory: Path, model: transformers.PreTrainedModel) -> float:
    """Largest |Δ| of logits over a prompt of more than a tile of keys, in two chunks."""
    tokens = torch.randint(0, 97, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    runner, track = kit.Runner(kit.load(directory, blocks=20)), kit.Track(tokens)
    parts = [runner.step((track, 90))[0], runner.step((track, 110))[0]]
    assert expected.std() > 0.5
    return float((torch.cat(parts) - expected).abs().max())


@pytest.mark.parametrize("name", BY_NAME)
def test_logits(name: str, tmp_path: Path, torch_kit: ModuleType) -> None:
    model = make(BY_NAME[name], tmp_path)
    assert difference(torch_kit, tmp_path, model) < 2e-5


def test_sharded_checkpoint(tmp_path: Path, torch_kit: ModuleType) -> None:
    model = make(BY_NAME["llama"], tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert difference(torch_kit, tmp_path, model) < 2e-5


@pytest.mark.parametrize("name", ["llama, linear rope", "llama, llama3 rope", "mistral, window"])
def test_configuration_of_older_transformers(
    name: str, tmp_path: Path, torch_kit: ModuleType
) -> None:
    model = make(BY_NAME[name], tmp_path)

    def age(config: dict[str, Any]) -> None:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope

    edit(tmp_path, age)
    assert difference(torch_kit, tmp_path, model) < 2e-5


def test_weights_in_half_precision_are_widened(tmp_path: Path, torch_kit: ModuleType) -> None:
    make(BY_NAME["qwen2"], tmp_path).half().save_pretrained(tmp_path)
    widened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert difference(torch_kit, tmp_path, widened) < 2e-5


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", "lack model.layers.1.mlp.up_proj.weight"),
        ("model.layers.0.self_attn.k_proj.bias", "lack model.layers.0.self_attn.k_proj.bias"),
        ("lm_head.weight", "lack lm_head.weight"),
    ],
)
def test_missing_tensor(tensor: str, message: str, tmp_path: Path, torch_kit: ModuleType) -> None:
    state = make(BY_NAME["qwen2"], tmp_path).state_dict()
    del state[tensor]
    save(state, tmp_path)
    with pytest.raises(ModelError, match=message):
        torch_kit.load(tmp_path)


def test_tensor_that_nobody_reads(tmp_path: Path, torch_kit: ModuleType) -> None:
    state = make(BY_NAME["llama"], tmp_path).state_dict()
    save(state | {"model.layers.0.mlp.extra": torch.ones(1)}, tmp_path)
    with pytest.raises(ModelError, match=r"no use for model\.layers\.0\.mlp\.extra"):
        torch_kit.load(tmp_path)


def test_tensors_that_older_files_carry(tmp_path: Path, torch_kit: ModuleType) -> None:
    model = make(BY_NAME["llama, tied"], tmp_path)
    state = model.state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save(state, tmp_path)
    assert difference(torch_kit, tmp_path, model) < 2e-5


def test_wrong_shape(tmp_path: Path, torch_kit: ModuleType) -> None:
    state = make(BY_NAME["llama"], tmp_path).state_dict()
    save(state | {"model.norm.weight": torch.ones(47)}, tmp_path)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(47,\)"):
        torch_kit.load(tmp_path)


def test_integers_are_refused(tmp_path: Path, torch_kit: ModuleType) -> None:
    state = make(BY_NAME["llama"], tmp_path).state_dict()
    save(state | {"model.norm.weight": torch.ones(48, dtype=torch.int8)}, tmp_path)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as torch\.int8"):
        torch_kit.load(tmp_path)


def test_truncated_file(tmp_path: Path, torch_kit: ModuleType) -> None:
    make(BY_NAME["llama"], tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be read"):
        torch_kit.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "supported are llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_size": "48"}, "hidden_size is '48'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 4}, "multiple of KV heads"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
    ],
)
def test_configuration_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    edit(tmp_path, lambda config: config.update(change))
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


def test_configuration_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        read_model_config(tmp_path)


def save(state: dict[str, torch.Tensor], directory: Path) -> None:
    import safetensors.torch

    copies = {name: tensor.clone() for name, tensor in state.items()}
    safetensors.torch.save_file(copies, directory / "model.safetensors")


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))
