"""`load_executor`: the executor that is chosen, its sizes, and what happens where none is built."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from tiny_model import save_model

from loraplex.engine import choice, load
from loraplex.engine.images import BaseManifest
from loraplex.engine.load import choose_team, fp32_bytes, load_executor
from loraplex.engine.model.config import read_model_config
from loraplex.engine.settings import EngineSettings, SettingsError
from loraplex.kernels.cpu.build import BuildError
from loraplex.kernels.dispatch import LOSS, Backend, BackendError, choose

TOKEN = 2 * 4 * 2 * 16 * 2  # K and V, layers, KV heads, head size, bytes of a bf16


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with biases, and a window in half of its layers."""
    folder = tmp_path_factory.mktemp("qwen2")
    config = transformers.Qwen2Config(
        vocab_size=97, hidden_size=96, intermediate_size=80, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512,
        use_sliding_window=True, sliding_window=50, max_window_layers=2,
    )  # fmt: skip
    save_model(folder, config)
    return folder


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a compiler."""
    found = Backend("reference", "no compiler")
    monkeypatch.setattr(choice, "choose", lambda: found)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def manifest(directory: Path) -> BaseManifest:
    return BaseManifest("tiny", str(directory), "f" * 64, 4, 96, 97, 512, (0,), {})


def test_native_takes_what_settings_say(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    settings = EngineSettings(kv_cache_bytes=10 * 16 * TOKEN + 1, threads=2)
    executor: Any = load_executor(manifest(directory), settings)
    assert (executor.num_blocks, executor.block_size) == (10, 16)
    assert (executor.name, executor.device) == (f"native {choose().isa}", "cpu")
    assert executor.dtype == "bfloat16"
    assert executor.block_bytes == 16 * TOKEN
    assert executor.memory_bytes > 10 * executor.block_bytes
    assert executor.swap_slots == 10
    assert "the native executor runs: no GPU was found; " in caplog.text
    assert "memory_utilization 0.5 gives" in caplog.text


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"quantization": "int8"}, "int8"),
        ({"quantization": "int8", "kv_cache_dtype": "int8"}, "int8"),
        ({"quantization": "int8-w8a8", "dtype": "float32"}, "int8-w8a8"),
    ],
)
def test_native_dtypes(
    given: dict[str, Any], dtype: str, directory: Path, torch_kit: ModuleType
) -> None:
    settings = EngineSettings(max_model_len=64, max_num_batched_tokens=64, **given)
    executor = load_executor(manifest(directory), settings)
    assert executor.dtype == dtype
    assert torch_kit.Runner(executor).logits(range(50)).isfinite().all()


def test_both_executors_compute_the_same(directory: Path, torch_kit: ModuleType) -> None:
    native = torch_kit.Runner(torch_kit.load_native(directory))
    reference = torch_kit.Runner(torch_kit.load(directory))
    tokens = [(7 * i) % 97 for i in range(200)]
    expected = reference.logits(tokens)
    assert expected.std() > 0.2
    assert (native.logits(tokens) - expected).abs().max() < 1e-4


def test_cache_is_no_larger_than_sequences_can_use(directory: Path) -> None:
    settings = EngineSettings(max_num_seqs=3, max_model_len=50, enable_prefix_caching=False)
    executor = load_executor(manifest(directory), settings)
    assert (executor.num_blocks, executor.swap_slots) == (3 * 4, 3 * 4)


def test_swap_may_be_off(directory: Path) -> None:
    executor = load_executor(manifest(directory), EngineSettings(swap_space=0))
    assert executor.swap_slots == 0


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_kv_dtypes_that_are_not_had(
    executor: str, directory: Path, request: pytest.FixtureRequest
) -> None:
    if executor == "torch":
        request.getfixturevalue("without_native")
    have, other = {"native": ("bfloat16", "float32"), "torch": ("float32", "bfloat16")}[executor]
    with pytest.raises(SettingsError, match=f"the {executor} executor keeps KV as {have}"):
        load_executor(manifest(directory), EngineSettings(kv_cache_dtype=other))
    load_executor(manifest(directory), EngineSettings(kv_cache_dtype=other, dtype=other))


@pytest.mark.parametrize(
    ("executor", "dtype", "own"), [("native", "bfloat16", 2), ("torch", "float32", 4)]
)
def test_int8_kv_leaves_room_for_more_blocks(
    executor: str, dtype: str, own: int, directory: Path, request: pytest.FixtureRequest
) -> None:
    if executor == "torch":
        request.getfixturevalue("without_native")
    plain = load_executor(manifest(directory), EngineSettings(kv_cache_bytes=90_000))
    small = load_executor(
        manifest(directory), EngineSettings(kv_cache_dtype="int8", kv_cache_bytes=90_000)
    )
    assert small.dtype == plain.dtype == dtype
    assert small.block_bytes == plain.block_bytes * (16 + 4) // (16 * own)
    assert small.num_blocks == 90_000 // small.block_bytes > plain.num_blocks > 0


def test_cache_may_hold_nothing(directory: Path) -> None:
    executor = load_executor(manifest(directory), EngineSettings(kv_cache_bytes=1))
    assert executor.num_blocks == 0


def test_torch_runs_where_native_cannot(
    directory: Path, without_native: None, caplog: pytest.LogCaptureFixture
) -> None:
    settings = EngineSettings(kv_cache_bytes=10 * 8 * 2 * TOKEN + 1, block_size=8, threads=1)
    executor = load_executor(manifest(directory), settings)
    assert (executor.name, executor.dtype, executor.num_blocks) == ("torch", "float32", 10)
    assert executor.memory_bytes > 10 * executor.block_bytes
    assert torch.get_num_threads() == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_torch_runs_where_the_compiler_fails(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise BuildError("the compiler is too old")

    monkeypatch.setattr(load, "load_library", fail)
    assert load_executor(manifest(directory), EngineSettings()).name == "torch"
    assert f"the compiler is too old; {LOSS}" in caplog.text
    with pytest.raises(SettingsError, match="the compiler is too old"):
        load_executor(manifest(directory), EngineSettings(quantization="int8"))
    monkeypatch.setenv("LORAPLEX_BACKEND", "cpu")
    with pytest.raises(BackendError, match="asked for, but the compiler is too old"):
        load_executor(manifest(directory), EngineSettings())


def test_weights_are_counted(directory: Path) -> None:
    config = read_model_config(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert fp32_bytes(config) == 4 * sum(p.numel() for p in model.parameters())


def test_teams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 3})
    assert choose_team(EngineSettings()).threads <= 3
    assert choose_team(EngineSettings(threads=5)) == load.Team(5)
    assert choose_team(EngineSettings(cores=(3, 0))) == load.Team(2, (3, 0))
    with pytest.raises(SettingsError, match="this process may use 0,2,3"):
        choose_team(EngineSettings(cores=(0, 1)))
