"""Preparing a base from a GGUF file: the same model comes out, and only once."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from loraplex.engine.checkpoint import PrepareError
from loraplex.engine.gguf_file import read_architecture
from loraplex.engine.images import BaseManifest
from loraplex.engine.prepare import prepare

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
HEADS, KV_HEADS = 4, 2
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers.0.input_layernorm": "blk.0.attn_norm",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
    "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
    "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
    "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
    "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
}


@pytest.fixture(scope="module")
def original() -> Any:
    """A Llama whose weights are bfloat16 numbers, so that nothing is lost on the way."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=len(tokens()),
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).bfloat16().float().eval()


@pytest.fixture
def tiny_gguf(original: Any, tmp_path: Path) -> Path:
    """The original as llama.cpp's converter would write it."""
    path = tmp_path / "Tiny-Chat.F32.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    write_settings(writer, original.config)
    write_tokenizer(writer)
    for name, tensor in original.model.state_dict(prefix="model.").items():
        weight = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            weight = interleave(weight, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(NAMES[name.removesuffix(".weight")] + ".weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order in which llama.cpp rotates them: pairs side by side."""
    rows, columns = weight.shape
    split = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows, columns))


def write_settings(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def tokens() -> list[str]:
    """A byte-level vocabulary of two control tokens, the letters and one merge."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    return ["<|pad|>", "<|end|>", *letters, "ab"]


def write_tokenizer(writer: gguf.GGUFWriter) -> None:
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens())
    writer.add_token_types([control, control, *[normal] * (len(tokens()) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)


def silent(_line: str) -> None:
    """A report that nobody reads."""


def test_conversion_keeps_the_model(tiny_gguf: Path, original: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lines: list[str] = []
    manifest = prepare(str(tiny_gguf), tmp_path / "out", report=lines.append)
    assert manifest.name == "Tiny-Chat"
    assert manifest.path == str(tmp_path / "out" / "model")
    assert manifest.eos_token_ids == (1,)
    assert any("Tiny-Chat.F32.gguf" in line for line in lines)
    model = AutoModelForCausalLM.from_pretrained(manifest.path)
    assert model.dtype == torch.bfloat16
    ids = torch.arange(2, 26)[None]
    with torch.no_grad():
        torch.testing.assert_close(model.float()(ids).logits, original(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(manifest.path)
    assert tokenizer("abz")["input_ids"] == [28, 27]
    assert tokenizer.chat_template == TEMPLATE


def test_second_run_converts_only_a_changed_file(tiny_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = prepare(str(tiny_gguf), out, report=silent)
    weights = out / "model" / "model.safetensors"
    converted = weights.stat().st_ino
    assert prepare(str(tiny_gguf), out, report=silent) == first
    assert weights.stat().st_ino == converted
    content = bytearray(tiny_gguf.read_bytes())
    content[-2] ^= 1
    tiny_gguf.write_bytes(content)
    assert prepare(str(tiny_gguf), out, report=silent).fingerprint != first.fingerprint


def test_damaged_file_is_refused_and_leaves_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:-4096])
    with pytest.raises(PrepareError, match="cannot be converted"):
        prepare(str(tiny_gguf), tmp_path / "out", report=silent)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["prepare.json"]


def test_a_folder_that_is_not_ours_is_left_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    precious = tmp_path / "out" / "model" / "precious"
    precious.mkdir(parents=True)
    with pytest.raises(PrepareError, match="is not Loraplex's own; choose another --out"):
        prepare(str(tiny_gguf), tmp_path / "out", report=silent)
    assert precious.is_dir()


def test_unsupported_architecture_is_refused_before_reading_weights(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(PrepareError, match="architecture 'mamba'; supported are llama"):
        prepare(str(path), tmp_path / "out", report=silent)


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def test_architecture_is_found_behind_any_other_key(tmp_path: Path) -> None:
    pairs = [
        pair(b"flag", 7, b"\1"),
        pair(b"size", 10, bytes(8)),
        pair(b"name", 8, text(b"x" * 40)),
        pair(b"numbers", 9, struct.pack("<IQ", 6, 3) + bytes(12)),
        pair(b"words", 9, struct.pack("<IQ", 8, 2) + text(b"a") + text(b"bc")),
        pair(b"general.architecture", 8, text(b"llama")),
    ]
    path = tmp_path / "x.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(pairs)) + b"".join(pairs))
    assert read_architecture(path) == "llama"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\3\4" + bytes(60),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**40) + bytes(64),
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**60),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + pair(b"key", 99, bytes(8)),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + pair(b"general.architecture", 8, text(b"\xff")),
    ],
)
def test_what_is_not_gguf_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(PrepareError, match="is not a GGUF file"):
        prepare(str(path), tmp_path / "out", report=silent)


def test_demo_base(demo_base: BaseManifest) -> None:
    assert demo_base.name == "SmolLM2-135M-Instruct"
    assert (demo_base.num_layers, demo_base.hidden_size, demo_base.vocab_size) == (30, 576, 49152)
    assert demo_base.eos_token_ids == (2,)
    assert demo_base.modules["k_proj"] == (576, 192)
    assert "<|im_start|>" in (Path(demo_base.path) / "chat_template.jinja").read_text()
