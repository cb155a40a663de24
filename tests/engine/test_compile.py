"""A compiled image computes what PEFT computes, for every kind of LoRA that is served."""

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hashlib
import json

import numpy as np
import pytest
import torch
from dense_image import Image
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_model import save_model
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine.adapter_report import Coverage, Dtypes, Range
from loraplex.engine.compile_adapter import compile_adapter
from loraplex.engine.float_arrays import widen
from loraplex.engine.images import BaseManifest, read_image
from loraplex.engine.peft_format import module_path
from loraplex.engine.reasons import Rejected

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "adapters"
LAYERS = 3
MODULES = {
    "q_proj": (32, 32),
    "k_proj": (32, 16),
    "v_proj": (32, 16),
    "o_proj": (32, 32),
    "gate_proj": (32, 48),
    "up_proj": (32, 48),
    "down_proj": (48, 32),
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS = {
    "q and v": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "rank 1": {"r": 1, "lora_alpha": 3, "target_modules": ["up_proj"]},
    "all linears": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear"},
    "rank-stabilised": {"r": 6, "use_rslora": True, "target_modules": [*ATTENTION, "down_proj"]},
    "patterns": {
        "r": 4,
        "target_modules": list(MODULES),
        "rank_pattern": {
            "layers.1.self_attn.q_proj": 9,
            "^model.layers.0.mlp.down_proj": 2,
            ".*v_proj": 3,
            r"layers\.2\.mlp\.(gate_proj|up_proj)": 5,
            "self_attn.q_proj": 7,
        },
        "alpha_pattern": {"layers.2.self_attn.o_proj": 1, "q_proj": 32, "k_proj": 0.5},
    },
    "patterns, rank-stabilised": {
        "r": 4,
        "use_rslora": True,
        "target_modules": ["q_proj", "o_proj"],
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 5},
    },
    "some layers": {"r": 4, "target_modules": ["k_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "one layer": {
        "r": 4,
        "target_modules": ["k_proj", "o_proj"],
        "layers_to_transform": 1,
        "layers_pattern": "layers",
    },
    "targets by pattern": {"r": 4, "target_modules": r".*\.(q_proj|o_proj)"},
    "targets by path": {
        "r": 4,
        "target_modules": [
            "model.layers.0.mlp.up_proj",
            "layers.2.mlp.up_proj",
            "2.self_attn.q_proj",
        ],
    },
    "exclusions": {
        "r": 4,
        "target_modules": ATTENTION,
        "exclude_modules": ["layers.1.self_attn.q_proj", "k_proj"],
    },
    "bias": {
        "r": 4,
        "lora_alpha": 12,
        "lora_bias": True,
        "target_modules": ["q_proj", "down_proj"],
    },
    "DoRA": {"r": 4, "lora_alpha": 16, "use_dora": True, "target_modules": list(MODULES)},
    "DoRA, patterns, rank-stabilised": {
        "r": 4,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": ["v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"down_proj": 3},
    },
    "orthogonal start": {
        "r": 4,
        "init_lora_weights": "orthogonal",
        "target_modules": ["q_proj", "gate_proj"],
    },
}
pytestmark = [  # PEFT's own, which mean nothing here
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*lora_bias=True"),
    pytest.mark.filterwarnings("ignore:.*lora_B.bias"),
]

Adapter = Callable[..., Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseManifest:
    path = tmp_path_factory.mktemp("base")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    save_model(path, config)
    return BaseManifest("tiny", str(path), "f" * 64, LAYERS, 32, 64, 64, (2,), MODULES)


@pytest.fixture
def adapter(base: BaseManifest, tmp_path: Path) -> Adapter:
    """Makes a PEFT adapter with weights that look trained, and saves it as PEFT does."""

    def make(dtype: torch.dtype = torch.float32, **settings: object) -> Path:
        torch.manual_seed(1)
        model = LlamaForCausalLM.from_pretrained(base.path)
        wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        for name, parameter in wrapped.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.data *= 1 + 0.3 * torch.rand_like(parameter)
            elif "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        wrapped.to(dtype).save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter"

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_computes_what_peft_computes(
    kind: str, adapter: Adapter, base: BaseManifest, tmp_path: Path
) -> None:
    source = adapter(**KINDS[kind])
    report = compile_adapter(source, base, tmp_path / "image", "fp32")
    image = Image(tmp_path / "image", report.digest)
    plain = LlamaForCausalLM.from_pretrained(base.path)
    peft = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base.path), source)

    covered: dict[str, int] = {}
    for layer in range(LAYERS):
        for name, (wide_in, _) in MODULES.items():
            path = module_path("model.", layer, name)
            x = torch.randn(5, wide_in)
            linear = plain.get_submodule(path)
            with torch.no_grad():
                wanted, bare = peft.base_model.model.get_submodule(path)(x), linear(x)
            found = image.apply(layer, name, x.numpy(), linear.weight.detach().numpy())
            if found is None:
                assert torch.equal(wanted, bare), f"PEFT adapts {path}"
                continue
            covered[name] = covered.get(name, 0) + 1
            assert np.abs(found - wanted.numpy()).max() <= 1e-5, path
            assert (wanted - bare).abs().max() > 1e-2, f"{path} changes nothing"
    assert covered == report.modules
    assert report.warnings == ()


REFUSED: dict[str, tuple[dict[str, object], set[str]]] = {
    "LoRA on embeddings": (
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"unsupported_vocabulary"},
    ),
    "LoRA on the head": ({"target_modules": ["q_proj", "lm_head"]}, {"unsupported_vocabulary"}),
    "head and embeddings saved whole": (
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        {"unsupported_modules_to_save", "unsupported_vocabulary"},
    ),
    "norms saved whole": (
        {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]},
        {"unsupported_modules_to_save", "tensor_unknown"},
    ),
    "trained tokens": (
        {"target_modules": ["q_proj"], "trainable_token_indices": [3]},
        {"unsupported_trainable_token_indices", "unsupported_vocabulary"},
    ),
    "added vocabulary": ({"target_modules": ["q_proj"]}, {"unsupported_vocabulary"}),
}


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_served_is_refused_as_peft_writes_it(
    kind: str, base: BaseManifest, tmp_path: Path
) -> None:
    settings, codes = REFUSED[kind]
    model = LlamaForCausalLM.from_pretrained(base.path)
    added = kind == "added vocabulary"
    if added:
        model.resize_token_embeddings(66, mean_resizing=False)
    wrapped = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM", **settings))
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=added or "auto")
    with pytest.raises(Rejected) as rejected:
        compile_adapter(tmp_path / "adapter", base, tmp_path / "image")
    assert {reason.code for reason in rejected.value.reasons} == codes
    assert not (tmp_path / "image").exists()


def test_the_report_says_what_was_compiled(
    adapter: Adapter, base: BaseManifest, tmp_path: Path
) -> None:
    source = adapter(r=4, use_dora=True, target_modules=["q_proj", "v_proj"])
    report = compile_adapter(source, base, tmp_path / "image")
    content = (tmp_path / "image").read_bytes()
    assert report.digest == hashlib.sha256(content).hexdigest()
    assert report.bytes == len(content)
    assert report.modules == {"q_proj": LAYERS, "v_proj": LAYERS}
    assert (report.rank, report.dora, report.rslora) == (4, True, False)
    assert report.parameters == LAYERS * (4 * (32 + 32) + 32 + 4 * (32 + 16) + 16)
    assert read_image(tmp_path / "image", report.digest)[0].base == base.fingerprint
    assert report.source_bytes == (source / "adapter_model.safetensors").stat().st_size
    assert report.coverage["q_proj"] == Coverage(LAYERS, LAYERS, 4, 4)
    assert report.coverage["up_proj"] == Coverage(0, LAYERS)
    assert (report.scaling, report.dtype) == (Range(2.0, 2.0), Dtypes(("F32",), "bf16"))
    assert set(report.seconds) == {"headers", "image", "parity"}


def test_the_report_tells_norms_and_ranges_of_each_linear(
    adapter: Adapter, base: BaseManifest, tmp_path: Path
) -> None:
    source = adapter(**KINDS["patterns"])
    report = compile_adapter(source, base, tmp_path / "image")
    assert report.coverage["q_proj"] == Coverage(LAYERS, LAYERS, 7, 9)
    assert (report.scaling.min, report.scaling.max) == (0.125, 32 / 7)
    trained = load_file(source / "adapter_model.safetensors")
    norms = []
    for layer in range(LAYERS):
        prefix = f"base_model.model.{module_path('model.', layer, 'k_proj')}"
        a, b = (trained[f"{prefix}.lora_{x}.weight"].double() for x in "AB")
        norms.append(float(torch.linalg.matrix_norm(0.125 * b @ a)))
    found = report.norms["k_proj"]
    assert found.mean == pytest.approx(sum(norms) / LAYERS)
    assert (found.max, found.layer) == (pytest.approx(max(norms)), norms.index(max(norms)))


def test_a_bf16_adapter_keeps_its_trained_bits(
    adapter: Adapter, base: BaseManifest, tmp_path: Path
) -> None:
    source = adapter(torch.bfloat16, r=4, target_modules=["k_proj"])
    report = compile_adapter(source, base, tmp_path / "image", "bf16")
    image = Image(tmp_path / "image", report.digest)
    trained = load_file(source / "adapter_model.safetensors")
    for layer in range(LAYERS):
        prefix = f"base_model.model.{module_path('model.', layer, 'k_proj')}"
        a, b = (trained[f"{prefix}.lora_{x}.weight"].view(torch.uint16).numpy() for x in "AB")
        entry = image.entries[layer, "qkv"]
        assert [s.rank for s in entry.slices] == [0, 4, 0]
        assert np.array_equal(image.array(entry.a, 4, 32, dtype="<u2"), a)
        assert np.array_equal(image.array(entry.slices[1].b, 4, 16, dtype="<u2"), b.T)


def test_dora_rows_have_the_trained_norm_as_served(
    adapter: Adapter, base: BaseManifest, tmp_path: Path
) -> None:
    """The gain is computed from the rounded A and B, so rounding does not move the norms."""
    source = adapter(r=4, use_dora=True, target_modules=["o_proj"])
    report = compile_adapter(source, base, tmp_path / "image", "bf16")
    image = Image(tmp_path / "image", report.digest)
    trained = load_file(source / "adapter_model.safetensors")
    weights = LlamaForCausalLM.from_pretrained(base.path)
    entry = image.entries[0, "o"]
    a = widen(image.array(entry.a, 4, 32, dtype="<u2"))
    b = widen(image.array(entry.slices[0].b, 4, 32, dtype="<u2")).T
    path = module_path("model.", 0, "o_proj")
    merged = weights.get_submodule(path).weight.detach().numpy() + 2.0 * b @ a
    gain = image.array(entry.slices[0].gain, 32)
    magnitude = trained[f"base_model.model.{path}.lora_magnitude_vector"].numpy()
    assert np.allclose(np.linalg.norm(gain[:, None] * merged, axis=1), magnitude, rtol=1e-6)


@pytest.mark.parametrize("root", ["base_model.model.model.", "model."])
@pytest.mark.parametrize("infix", ["", ".default"])
def test_names_and_order_of_tensors_do_not_change_the_image(
    root: str, infix: str, adapter: Adapter, base: BaseManifest, tmp_path: Path
) -> None:
    source = adapter(r=4, use_dora=True, target_modules=["q_proj", "up_proj"])
    original = compile_adapter(source, base, tmp_path / "one")
    weights = source / "adapter_model.safetensors"
    renamed = {
        name.replace("base_model.model.model.", root)
        .replace(".weight", f"{infix}.weight")
        .replace("_vector", f"_vector{infix}"): tensor
        for name, tensor in reversed(load_file(weights).items())
    }
    save_file(renamed, weights)
    assert compile_adapter(source, base, tmp_path / "two").digest == original.digest


def test_an_adapter_of_the_bare_stack_is_the_same(
    adapter: Adapter, base: BaseManifest, tmp_path: Path
) -> None:
    """Trained on `LlamaModel`, names begin with `base_model.model.layers`."""
    source = adapter(r=4, target_modules=["q_proj"], layers_to_transform=[1])
    original = compile_adapter(source, base, tmp_path / "one")
    weights = source / "adapter_model.safetensors"
    save_file(
        {n.replace(".model.model.", ".model."): t for n, t in load_file(weights).items()}, weights
    )
    assert compile_adapter(source, base, tmp_path / "two").digest == original.digest


def test_another_base_or_dtype_is_another_image(
    adapter: Adapter, base: BaseManifest, tmp_path: Path
) -> None:
    source = adapter(r=4, target_modules=["q_proj"])
    other = BaseManifest("tiny", base.path, "e" * 64, LAYERS, 32, 64, 64, (2,), MODULES)
    digests = [
        compile_adapter(source, base, tmp_path / "a").digest,
        compile_adapter(source, base, tmp_path / "b", "fp32").digest,
        compile_adapter(source, other, tmp_path / "c").digest,
    ]
    assert len(set(digests)) == 3


def test_an_untrained_adapter_is_flagged(
    adapter: Adapter, base: BaseManifest, tmp_path: Path
) -> None:
    source = adapter(r=4, target_modules=["q_proj", "v_proj"])
    weights = source / "adapter_model.safetensors"
    tensors = load_file(weights)
    zeroed = {n: t * 0 if "lora_B" in n and "v_proj" in n else t for n, t in tensors.items()}
    save_file(zeroed, weights)
    report = compile_adapter(source, base, tmp_path / "image")
    (warning,) = report.warnings
    assert warning.code == "no_effect"
    assert "v_proj of layer 0" in warning.message
    assert report.zero_modules == tuple(f"v_proj of layer {layer}" for layer in range(LAYERS))
    assert report.norms["v_proj"].max == 0

    save_file({n: t * 0 if "lora_B" in n else t for n, t in tensors.items()}, weights)
    with pytest.raises(Rejected, match="every B is zero"):
        compile_adapter(source, base, tmp_path / "other")
    assert not list(tmp_path.glob("other*"))


@pytest.mark.parametrize(
    ("asked", "matches"),
    [
        (None, None),
        ("", None),
        ("org/TINY/", True),
        ("C:\\models\\tiny", True),
        ("org/small", False),
    ],
)
def test_another_base_in_the_configuration_is_a_warning(
    asked: str | None, matches: bool | None, adapter: Adapter, base: BaseManifest, tmp_path: Path
) -> None:
    source = adapter(r=4, target_modules=["q_proj"])
    config = json.loads((source / "adapter_config.json").read_text())
    text = json.dumps(config | {"base_model_name_or_path": asked})
    (source / "adapter_config.json").write_text(text)
    report = compile_adapter(source, base, tmp_path / "image")
    assert (report.base.asked, report.base.matches) == (asked or None, matches)
    assert (report.base.name, report.base.fingerprint) == (base.name, base.fingerprint)
    assert [w.code for w in report.warnings] == (["base_differs"] if matches is False else [])


def test_names_that_select_nothing_are_mentioned(
    adapter: Adapter, base: BaseManifest, tmp_path: Path
) -> None:
    source = adapter(r=4, target_modules=["q_proj", "query_key_value"])
    config = json.loads((source / "adapter_config.json").read_text())
    config["alpha_pattern"] = {"layers.1.q_proj": 4}
    (source / "adapter_config.json").write_text(json.dumps(config))
    target, pattern = compile_adapter(source, base, tmp_path / "image").warnings
    assert target.code == "target_unknown"
    assert "query_key_value" in target.message
    assert pattern.code == "pattern_unused"
    assert "layers.1.q_proj" in pattern.message
