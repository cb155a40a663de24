"""Reads and checks a model directory: its configuration, its weight files, its tokenizer.

This file knows the layout of Hugging Face checkpoints, and from `engine.model.config` which
decoders can be run. It refuses to know torch and where the directory came from: it reads headers.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from loraplex.engine.model.config import FAMILIES, ModelConfig, ModelError, parse_model_config

DTYPES = ("BF16", "F16", "F32")
BLOCK_OF = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}

Shapes = Iterator[tuple[str, tuple[int, ...]]]


class PrepareError(Exception):
    """The model cannot be served; the message is one sentence that says why and what to do."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises `PrepareError` when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PrepareError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise PrepareError(f"{path} does not hold a JSON object")
    return content


def read_config(directory: Path) -> tuple[dict[str, Any], ModelConfig]:
    """The directory's `config.json`, as it is and as the decoder reads it."""
    path = directory / "config.json"
    if not path.is_file():
        hint = "; name the .gguf file in it" if any(directory.glob("*.gguf")) else ""
        raise PrepareError(f"{directory} has no config.json, so it is no model directory{hint}")
    content = read_json(path)
    check_architecture(content.get("model_type"), directory)
    try:
        return content, parse_model_config(content)
    except ModelError as error:
        raise PrepareError(f"{path} cannot be served: {error}") from error


def check_architecture(architecture: object, source: Path) -> None:
    """Raise `PrepareError` unless the decoder runs this architecture."""
    if architecture not in FAMILIES:
        raise PrepareError(
            f"{source} is of architecture {architecture!r}; supported are "
            f"{', '.join(FAMILIES)} and models that share their layout, such as SmolLM2"
        )


def linear_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """`(in_features, out_features)` of each linear of a layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "q_proj": (hidden, config.query_size),
        "k_proj": (hidden, config.kv_size),
        "v_proj": (hidden, config.kv_size),
        "o_proj": (config.query_size, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Name and shape of every tensor that the weight files must hold."""
    table = (config.vocab_size, config.hidden_size)
    yield "model.embed_tokens.weight", table
    yield "model.norm.weight", (config.hidden_size,)
    if not config.tied:
        yield "lm_head.weight", table
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config):
            yield f"model.layers.{layer}.{name}", shape


def _layer_shapes(config: ModelConfig) -> Shapes:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{norm}.weight", (config.hidden_size,)
    for norm in ("q_norm", "k_norm") if config.qk_norm else ():
        yield f"self_attn.{norm}.weight", (config.head_dim,)
    for module, (columns, rows) in linear_sizes(config).items():
        name = f"{BLOCK_OF[module]}.{module}"
        yield f"{name}.weight", (rows, columns)
        if _has_bias(config, module):
            yield f"{name}.bias", (rows,)


def _has_bias(config: ModelConfig, module: str) -> bool:
    if module == "o_proj":
        return config.o_bias
    return config.qkv_bias if BLOCK_OF[module] == "self_attn" else config.mlp_bias


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted; raises `PrepareError` when some are missing.

    An index, where there is one, says which files belong; else `model.safetensors` is the only one.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(cast("dict[str, str]", read_json(index).get("weight_map", {})).values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (directory / name).is_file()]
    if names and not missing:
        return [directory / name for name in names]
    if not index.is_file() and any(directory.glob("*.bin")):
        raise PrepareError(
            f"{directory} has only pickled weights (*.bin), which may run code when read; "
            "convert them to safetensors with Transformers' save_pretrained"
        )
    raise PrepareError(f"{directory} lacks its weights: {', '.join(missing) or 'empty index'}")


def check_weights(files: list[Path], config: ModelConfig) -> None:
    """Raise `PrepareError` unless the files hold the decoder's tensors as floats, and no others."""
    found = {name: tensor for path in files for name, tensor in _tensors(path)}
    for name, shape in tensor_shapes(config):
        if name not in found:
            raise PrepareError(f"the weights lack {name}; is the checkpoint complete?")
        dtype, actual = found.pop(name)
        if actual != shape:
            raise PrepareError(f"{name} has shape {actual}; config.json asks for {shape}")
        if dtype not in DTYPES:
            raise PrepareError(f"{name} is stored as {dtype}; supported are {', '.join(DTYPES)}")
    surplus = [name for name in sorted(found) if not _is_redundant(name)]
    if surplus:
        raise PrepareError(f"the weights hold {surplus[0]}, which config.json gives no use for")


def _is_redundant(name: str) -> bool:
    """A copy of the embedding or a table that is computed; old checkpoints hold them."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def _tensors(path: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                yield name, (part.get_dtype(), tuple(part.get_shape()))
    except SafetensorError as error:
        raise PrepareError(f"{path} is not a whole safetensors file: {error}") from error


def read_eos(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a turn: those of the configuration, of generation and of the tokenizer."""
    generation = _optional_json(directory / "generation_config.json")
    ids = {*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
    token = _optional_json(directory / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    added = _read_tokenizer(directory).get("added_tokens") or []
    ids.update(entry["id"] for entry in added if entry.get("content") == content)
    return tuple(sorted(ids))


def _read_tokenizer(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise PrepareError(
            f"{directory} has no tokenizer.json; "
            "Transformers' AutoTokenizer.from_pretrained(…).save_pretrained(…) writes one"
        )
    return read_json(path)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]
