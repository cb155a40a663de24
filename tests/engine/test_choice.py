"""Which executor runs which model, and what is said of it."""

import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from loraplex.engine import choice
from loraplex.engine.choice import choose_executor
from loraplex.engine.images import BaseManifest
from loraplex.engine.settings import EngineSettings, SettingsError
from loraplex.kernels.dispatch import LOSS, Backend

CPU, GPU = Backend("cpu", "g++ compiles it", "avx2"), Backend("triton", "there is a GPU")
NEITHER = Backend("reference", f"no compiler; {LOSS}")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this a machine with a given backend."""
    return lambda backend: monkeypatch.setattr(choice, "choose", lambda: backend)


def test_backends_have_executors(on: Any, native_kit: ModuleType) -> None:
    for backend, name in ((CPU, "native"), (GPU, "gpu"), (NEITHER, "torch")):
        on(backend)
        found = choose_executor(native_kit.TINY, EngineSettings())
        assert (found.executor, found.why) == (name, backend.why)


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        ({"head_dim": 20}, {}, "its heads of 20 columns are no multiple of 16"),
        ({}, {"block_size": 8}, "block_size 8 is none of 16, 32, 64, 128, 256, 512"),
        ({}, {"block_size": 48}, "block_size 48 is none of 16, 32, 64, 128, 256, 512"),
    ],
)
def test_what_the_native_step_does_not_cover(
    model: dict[str, Any], settings: dict[str, Any], reason: str, on: Any, native_kit: ModuleType
) -> None:
    on(CPU)
    config = dataclasses.replace(native_kit.TINY, **model)
    found = choose_executor(config, EngineSettings(**settings))
    assert (found.executor, found.why) == ("torch", f"{reason}; {LOSS}")


@pytest.mark.parametrize("backend", [GPU, NEITHER])
def test_quantisation_is_never_left_out(backend: Backend, on: Any, native_kit: ModuleType) -> None:
    on(backend)
    with pytest.raises(SettingsError, match="quantization is int8, which the native executor has"):
        choose_executor(native_kit.TINY, EngineSettings(quantization="int8"))


def test_it_is_printed(on: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on(CPU)
    sizes = {"vocab_size": 9, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    config = sizes | {
        "model_type": "llama", "num_attention_heads": 4, "max_position_embeddings": 64
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    manifest = BaseManifest("tiny", str(tmp_path), "f" * 64, 1, 64, 9, 64, (0,), {})
    base = tmp_path / "base.json"
    base.write_bytes(msgspec.json.encode(manifest))
    assert choice.main(["--base", str(base)]) == 0
    assert capsys.readouterr().out == "native: g++ compiles it\n"
    assert choice.main(["--base", str(base), "--block-size", "4"]) == 0
    assert capsys.readouterr().out.startswith("torch: block_size 4 is none of 16, ")
    on(NEITHER)
    assert choice.main(["--base", str(base), "--quantization", "int8"]) == 2
    assert "give none" in capsys.readouterr().err
    assert choice.main(["--base", str(tmp_path / "other")]) == 2
