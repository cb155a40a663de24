"""The upload gate under thousands of spoiled adapters: `python tests/fuzz` runs as many as wanted.

A few seconds' worth here, in this process, some of them through the compiler's own process; and
that the judge would notice a gate that takes what it must not.
"""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from loraplex.engine.image_builder import ImageBuilder
from loraplex.platform.compiling import AdapterCompiler, Compiled
from loraplex.platform.errors import AdapterRejected

FUZZ = Path(__file__).resolve().parents[1] / "fuzz"


@pytest.fixture(scope="module")
def fuzz() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(FUZZ / "__main__.py")))


def test_hundreds_of_spoiled_adapters(fuzz: SimpleNamespace, tmp_path: Path) -> None:
    codes = fuzz.fuzz(tmp_path, [f"0:{i}" for i in range(250)])
    assert codes["accepted"] > 25
    assert len(codes) > 30, "they are refused for many reasons"


def test_the_same_seed_makes_the_same_case(fuzz: SimpleNamespace) -> None:
    make = fuzz.HOSTILE["make"]
    assert all(make(f"5:{i}") == make(f"5:{i}") for i in range(8))


def test_the_compilers_process_says_the_same(fuzz: SimpleNamespace, tmp_path: Path) -> None:
    """Each case ends in a report or in reasons: no crash, no time-out, no fault of ours."""
    gate = fuzz.Gate(tmp_path)
    (tmp_path / "base.json").write_bytes(msgspec.json.encode(gate.base))
    compiler = AdapterCompiler(tmp_path / "base.json", timeout_s=60)
    seen = set()
    for i in range(6):
        case = fuzz.HOSTILE["make"](f"9:{i}")
        source = tmp_path / str(i)
        source.mkdir()
        for name, content in case.files.items():
            (source / name).write_bytes(content)
        try:
            compiled: Compiled = anyio.run(compiler.compile, source, tmp_path / f"{i}.image")
        except AdapterRejected as rejected:
            codes = {reason["code"] for reason in rejected.reasons}
            assert not codes & {"parity_failed", "too_slow", "too_costly"}
            seen |= codes
        else:
            fuzz.JUDGE["accepted"](source, tmp_path / f"{i}.image", compiled.digest, gate.base)
            seen.add("accepted")
        assert {path.name for path in source.iterdir()} == set(case.files)
    assert len(seen) > 2


def halved(add: Callable[..., None]) -> Callable[..., None]:
    def spoil(self: ImageBuilder, *where: Any) -> None:
        *head, scale, slices = where
        add(self, *head, (np.frombuffer(scale, "<f4") / 2).tobytes(), slices)

    return spoil


def test_the_judge_notices_a_wrong_image(
    fuzz: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageBuilder, "add", halved(ImageBuilder.add))
    with pytest.raises(AssertionError, match="a fault of the compiler's"):
        fuzz.fuzz(tmp_path, [f"0:{i}" for i in range(50)])


def test_a_case_that_hangs_is_ended(
    fuzz: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = fuzz.fuzz.__globals__
    monkeypatch.setitem(state, "MOST_SECONDS", 0.01)

    def endless(*_: object) -> None:
        while True:
            pass

    monkeypatch.setitem(state, "compile_adapter", endless)
    with pytest.raises(AssertionError, match=r"Hang\(\)"):
        fuzz.fuzz(tmp_path, [f"0:{i}" for i in range(50)])


def test_a_file_outside_of_the_folder_is_noticed(
    fuzz: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = fuzz.fuzz.__globals__
    compile_adapter = state["compile_adapter"]

    def leaky(source: Path, *rest: Any) -> Any:
        (tmp_path / "base" / "escaped").write_text("x")
        return compile_adapter(source, *rest)

    monkeypatch.setitem(state, "compile_adapter", leaky)
    with pytest.raises(AssertionError, match="outside"):
        fuzz.fuzz(tmp_path, [f"0:{i}" for i in range(20)])
