"""Triton kernels compiled for absent GPUs: nothing spills, memory suffices, weights load widely."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "benchmarks" / "results" / "aot.json"
TARGETS = {"sm_80", "sm_90", "gfx942"}
SHARED = {"sm_80": 99 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}  # bytes; sm_86's and sm_89's
WIDE = {"16", "async 16"}

Kernels = dict[str, dict]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What `benchmarks/aot.py` writes, run apart: here Triton may be an interpreter."""
    out = tmp_path_factory.mktemp("aot") / "aot.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "aot.py"), "--out", str(out)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def kernels(found: dict) -> Kernels:
    return found["kernels"]


def test_every_kernel_is_compiled_for_every_target(kernels: Kernels) -> None:
    sources = (ROOT / "kernels" / "triton").glob("*.py")
    names = {name for s in sources for name in re.findall(r"def (\w+)_kernel\(", s.read_text())}
    compiled = {tuple(key.split("/")[1:]) for key in kernels}
    assert {name for name, _ in compiled} == names
    assert compiled == {(name, target) for name in names for target in TARGETS}


def test_what_differs_between_layouts_of_a_step_makes_no_other_program() -> None:
    """Steps of different layouts have to agree on every bit."""
    script = """
from loraplex.kernels.triton import draw, paged_attention, rope_kv, sgmv
kernels = (paged_attention.attention_kernel, paged_attention.merge_kernel, sgmv.shrink_kernel,
           sgmv.expand_kernel, rope_kv.rope_kv_kernel, draw.feed_kernel)
print(*(p.name for kernel in kernels for p in kernel.params if p.do_not_specialize))
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    )
    of_attention, of_merge = ["work_ptr", "tables_at"], ["work_ptr", "merges_at"]
    of_sgmv, of_rows = ["plan_ptr", "permutation"] * 2, ["positions_ptr", "slots_ptr", "count"]
    assert done.stdout.split() == of_attention + of_merge + of_sgmv + of_rows


def test_nothing_spills(kernels: Kernels) -> None:
    """But fp32's widest heads, a little: without matrix instructions, threads hold whole rows."""
    spills = {key: k["spills"] for key, k in kernels.items() if k["spills"]}
    assert spills.pop("attention, fp32, 256 columns/attention/sm_90", 0) <= 56
    assert spills == {}


def test_shared_memory_suffices(kernels: Kernels) -> None:
    for key, kernel in kernels.items():
        assert kernel["shared"] <= SHARED[key.split("/")[-1]], key


@pytest.mark.parametrize("case", ["attention", "attention, int8"])
def test_two_blocks_of_attention_fit_a_multiprocessor(kernels: Kernels, case: str) -> None:
    """A decode waits for memory, which one block alone does not keep busy."""
    kernel = kernels[f"{case}/attention/sm_90"]
    assert 2 * kernel["registers"] * 32 * kernel["warps"] <= 65536
    assert 2 * kernel["shared"] <= SHARED["sm_90"]


@pytest.mark.parametrize("case", ["sgmv", "sgmv, tiles of 32", "sgmv, int8", "sgmv, fp8"])
def test_weights_load_16_bytes_at_a_time(kernels: Kernels, case: str) -> None:
    """An int8 B is narrow: there a thread has 8 bytes to load in all. H is fp32, the rest ints."""
    shrink, expand = (
        kernels[f"{case}/{name}/sm_90"]["load_bytes"] for name in ("shrink", "expand")
    )
    assert shrink.keys() == {"4", "async 16"}
    narrow = "8" in case
    assert expand.keys() == {"4", "16", "async 4", "async 8" if narrow else "async 16"}


@pytest.mark.parametrize("case", ["attention", "attention, 256 columns, window, softcap"])
def test_keys_and_values_load_16_bytes_at_a_time(kernels: Kernels, case: str) -> None:
    assert kernels[f"{case}/attention/sm_90"]["load_bytes"].keys() == {"4", *WIDE}


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_tiles_take_one_matrix_instruction(kernels: Kernels, target: str) -> None:
    """Tiles of 16 and of 32 rows must sum alike."""
    for name in ("shrink", "expand"):
        pair = [kernels[f"{case}/{name}/{target}"] for case in ("sgmv", "sgmv, tiles of 32")]
        instructions = {instruction for kernel in pair for instruction in kernel["products"]}
        assert len(instructions) == 1, name


def test_what_is_recorded_is_what_is_there(found: dict) -> None:
    """If this fails after a change to a kernel, run `python benchmarks/aot.py`."""
    recorded = json.loads(RECORDED.read_text())
    assert recorded["kernels"].keys() == found["kernels"].keys()
    if recorded["triton"] == found["triton"]:
        assert recorded == found
