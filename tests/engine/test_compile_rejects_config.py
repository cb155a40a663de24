"""Configurations that the compiler refuses: each with its reasons, all of them, and no image."""

import runpy
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from loraplex.engine.compile_adapter import compile_adapter
from loraplex.engine.peft_config_reader import HARMLESS, UNSUPPORTED, USED

KIT = runpy.run_path(str(Path(__file__).with_name("adapter_kit.py")))
BASE, CONFIG, tensors, write, reasons = itemgetter("BASE", "CONFIG", "tensors", "write", "reasons")(
    KIT
)


def test_the_untouched_example_is_accepted(tmp_path: Path) -> None:
    report = compile_adapter(write(tmp_path, CONFIG, tensors()), BASE, tmp_path / "image")
    assert report.modules == {"q_proj": 2, "v_proj": 2}


ACTIVATED = {"alora_invocation_tokens": [1, 15], "task_type": "CAUSAL_LM"}
WRONG_CONFIGS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "no type": ({"peft_type": None}, {"unsupported_peft_type"}),
    "IA3": ({"peft_type": "IA3"}, {"unsupported_peft_type"}),
    "AdaLoRA": ({"peft_type": "ADALORA"}, {"unsupported_peft_type"}),
    "type as a list": ({"peft_type": ["LORA"]}, {"unsupported_peft_type"}),
    "modules to save": ({"modules_to_save": ["lm_head"]}, {"unsupported_modules_to_save"}),
    "new tokens": ({"trainable_token_indices": [3]}, {"unsupported_trainable_token_indices"}),
    "parameters": ({"target_parameters": ["x"]}, {"unsupported_target_parameters"}),
    "biases": ({"bias": "all"}, {"unsupported_bias"}),
    "Conv1D": ({"fan_in_fan_out": True}, {"unsupported_fan_in_fan_out"}),
    "replicated layers": ({"layer_replication": [[0, 2]]}, {"unsupported_layer_replication"}),
    "aLoRA without tokens": (ACTIVATED | {"alora_invocation_tokens": []}, {"config_field"}),
    "aLoRA with text": (ACTIVATED | {"alora_invocation_tokens": "1 2"}, {"config_field"}),
    "aLoRA with true": (ACTIVATED | {"alora_invocation_tokens": [True]}, {"config_field"}),
    "aLoRA with a negative id": (
        ACTIVATED | {"alora_invocation_tokens": [1, -1]},
        {"config_field"},
    ),
    "aLoRA beyond the vocabulary": (
        ACTIVATED | {"alora_invocation_tokens": [1, 16]},
        {"token_unknown"},
    ),
    "aLoRA and DoRA": (ACTIVATED | {"use_dora": True}, {"config_combination"}),
    "aLoRA and VeLoRA": (ACTIVATED | {"velora_config": {"a": 1}}, {"config_combination"}),
    "aLoRA and MiCA": (ACTIVATED | {"init_lora_weights": "mica"}, {"config_combination"}),
    "aLoRA for no generation": (ACTIVATED | {"task_type": "SEQ_CLS"}, {"config_combination"}),
    "QALoRA": ({"use_qalora": True}, {"unsupported_use_qalora"}),
    "Megatron": ({"megatron_config": {"a": 1}}, {"unsupported_megatron_config"}),
    "Arrow": ({"arrow_config": {"top_k": 3}}, {"unsupported_arrow_config"}),
    "BD-LoRA": ({"use_bdlora": {"nblocks": 2}}, {"unsupported_use_bdlora"}),
    "MonteCLoRA": ({"monteclora_config": {"a": 1}}, {"unsupported_monteclora_config"}),
    "KaSA": ({"kasa_config": {"beta": 1}}, {"unsupported_kasa_config"}),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, {"unsupported_init_lora_weights"}),
    "LoftQ": ({"init_lora_weights": "loftq"}, {"unsupported_init_lora_weights"}),
    "unknown start": ({"init_lora_weights": "novel"}, {"unsupported_init_lora_weights"}),
    "unknown field": ({"use_novelty": True}, {"config_unknown_field"}),
    "rank 0": ({"r": 0}, {"config_field"}),
    "rank of text": ({"r": "8"}, {"config_field"}),
    "rank of true": ({"r": True}, {"config_field"}),
    "fractional rank": ({"r": 2.0}, {"config_field"}),
    "infinite alpha": ({"lora_alpha": 10**400}, {"config_field"}),
    "no alpha": ({"lora_alpha": None}, {"config_field"}),
    "flag of text": ({"use_dora": "yes"}, {"config_field"}),
    "no targets": ({"target_modules": None}, {"config_field"}),
    "empty targets": ({"target_modules": []}, {"config_field"}),
    "targets of numbers": ({"target_modules": [1]}, {"config_field"}),
    "targets as an object": ({"target_modules": {"q_proj": 1}}, {"config_field"}),
    "targets by regex": ({"target_modules": r"(?=.*)*q_proj"}, {"config_regex"}),
    "evil regex": ({"target_modules": "(a+)+$" + "a" * 50}, {"config_regex"}),
    "exclusions by regex": ({"exclude_modules": r"\d+"}, {"config_regex"}),
    "ranks by regex": ({"rank_pattern": {r"\d": 4}}, {"config_regex"}),
    "alphas by regex": ({"alpha_pattern": {"[qv]_proj": 4}}, {"config_regex"}),
    "layers by regex": ({"layers_to_transform": 0, "layers_pattern": "l.*"}, {"config_regex"}),
    "ranks as a list": ({"rank_pattern": [4]}, {"config_field"}),
    "rank of a pattern": ({"rank_pattern": {"q_proj": 0}}, {"config_field"}),
    "alpha of a pattern": ({"alpha_pattern": {"q_proj": "4"}}, {"config_field"}),
    "layers as text": ({"layers_to_transform": "0"}, {"config_field"}),
    "negative layer": ({"layers_to_transform": [-1]}, {"config_field"}),
    "DoRA with biases": ({"use_dora": True, "lora_bias": True}, {"config_combination"}),
    "pattern and layers": (
        {"target_modules": ".*q_proj", "layers_to_transform": [0]},
        {"config_combination"},
    ),
    "pattern without layers": ({"layers_pattern": "layers"}, {"config_combination"}),
    "layer out of range": ({"layers_to_transform": [0, 1, 2]}, {"layer_unknown"}),
    "vocabulary": ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, {"unsupported_vocabulary"}),
    "other targets": ({"target_modules": ["nothing"]}, {"module_missing", "module_unexpected"}),
    "more targets": ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, {"module_missing"}),
    "fewer targets": ({"target_modules": ["q_proj"]}, {"module_unexpected"}),
    "fewer layers": ({"layers_to_transform": [1]}, {"module_unexpected"}),
    "other layers pattern": (
        {"layers_to_transform": [0, 1], "layers_pattern": "h"},
        {"module_missing", "module_unexpected"},
    ),
    "excluded": ({"exclude_modules": ["v_proj"]}, {"module_unexpected"}),
    "another rank": ({"r": 4}, {"rank_mismatch"}),
    "another pattern's rank": ({"rank_pattern": {"v_proj": 4}}, {"rank_mismatch"}),
    "DoRA without magnitudes": ({"use_dora": True}, {"tensor_missing"}),
    "biases without biases": ({"lora_bias": True}, {"tensor_missing"}),
    "everything": (
        {"bias": "all", "modules_to_save": ["x"], "r": -1, "use_x": 1, "target_modules": "(q|["},
        {
            "unsupported_bias",
            "unsupported_modules_to_save",
            "config_field",
            "config_unknown_field",
            "config_regex",
        },
    ),
}


@pytest.mark.parametrize("case", WRONG_CONFIGS)
def test_a_wrong_configuration_is_refused(case: str, tmp_path: Path) -> None:
    change, wanted = WRONG_CONFIGS[case]
    assert reasons(write(tmp_path, CONFIG | change, tensors())).keys() == wanted


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_what_is_unsupported_may_be_there_if_it_is_off(field: str, tmp_path: Path) -> None:
    for off in (None, False, [], {}):
        source = write(tmp_path, CONFIG | {field: off}, tensors())
        assert compile_adapter(source, BASE, tmp_path / "image").rank == 2


BROKEN_TEXT = {
    "nothing": (b"", "config_json"),
    "no JSON": (b"{'r': 8}", "config_json"),
    "no UTF-8": (b'{"r": "\xff"}', "config_json"),
    "a list": (b"[1]", "config_json"),
    "twice": (b'{"peft_type": "IA3", "peft_type": "LORA"}', "config_json"),
    "twice within": (b'{"rank_pattern": {"q": 1, "q": 2}}', "config_json"),
    "not a number": (b'{"lora_alpha": NaN}', "config_json"),
    "infinity": (b'{"lora_alpha": -Infinity}', "config_json"),
    "deep": (b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}", "config_json"),
    "huge number": (b'{"r": ' + b"9" * 20_000 + b"}", "config_json"),
    "huge": (b'{"a": "' + b"x" * 70_000 + b'"}', "config_too_large"),
}


@pytest.mark.parametrize("case", BROKEN_TEXT)
def test_a_broken_configuration_is_refused(case: str, tmp_path: Path) -> None:
    text, code = BROKEN_TEXT[case]
    assert reasons(write(tmp_path, text, tensors())).keys() == {code}


def test_reasons_say_what_to_do_and_how_often(tmp_path: Path) -> None:
    found = reasons(write(tmp_path, CONFIG | {"r": 16, "bias": "all"}, tensors()))
    assert "bias" in found["unsupported_bias"]
    found = reasons(write(tmp_path, CONFIG | {"r": 16}, tensors()))
    assert "model.layers.0.self_attn.q_proj has rank 2" in found["rank_mismatch"]
    assert "and 1 more" in found["rank_mismatch"]
    assert "rank_pattern" in found["rank_mismatch"]
    found = reasons(write(tmp_path, CONFIG | {"target_modules": ["k_proj"]}, tensors()))
    assert '"q_proj", "v_proj"' in found["module_missing"]


def test_every_field_that_peft_writes_is_known() -> None:
    fields = LoraConfig(target_modules=["q_proj"]).to_dict().keys()
    assert fields <= USED | HARMLESS | UNSUPPORTED.keys()
