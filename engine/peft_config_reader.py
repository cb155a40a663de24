"""Reads `adapter_config.json` from a stranger into a `PeftConfig`, or says all that forbids it.

PEFT imports modules that a configuration names, loads cache files and runs regular expressions; so
a configuration never reaches it. This file knows PEFT's fields: each one is used, or is harmless
once training is over, or must be off. It refuses to know tensors and bases.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from loraplex.engine.peft_config import Names, PeftConfig
from loraplex.engine.peft_patterns import Pattern, PatternError, parse_pattern
from loraplex.engine.reasons import Findings, shown
from loraplex.engine.strict_json import JsonError, is_int, parse_object

MAX_BYTES = 64 << 10
USED = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "lora_bias",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
        "alora_invocation_tokens",
    }
)
HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "task_type",
        "peft_version",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "loftq_config",
        "velora_config",
        "ensure_weight_tying",
    }
)
_LINEAR_ONLY = "train LoRA on the linear projections alone, without it"
_PLAIN = "train plain LoRA, without it"
UNSUPPORTED = {  # fields that change what an adapter computes, and what to do instead
    "modules_to_save": _LINEAR_ONLY,
    "trainable_token_indices": _LINEAR_ONLY,
    "target_parameters": 'name linear projections in "target_modules" instead',
    "bias": 'set it to "none" if the base has no biases, else train again with bias="none"',
    "fan_in_fan_out": "set it to false: the base's projections are plain linears",
    "layer_replication": "train on the base as it is",
    "use_qalora": _PLAIN,
    "megatron_config": "convert the adapter to Hugging Face's layout",
    "arrow_config": _PLAIN,
    "use_bdlora": _PLAIN,
    "monteclora_config": _PLAIN,
    "kasa_config": _PLAIN,
}
PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")  # they leave the base as it is
CONVERTIBLE_STARTS = ("pissa", "olora", "corda", "lora_ga")
_CORRECT = "correct adapter_config.json, or save the adapter again with PEFT's save_pretrained"
_LIST = 'list the modules by name, as in "target_modules": ["q_proj", "v_proj"]'
_PATHS = 'write each key as the end of a module\'s path, as in "layers.0.self_attn.q_proj"'
_CONVERT = (
    "it changed the base's weights: save it with path_initial_model_for_weight_conversion, which"
    " makes it plain LoRA for the unchanged base"
)
_ALORA = "alora_invocation_tokens"
_BASE = "base_model_name_or_path"
_INVOCATION = "a list of token ids, or null for an adapter that is always active"
_LAYERS_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")

T = TypeVar("T")


def read_config(text: bytes, findings: Findings) -> PeftConfig | None:
    """Normalise a configuration; None, with every reason in `findings`, if it cannot be used."""
    if len(text) > MAX_BYTES:
        detail = f"adapter_config.json is larger than {MAX_BYTES} bytes"
        findings.reject("config_too_large", detail, _CORRECT)
        return None
    try:
        fields = parse_object(text)
    except JsonError as error:
        findings.reject("config_json", f"adapter_config.json is not strict JSON: {error}", _CORRECT)
        return None
    return _Reader(fields, findings).read()


class _Reader:
    """One reading: collects reasons, and hands out a placeholder for every field refused."""

    def __init__(self, fields: Mapping[str, Any], findings: Findings) -> None:
        self._fields, self._findings, self._usable = fields, findings, True

    def read(self) -> PeftConfig | None:
        kind = self._fields.get("peft_type")
        if kind != "LORA":
            cure = "train a LoRA adapter (peft.LoraConfig)"
            self._refuse("unsupported_peft_type", f"peft_type is {shown(kind)}", cure)
            return None
        self._check_fields()
        self._check_start()
        self._check_combinations()
        config = PeftConfig(
            rank=self._rank("r", self._fields.get("r", 8)),
            alpha=self._number("lora_alpha", self._fields.get("lora_alpha", 8)),
            rslora=self._flag("use_rslora"),
            dora=self._flag("use_dora"),
            bias=self._flag("lora_bias"),
            targets=self._targets(),
            excluded=self._names("exclude_modules"),
            layers=self._layers(),
            layers_patterns=self._layers_patterns(),
            ranks=self._by_pattern("rank_pattern", self._rank),
            alphas=self._by_pattern("alpha_pattern", self._number),
            invocation=self._invocation(),
            base_name=self._base_name(),
        )
        return config if self._usable else None

    def _refuse(self, code: str, detail: str, cure: str) -> None:
        self._usable = False
        self._findings.reject(code, detail, cure)

    def _refuse_value(self, field: str, value: object, wanted: str) -> None:
        self._refuse("config_field", f"{field} is {shown(value)}, not {wanted}", _CORRECT)

    def _check_fields(self) -> None:
        for field, value in self._fields.items():
            if field in USED or field in HARMLESS or _is_off(field, value):
                continue
            if field in UNSUPPORTED:
                code, cure = f"unsupported_{field}", UNSUPPORTED[field]
            else:
                code, cure = "config_unknown_field", "remove it if the adapter is right without it"
            self._refuse(code, f"adapter_config.json sets {shown(field)} to {shown(value)}", cure)

    def _check_start(self) -> None:
        start = self._fields.get("init_lora_weights", True)
        name = start.lower() if isinstance(start, str) else start
        if name is None or isinstance(name, bool) or name in PLAIN_STARTS:
            return
        convertible = isinstance(name, str) and name.startswith(CONVERTIBLE_STARTS)
        cure = _CONVERT if convertible else "train again with init_lora_weights=True"
        self._refuse("unsupported_init_lora_weights", f"init_lora_weights is {shown(start)}", cure)

    def _check_combinations(self) -> None:
        fields, listed = self._fields, not isinstance(self._fields.get("target_modules"), str)
        allowed = {
            "use_dora and lora_bias": not (fields.get("use_dora") and fields.get("lora_bias")),
            "layers_to_transform and target_modules as a string": (
                listed or fields.get("layers_to_transform") is None
            ),
            "layers_pattern without layers_to_transform": (
                not fields.get("layers_pattern") or fields.get("layers_to_transform") is not None
            ),
        }
        if fields.get(_ALORA) is not None:
            allowed |= {
                f"{_ALORA} and use_dora": not fields.get("use_dora"),
                f"{_ALORA} and velora_config": not fields.get("velora_config"),
                f"{_ALORA} and mica weights": fields.get("init_lora_weights") != "mica",
                f"{_ALORA} without task_type CAUSAL_LM": fields.get("task_type") == "CAUSAL_LM",
            }
        for what, is_allowed in allowed.items():
            if not is_allowed:
                self._refuse("config_combination", f"PEFT has no {what}", _CORRECT)

    def _rank(self, field: str, value: object) -> int:
        if isinstance(value, int) and is_int(value) and value > 0:
            return value
        self._refuse_value(field, value, "a positive integer")
        return 1

    def _number(self, field: str, value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30:
            return float(value)
        self._refuse_value(field, value, "a finite number")
        return 1.0

    def _flag(self, field: str) -> bool:
        value = self._fields.get(field)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._refuse_value(field, value, "true or false")
        return False

    def _targets(self) -> Names | None:
        value = self._fields.get("target_modules")
        if isinstance(value, str) and value.lower() == "all-linear":
            return None
        if not value:
            self._refuse("config_field", f"target_modules is {shown(value)}", _LIST)
        return self._names("target_modules")

    def _names(self, field: str) -> Names:
        value = self._fields.get(field) or []
        if isinstance(value, str):
            return self._pattern(field, value, _LIST)
        if _are_names(value):
            return tuple(value)
        self._refuse_value(field, value, "a list of names")
        return ()

    def _pattern(self, field: str, text: str, cure: str) -> Pattern:
        try:
            return parse_pattern(text)
        except PatternError:
            detail = f"{field} holds {shown(text)}, a regular expression that is not run here"
            self._refuse("config_regex", detail, cure)
            return Pattern(text, (), False, False)

    def _layers(self) -> frozenset[int] | None:
        value = self._fields.get("layers_to_transform")
        layers = [value] if is_int(value) else value
        if layers is None or layers == []:
            return None
        if isinstance(layers, list) and all(is_int(x) and x >= 0 for x in layers):
            return frozenset(layers)
        self._refuse_value("layers_to_transform", value, "a layer's number or a list of them")
        return None

    def _layers_patterns(self) -> tuple[str, ...]:
        value = self._fields.get("layers_pattern") or []
        names = [value] if isinstance(value, str) else value
        if _are_names(names) and all(_LAYERS_NAME.fullmatch(name) for name in names):
            return tuple(names)
        cure = 'set it to "layers", the name of the base\'s list of layers'
        self._refuse("config_regex", f"layers_pattern is {shown(value)}", cure)
        return ()

    def _invocation(self) -> tuple[int, ...]:
        value = self._fields.get(_ALORA)
        if value is None:
            return ()
        if isinstance(value, list) and value and all(is_int(x) and x >= 0 for x in value):
            return tuple(value)
        self._refuse_value(_ALORA, value, _INVOCATION)
        return ()

    def _base_name(self) -> str | None:
        value = self._fields.get(_BASE)
        return value if isinstance(value, str) and value else None

    def _by_pattern(
        self, field: str, read: Callable[[str, object], T]
    ) -> tuple[tuple[Pattern, T], ...]:
        value = self._fields.get(field) or {}
        if not isinstance(value, dict):
            self._refuse_value(field, value, "an object")
            return ()
        return tuple(
            (self._pattern(field, key, _PATHS), read(f"{field}[{shown(key)}]", item))
            for key, item in value.items()
        )


def _is_off(field: str, value: object) -> bool:
    return not value or (field == "bias" and value == "none")


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(x, str) and x for x in value)
