"""Loading a base for the GPU executor, here into Triton's interpreter."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import transformers

from loraplex.engine.gpu.load import load_gpu_executor
from loraplex.engine.images import BaseManifest
from loraplex.engine.settings import EngineSettings

TOKEN = 2 * 1 * 2 * 16 * 4  # K and V, layers, KV heads, head size, bytes of an fp32


def save_model(directory: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=53, hidden_size=32, intermediate_size=40, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "token"), [("auto", TOKEN), ("int8", TOKEN * (16 + 4) // (16 * 4))]
)
def test_it_takes_what_settings_say_and_runs(
    tmp_path: Path, torch_kit: ModuleType, kv_cache_dtype: str, token: int
) -> None:
    save_model(tmp_path)
    settings = EngineSettings(
        dtype="float32", kv_cache_bytes=3 * 16 * token + 1, max_num_seqs=2, swap_space=1e-4,
        max_num_batched_tokens=8, memory_utilization=0.001, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    manifest = BaseManifest("tiny", str(tmp_path), "f" * 64, 1, 32, 53, 64, (0,), {})
    executor = load_gpu_executor(manifest, settings, device="cpu")
    assert (executor.name, executor.device, executor.dtype) == ("triton", "cpu", "float32")
    assert (executor.num_blocks, executor.block_size) == (3, 16)
    assert executor.block_bytes == 16 * token
    assert executor.memory_bytes > 4 * executor.block_bytes and executor.swap_slots == 3
    with np.errstate(all="ignore"):
        found = torch_kit.Runner(executor).logits([5, 2, 9])
    kv_dtype = torch.int8 if kv_cache_dtype == "int8" else None
    plain = torch_kit.load(tmp_path, blocks=3, kv_dtype=kv_dtype)
    expected = torch_kit.Runner(plain).logits([5, 2, 9])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
