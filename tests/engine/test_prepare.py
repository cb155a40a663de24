"""Preparing a base from a directory: what is read, what is refused, what is remembered."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from loraplex.engine.checkpoint import PrepareError
from loraplex.engine.images import BaseManifest
from loraplex.engine.model.config import FAMILIES
from loraplex.engine.prepare import prepare

CONFIG = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights, as Transformers saves it, with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("built") / "tiny"
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)}, unk_token="w0"))
    tokenizer.add_special_tokens(["<end>", "<turn>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def tiny(built: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may spoil."""
    return Path(shutil.copytree(built, tmp_path / "tiny"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes a key away."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def edit_weights(directory: Path, name: str, change: Callable[[np.ndarray], Any]) -> None:
    """Replace one tensor by `change` of it; None takes it away."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else tensors | {name: changed}, path)


def silent(_line: str) -> None:
    """A report that nobody reads."""


def test_manifest_says_what_the_model_is(tiny: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM

    manifest = prepare(str(tiny), out, report=silent)
    assert msgspec.json.decode((out / "base.json").read_bytes(), type=BaseManifest) == manifest
    assert (manifest.name, manifest.path) == ("tiny", str(tiny))
    assert (manifest.num_layers, manifest.hidden_size) == (2, 48)
    assert (manifest.vocab_size, manifest.max_position_embeddings) == (64, 128)
    assert len(manifest.fingerprint) == 64
    layer = AutoModelForCausalLM.from_pretrained(tiny).model.layers[1]
    linears = dict(layer.self_attn.named_children()) | dict(layer.mlp.named_children())
    sizes = {
        name: (linear.in_features, linear.out_features)
        for name, linear in linears.items()
        if hasattr(linear, "in_features")
    }
    assert manifest.modules == sizes


def test_model_directory_is_not_written_to(tiny: Path, out: Path) -> None:
    def look() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in [tiny, *tiny.iterdir()]}

    before = look()
    prepare(str(tiny), out, report=silent)
    assert look() == before


def test_end_tokens_come_from_every_file_that_names_some(tiny: Path, out: Path) -> None:
    edit(tiny / "generation_config.json", eos_token_id=[2, 5])
    (tiny / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<turn>"}}))
    assert prepare(str(tiny), out, report=silent).eos_token_ids == (2, 5, 61)


def test_sharded_checkpoint(tiny: Path, out: Path) -> None:
    whole = load_file(tiny / "model.safetensors")
    (tiny / "model.safetensors").unlink()
    shards = {"a.safetensors": sorted(whole)[::2], "b.safetensors": sorted(whole)[1::2]}
    for shard, names in shards.items():
        save_file({name: whole[name] for name in names}, tiny / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    index = tiny / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert prepare(str(tiny), out, report=silent).num_layers == 2
    (tiny / "b.safetensors").unlink()
    with pytest.raises(PrepareError, match=r"lacks its weights: b\.safetensors"):
        prepare(str(tiny), out, report=silent)


def test_fingerprint_is_of_the_content(tiny: Path, out: Path, tmp_path: Path) -> None:
    first = prepare(str(tiny), out, report=silent).fingerprint
    moved = tiny.rename(tmp_path / "elsewhere")
    edit(moved / "config.json", transformers_version="0", _name_or_path="x")
    assert prepare(str(moved), out, report=silent).fingerprint == first


def test_fingerprint_changes_with_a_weight(tiny: Path, out: Path) -> None:
    first = prepare(str(tiny), out, report=silent).fingerprint
    edit_weights(tiny, "model.norm.weight", lambda w: w + np.eye(1, 48, dtype=w.dtype)[0])
    assert prepare(str(tiny), out, report=silent).fingerprint != first


def test_fingerprint_changes_with_the_configuration(tiny: Path, out: Path) -> None:
    first = prepare(str(tiny), out, report=silent).fingerprint
    edit(tiny / "config.json", rms_norm_eps=1e-3)
    assert prepare(str(tiny), out, report=silent).fingerprint != first


def test_unchanged_weights_are_hashed_once(tiny: Path, out: Path) -> None:
    lines: list[str] = []
    first = prepare(str(tiny), out, report=lines.append)
    assert [line for line in lines if line.startswith("hashing model.safetensors")] == lines
    lines.clear()
    assert prepare(str(tiny), out, "renamed", lines.append).fingerprint == first.fingerprint
    assert lines == []


def test_lost_or_broken_memory_is_no_error(tiny: Path, out: Path) -> None:
    first = prepare(str(tiny), out, report=silent)
    for content in ("", "[]", '{"digests": 3}'):
        (out / "prepare.json").write_text(content)
        assert prepare(str(tiny), out, report=silent) == first


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def only_gguf(directory: Path) -> None:
    no_config(directory)
    (directory / "x.gguf").touch()


def broken_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def only_pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def truncated(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def tensor_missing(directory: Path) -> None:
    edit_weights(directory, "model.layers.1.mlp.up_proj.weight", lambda _: None)


def wrong_shape(directory: Path) -> None:
    edit_weights(directory, "lm_head.weight", lambda w: w[:-1].copy())


def surplus_tensor(directory: Path) -> None:
    path = directory / "model.safetensors"
    save_file(load_file(path) | {"visual.weight": np.ones(1, np.float32)}, path)


def integers(directory: Path) -> None:
    edit_weights(directory, "model.norm.weight", lambda w: w.astype(np.int8))


def config_key(**changes: Any) -> Callable[[Path], None]:
    return lambda directory: edit(directory / "config.json", **changes)


REFUSED = {
    "no config": (no_config, "no config.json"),
    "only a gguf inside": (only_gguf, "name the .gguf file"),
    "broken config": (broken_config, "cannot be read as JSON"),
    "only pickle": (only_pickle, "pickled weights.*safetensors"),
    "no weights": (no_weights, "lacks its weights: model.safetensors"),
    "no tokenizer": (no_tokenizer, "no tokenizer.json"),
    "truncated": (truncated, "not a whole safetensors file"),
    "tensor missing": (tensor_missing, "lack model.layers.1.mlp.up_proj.weight"),
    "wrong shape": (wrong_shape, r"lm_head.weight has shape \(63, 48\)"),
    "surplus": (surplus_tensor, "hold visual.weight, which"),
    "integers": (integers, "stored as I8"),
    "unsupported": (config_key(model_type="gpt2"), "'gpt2'; supported are llama, mistral"),
    "no architecture": (config_key(model_type=None), "architecture None"),
    "quantised": (config_key(quantization_config={"quant_method": "gptq"}), "are quantised"),
    "other activation": (config_key(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "size missing": (config_key(hidden_size=None), "hidden_size is None"),
    "size is text": (config_key(vocab_size="64"), "vocab_size is '64'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str, tiny: Path, out: Path) -> None:
    spoil, message = REFUSED[case]
    spoil(tiny)
    with pytest.raises(PrepareError, match=message):
        prepare(str(tiny), out, report=silent)
    assert not (out / "base.json").exists()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("biased", [False, True])
def test_accepts_what_transformers_saves(family: str, biased: bool, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **CONFIG, attention_bias=biased)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert prepare(str(tmp_path), tmp_path / "out", "base", silent).num_layers == 2


def test_copies_that_old_checkpoints_hold_are_accepted(tiny: Path, out: Path) -> None:
    path = tiny / "model.safetensors"
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    save_file(load_file(path) | table, path)
    edit(tiny / "config.json", tie_word_embeddings=True)
    assert prepare(str(tiny), out, report=silent).num_layers == 2


@pytest.mark.parametrize("model", ["./missing", "missing", "no/such/dir", "owner/missing.gguf"])
def test_missing_model(model: str, out: Path) -> None:
    with pytest.raises(PrepareError, match="does not exist; a Hugging Face id has the form"):
        prepare(model, out, report=silent)


@pytest.mark.parametrize("name", ["a/b", "a@1", ".a", "a b", "x" * 97])
def test_impossible_name(name: str, tiny: Path, out: Path) -> None:
    with pytest.raises(PrepareError, match="cannot name a base"):
        prepare(str(tiny), out, name, silent)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`python -m loraplex.engine.prepare`, which then says which large libraries it loaded."""
    code = (
        "import sys; from loraplex.engine.prepare import main; code = main(sys.argv[1:]);"
        "print([name for name in ('torch', 'transformers') if name in sys.modules]); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_command_line_loads_neither_torch_nor_transformers(tiny: Path, out: Path) -> None:
    done = run(tiny, "--out", out, "--name", "base")
    assert (done.returncode, done.stdout) == (0, "[]\n")
    assert "base is prepared" in done.stderr


@pytest.mark.parametrize("blocked", [False, True])
def test_mistakes_end_with_one_sentence_and_code_2(tmp_path: Path, blocked: bool) -> None:
    out = tmp_path / "file"
    if blocked:
        out.touch()
    done = run(tmp_path / "missing", "--out", out)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert ("file" if blocked else "does not exist") in done.stderr
