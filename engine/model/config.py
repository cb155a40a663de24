"""What a decoder of the Llama family is, read from its `config.json`.

Llama, Mistral, Qwen2 and Qwen3, and what shares their layout (SmolLM2, TinyLlama, …). What the
decoder cannot compute exactly is refused, never ignored. This file knows configuration keys and
the values that Transformers gives to missing ones; it refuses to know torch and weights.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class ModelError(ValueError):
    """The decoder cannot run this model; the message is one sentence that says why."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: its base, and how its frequencies are stretched (`factor` and below)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0  # llama3, yarn: the length that the model was first trained for
    low_frequency: float = 1.0  # llama3
    high_frequency: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    amplitude: float = 1.0  # yarn: multiplies cosines and sines


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder. `windows` has one entry a layer, None for full attention."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool

    @property
    def query_size(self) -> int:
        """Columns of all queries together."""
        return self.num_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Leading columns of a head that the rotary embedding turns: all, in these families."""
        return self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all keys together, and of all values."""
        return self.num_kv_heads * self.head_dim


def read_model_config(directory: Path) -> ModelConfig:
    """Parse `directory/config.json`. Raises `ModelError`, or `OSError` when it cannot be read."""
    try:
        content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{directory / 'config.json'} is not JSON: {error}") from error
    return parse_model_config(content)


def parse_model_config(content: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a parsed `config.json`; raises `ModelError`."""
    family = content.get("model_type")
    _refuse_what_is_unknown(content)
    heads, hidden = _integer(content, "num_attention_heads"), _integer(content, "hidden_size")
    layers = _integer(content, "num_hidden_layers")
    biased = bool(content.get("attention_bias", False))
    config = ModelConfig(
        vocab_size=_integer(content, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(content, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_integer(content, "num_key_value_heads", heads),
        head_dim=_integer(content, "head_dim", 128 if family == "qwen3" else hidden // heads),
        max_positions=_integer(content, "max_position_embeddings"),
        norm_eps=_number(content, "rms_norm_eps", 1e-6),
        rope=_rope(content),
        windows=_windows(content, layers),
        tied=bool(content.get("tie_word_embeddings", False)),
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and biased),
        o_bias=family in ("llama", "qwen3") and biased,
        mlp_bias=family == "llama" and bool(content.get("mlp_bias", False)),
    )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ModelError("heads must be a multiple of KV heads, and their size an even number")
    return config


def _refuse_what_is_unknown(content: Mapping[str, Any]) -> None:
    family, activation = content.get("model_type"), content.get("hidden_act", "silu")
    if family not in FAMILIES:
        raise ModelError(f"model_type is {family!r}; supported are {', '.join(FAMILIES)}")
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act is {activation!r}; supported is 'silu'")
    if content.get("quantization_config"):
        raise ModelError("the weights are quantised; give bf16, fp16 or fp32 weights")


def _windows(content: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer."""
    family = content["model_type"]
    window = _window(content.get("sliding_window", 4096))
    if family == "mistral":
        return (window,) * layers
    if family == "llama" or not content.get("use_sliding_window", False):
        return (None,) * layers
    first = _integer(content, "max_window_layers", 28)
    types = content.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
    ]
    if len(types) != layers or not {*types} <= {"sliding_attention", "full_attention"}:
        raise ModelError(f"layer_types must name full or sliding attention for {layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _window(value: object) -> int | None:
    return None if value is None else _integer({"sliding_window": value}, "sliding_window")


def _rope(content: Mapping[str, Any]) -> RopeConfig:
    """From `rope_parameters` (Transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    given = dict(content.get("rope_parameters") or content.get("rope_scaling") or {})
    theta = given.get("rope_theta", content.get("rope_theta"))
    theta = _number({"rope_theta": theta}, "rope_theta", 10000.0)
    kind = given.get("rope_type", given.get("type", "default"))
    partial = given.get("partial_rotary_factor", content.get("partial_rotary_factor"))
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope_type is {kind!r}; supported are {', '.join(ROPE_TYPES)}")
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor is {partial}; supported is 1")
    if kind == "default":
        return RopeConfig(theta)
    positions = _integer(content, "max_position_embeddings")
    original = _integer(given, "original_max_position_embeddings", positions)
    if kind == "yarn":
        return _yarn(given, theta, positions, original)
    return RopeConfig(
        theta,
        kind,
        factor=_number(given, "factor"),
        original_positions=original,
        low_frequency=_number(given, "low_freq_factor", 1.0),
        high_frequency=_number(given, "high_freq_factor", 4.0),
    )


def _yarn(given: Mapping[str, Any], theta: float, positions: int, original: int) -> RopeConfig:
    factor = _number(given, "factor", positions / original)
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_positions=original,
        beta_fast=_number(given, "beta_fast", 32.0),
        beta_slow=_number(given, "beta_slow", 1.0),
        truncate=bool(given.get("truncate", True)),
        amplitude=_number(given, "attention_factor", _yarn_amplitude(given, factor)),
    )


def _yarn_amplitude(given: Mapping[str, Any], factor: float) -> float:
    """What the paper advises (Peng et al., 2023), or the ratio that DeepSeek's keys ask for."""

    def amplitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = given.get("mscale"), given.get("mscale_all_dim")
    return amplitude(over) / amplitude(under) if over and under else amplitude(1.0)


def _integer(content: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _given(content, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} is {value!r}; it must be a positive integer")
    return value


def _number(content: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _given(content, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{key} is {value!r}; it must be a positive number")
    return float(value)


def _given(content: Mapping[str, Any], key: str, default: object) -> object:
    value = content.get(key)
    return default if value is None else value
