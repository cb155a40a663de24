"""Weights that the compiler refuses: each with its reasons, all of them, and no image."""

import pickle
import runpy
import struct
import zipfile
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from loraplex.engine.compile_adapter import compile_adapter
from loraplex.engine.images import BaseManifest
from loraplex.engine.reasons import Rejected
from loraplex.engine.safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS

KIT = runpy.run_path(str(Path(__file__).with_name("adapter_kit.py")))
BASE, CONFIG, PREFIX, Q0, Q1, SIZES = itemgetter("BASE", "CONFIG", "PREFIX", "Q0", "Q1", "SIZES")(
    KIT
)
tensors, write, raw, reasons = itemgetter("tensors", "write", "raw", "reasons")(KIT)

Tensors = dict[str, np.ndarray]


def moved(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda found: {name.replace(old, new): tensor for name, tensor in found.items()}


def added(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda found: found | {name: np.ones(shape, np.float32)}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda found: {n: t for n, t in found.items() if n != name}


def holding(value: float, part: str = "lora_A") -> Callable[[Tensors], Tensors]:
    def change(found: Tensors) -> Tensors:
        found[f"{Q0}.{part}.weight"][0, 0] = value
        return found

    return change


WRONG_TENSORS: dict[str, tuple[Callable[[Tensors], Tensors], set[str]]] = {
    "no A": (without(f"{Q0}.lora_A.weight"), {"tensor_missing"}),
    "no B": (without(f"{Q0}.lora_B.weight"), {"tensor_missing"}),
    "no tensors": (lambda _: {}, {"module_missing"}),
    "a second A": (added(f"{Q0}.lora_A.default.weight", 2, 8), {"tensor_duplicate"}),
    "a second root": (
        added("model.layers.0.self_attn.q_proj.lora_A.weight", 2, 8),
        {"tensor_duplicate"},
    ),
    "a magnitude": (added(f"{Q0}.lora_magnitude_vector", 8), {"tensor_unexpected"}),
    "a bias": (added(f"{Q0}.lora_B.bias", 8), {"tensor_unexpected"}),
    "a bias of A": (added(f"{Q0}.lora_A.bias", 2), {"tensor_unknown"}),
    "A transposed": (added(f"{Q0}.lora_A.weight", 8, 2), {"shape_mismatch", "rank_mismatch"}),
    "A too wide": (added(f"{Q0}.lora_A.weight", 2, 16), {"shape_mismatch"}),
    "A of one dimension": (added(f"{Q0}.lora_A.weight", 16), {"shape_mismatch"}),
    "B of another rank": (added(f"{Q0}.lora_B.weight", 8, 3), {"shape_mismatch"}),
    "B for more heads": (
        added(f"{PREFIX}.0.self_attn.v_proj.lora_B.weight", 8, 2),
        {"shape_mismatch"},
    ),
    "NaN": (holding(float("nan")), {"not_finite"}),
    "infinity": (holding(float("-inf"), "lora_B"), {"not_finite"}),
    "infinite once cast": (holding(3.4e38), {"not_finite"}),
    "another layer": (moved(".1.", ".2."), {"layer_unknown", "module_missing"}),
    "layer 01": (moved("layers.1.", "layers.01."), {"tensor_unknown", "module_missing"}),
    "another block": (moved("self_attn.v", "mlp.v"), {"module_unknown", "module_missing"}),
    "another linear": (moved("v_proj", "qkv_proj"), {"module_unknown", "module_missing"}),
    "absent linear": (moved("v_proj", "up_proj"), {"module_unknown", "module_missing"}),
    "another prefix": (
        moved("base_model.model.model.", "base_model.model.language_model.model."),
        {"tensor_unknown", "module_missing"},
    ),
    "compiled": (moved("model.layers", "_orig_mod.layers"), {"tensor_unknown", "module_missing"}),
    "another adapter's name": (
        moved("lora_A.weight", "lora_A.french.weight"),
        {"tensor_unknown", "tensor_missing"},
    ),
    "mixed roots": (moved("model.layers.1", "layers.1"), {"names_mixed"}),
    "embeddings": (
        added("base_model.model.model.embed_tokens.lora_embedding_A", 2, 16),
        {"unsupported_vocabulary"},
    ),
    "head": (added("base_model.model.lm_head.weight", 16, 8), {"unsupported_vocabulary"}),
    "saved module": (
        added("base_model.model.model.norm.modules_to_save.weight", 8),
        {"unsupported_modules_to_save"},
    ),
    "base weights": (added(f"{Q0}.base_layer.weight", 8, 8), {"tensor_unknown"}),
    "a name with a slash": (added("../../etc/passwd", 1), {"tensor_name"}),
    "a name with markup": (added("x<script>alert(1)</script>", 1), {"tensor_name"}),
    "a name without end": (added("x" * 300, 1), {"tensor_name"}),
    "no name": (added("", 1), {"tensor_name"}),
    "empty": (added(f"{Q0}.lora_A.weight", 0, 8), {"tensor_empty"}),
    "doubles": (
        lambda found: {n: t.astype(np.float64) for n, t in found.items()},
        {"tensor_dtype"},
    ),
    "integers": (lambda found: {n: t.astype(np.int8) for n, t in found.items()}, {"tensor_dtype"}),
    "many things": (
        lambda found: holding(0)(
            added("y", 3)(added(f"{Q1}.lora_B.bias", 8)(moved("v_p", "x_p")(found)))
        ),
        {"tensor_unknown", "tensor_unexpected", "module_unknown", "module_missing"},
    ),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_wrong_tensors_are_refused(case: str, tmp_path: Path) -> None:
    change, wanted = WRONG_TENSORS[case]
    assert reasons(write(tmp_path, CONFIG, change(tensors()))).keys() == wanted


def test_a_rank_that_is_too_large_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path, CONFIG | {"r": 513}, tensors(rank=513))
    assert reasons(source).keys() == {"rank_too_large"}


def test_a_dora_row_of_norm_zero_is_refused(tmp_path: Path) -> None:
    weights = {
        f"model.layers.{i}.self_attn.q_proj.weight": np.zeros((8, 8), np.float32) for i in (0, 1)
    }
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    base = BaseManifest("tiny", str(tmp_path), "f" * 64, 2, 8, 16, 32, (2,), SIZES)
    found = tensors(names=("q_proj",))
    for linear in (Q0, Q1):
        found[f"{linear}.lora_B.weight"][3] = 0
        found[f"{linear}.lora_magnitude_vector"] = np.ones(8, np.float32)
    config = CONFIG | {"use_dora": True, "target_modules": ["q_proj"]}
    with pytest.raises(Rejected, match="not_finite: Magnitude of q_proj of layer 0"):
        compile_adapter(write(tmp_path / "adapter", config, found), base, tmp_path / "image")


def test_configuration_and_weights_are_judged_together(tmp_path: Path) -> None:
    source = write(tmp_path, CONFIG | {"modules_to_save": ["score"]}, added("y", 3)(tensors()))
    assert reasons(source).keys() == {"unsupported_modules_to_save", "tensor_unknown"}
    source = write(tmp_path, b"{", b"garbage")
    assert reasons(source).keys() == {"config_json", "weights_header"}


def entry(start: int, end: int, shape: list[Any]) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


BROKEN_WEIGHTS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "weights_header"),
    "seven bytes": (b"\x02\0\0\0\0\0\0", "weights_header"),
    "no header": (struct.pack("<Q", 0), "weights_header"),
    "header beyond the end": (struct.pack("<Q", 1 << 40) + b"{}", "weights_header"),
    "header too large": (raw(b" " * (MAX_HEADER_BYTES + 1)), "weights_header_too_large"),
    "header of no JSON": (raw(b"{nope}"), "weights_header"),
    "header of a list": (raw([]), "weights_header"),
    "deep header": (raw(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"), "weights_header"),
    "duplicate names": (raw(b'{"a":1,"a":2}'), "weights_header"),
    "entry of a number": (raw({"a": 1}), "weights_header"),
    "entry with more": (raw({"a": entry(0, 4, [1]) | {"more": 1}}, b"0000"), "weights_header"),
    "entry with less": (raw({"a": {"dtype": "F32", "shape": [1]}}, b"0000"), "weights_header"),
    "one offset": (raw({"a": entry(0, 4, [1]) | {"data_offsets": [0]}}, b"0000"), "weights_header"),
    "fractional shape": (raw({"a": entry(0, 4, [1.0])}, b"0000"), "weights_header"),
    "negative shape": (raw({"a": entry(0, 4, [-1])}, b"0000"), "weights_header"),
    "negative offset": (raw({"a": entry(-4, 0, [1])}, b"0000"), "weights_header"),
    "shape of true": (raw({"a": entry(0, 4, [True])}, b"0000"), "weights_header"),
    "huge shape": (raw({"a": entry(0, 4, [1 << 60])}, b"0000"), "weights_header"),
    "many dimensions": (raw({"a": entry(0, 4, [1] * 9)}, b"0000"), "weights_header"),
    "wrong size": (raw({"a": entry(0, 8, [1])}, b"0" * 8), "weights_layout"),
    "beyond the end": (raw({"a": entry(0, 16, [4])}, b"0" * 8), "weights_layout"),
    "overlap": (raw({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"0" * 12), "weights_layout"),
    "same place": (raw({"a": entry(0, 8, [2]), "b": entry(0, 8, [2])}, b"0" * 8), "weights_layout"),
    "gap": (raw({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, b"0" * 12), "weights_layout"),
    "tail": (raw({"a": entry(0, 4, [1])}, b"0" * 8), "weights_layout"),
    "late start": (raw({"a": entry(4, 8, [1])}, b"0" * 8), "weights_layout"),
    "too many tensors": (
        raw({f"t{i}": entry(4 * i, 4 * i + 4, [1]) for i in range(MAX_TENSORS + 1)}),
        "weights_too_many_tensors",
    ),
    "pickle": (pickle.dumps({"a": [1.0] * 100}), "weights_pickle"),
    "old pickle": (pickle.dumps({"a": [1.0] * 100}, protocol=2), "weights_pickle"),
}


@pytest.mark.parametrize("case", BROKEN_WEIGHTS)
def test_broken_weights_are_refused(case: str, tmp_path: Path) -> None:
    content, code = BROKEN_WEIGHTS[case]
    assert code in reasons(write(tmp_path, CONFIG, content))


def test_a_header_whose_size_looks_like_a_pickle_is_none(tmp_path: Path) -> None:
    """A header of 0x480 bytes begins, as a pickle of protocol 4, with 80 04."""
    content = safetensors.numpy.save(tensors())
    size = struct.unpack("<Q", content[:8])[0]
    padded = raw(content[8 : 8 + size].ljust(0x480), content[8 + size :])
    assert padded.startswith(pickle.dumps(None, protocol=4)[:2])
    compile_adapter(write(tmp_path, CONFIG, padded), BASE, tmp_path / "image")


def test_a_torch_archive_under_the_name_of_safetensors_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path, CONFIG, b"")
    with zipfile.ZipFile(source / "adapter_model.safetensors", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    assert "torch.load" in reasons(source)["weights_pickle"]


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "weights.pth"])
def test_a_pickle_instead_of_weights_is_refused_by_name(name: str, tmp_path: Path) -> None:
    source = write(tmp_path, CONFIG, b"")
    (source / "adapter_model.safetensors").rename(source / name)
    found = reasons(source)
    assert found.keys() == {"weights_pickle"}
    assert name in found["weights_pickle"]
    assert 'python -c "import torch' in found["weights_pickle"]


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert reasons(tmp_path).keys() == {"config_missing", "weights_missing"}
    (tmp_path / "adapter_config.json").mkdir()
    assert reasons(tmp_path).keys() == {"config_missing", "weights_missing"}
