"""The compiler as a process: exit status, one line of JSON, limits, a light start."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from loraplex.engine.images import BaseManifest, read_image

BASE = BaseManifest("tiny", "/nowhere", "f" * 64, 1, 8, 16, 32, (2,), {"o_proj": (8, 8)})
LINEAR = "base_model.model.model.layers.0.self_attn.o_proj"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "base.json").write_bytes(msgspec.json.encode(BASE))
    source = tmp_path / "adapter"
    source.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"]}
    (source / "adapter_config.json").write_text(json.dumps(config))
    weights = {
        f"{LINEAR}.lora_A.weight": np.ones((2, 8), np.float32),
        f"{LINEAR}.lora_B.weight": np.ones((8, 2), np.float32),
    }
    safetensors.numpy.save_file(weights, source / "adapter_model.safetensors")
    return source


def run(source: Path, *more: str) -> subprocess.CompletedProcess[str]:
    folder = source.parent
    command = [sys.executable, "-m", "loraplex.engine.compile_adapter", str(source)]
    paths = ["--base", str(folder / "base.json"), "--out", str(folder / "image")]
    return subprocess.run(
        [*command, *paths, *more], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_good_adapter_is_reported_in_one_line(adapter: Path) -> None:
    done = run(adapter)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    image = adapter.parent / "image"
    header, _ = read_image(image, report["digest"])
    assert header.dtype == "bf16"
    assert {"cpu", "memory", "file_size", "core", "no_new_privs"} <= {*report["sandbox"]}
    assert min(report["seconds"].values()) >= 0
    del report["sandbox"], report["seconds"]
    assert report == {
        "digest": report["digest"],
        "bytes": image.stat().st_size,
        "rank": 2,
        "modules": {"o_proj": 1},
        "dora": False,
        "rslora": False,
        "parameters": 32,
        "source_bytes": (adapter / "adapter_model.safetensors").stat().st_size,
        "coverage": {"o_proj": {"layers": 1, "of": 1, "rank_min": 2, "rank_max": 2}},
        "base": {"name": "tiny", "fingerprint": "f" * 64, "asked": None, "matches": None},
        "scaling": {"min": 2.0, "max": 2.0},
        "dtype": {"source": ["F32"], "image": "bf16"},
        "parity": report["parity"],
        "norms": {"o_proj": {"mean": 32.0, "max": 32.0, "layer": 0}},
        "zero_modules": [],
        "invocation": [],
        "warnings": [],
    }
    assert report["parity"]["of_bound"] < 1


def test_the_same_input_gives_the_same_image_in_any_process(adapter: Path) -> None:
    seen = set()
    for dtype in ("bf16", "fp32", "int8"):
        (digest,) = {json.loads(run(adapter, "--dtype", dtype).stdout)["digest"] for _ in range(2)}
        assert read_image(adapter.parent / "image", digest)[0].dtype == dtype
        seen.add(digest)
    assert len(seen) == 3


def test_a_bad_adapter_is_refused_with_all_reasons(adapter: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    config |= {"r": 4, "modules_to_save": ["lm_head"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    done = run(adapter)
    assert (done.returncode, done.stderr) == (3, "")
    (line,) = done.stdout.splitlines()
    reasons = json.loads(line)["reasons"]
    assert [r["code"] for r in reasons] == ["unsupported_modules_to_save", "weights_pickle"]
    assert all(set(r) == {"code", "message"} and r["message"] for r in reasons)
    assert not (adapter.parent / "image").exists()


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_what_is_not_the_uploads_fault_is_said_on_stderr(
    adapter: Path, content: str | None
) -> None:
    manifest = adapter.parent / "base.json"
    manifest.unlink()
    if content is not None:
        manifest.write_text(content)
    done = run(adapter)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("the adapter could not be compiled: ")


def test_an_unwritable_place_is_said_on_stderr(adapter: Path) -> None:
    done = run(adapter, "--out", str(adapter / "no" / "such" / "folder" / "image"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such file or directory" in done.stderr


def test_the_process_is_bounded_and_never_loads_torch(adapter: Path) -> None:
    program = """
import resource, sys
from loraplex.engine.compile_adapter import main
assert "numpy" not in sys.modules
status = main(sys.argv[1:])
assert "torch" not in sys.modules
print(status, *(resource.getrlimit(k)[0] for k in (
    resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)))
"""
    folder = adapter.parent
    options = ["--base", str(folder / "base.json"), "--out", str(folder / "image")]
    done = subprocess.run(
        [sys.executable, "-c", program, str(adapter), *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    status, cpu, memory, file, core = map(int, done.stdout.splitlines()[-1].split())
    assert status == 0
    assert 0 < cpu <= 600
    assert 0 < memory < 3 << 30
    assert 0 < file < 128 << 20
    assert core == 0
