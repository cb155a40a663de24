"""Building the native step: the compiler, the cache, instruction sets, and the mirrored structs."""

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loraplex.kernels.cpu import build as builder
from loraplex.kernels.cpu import library
from loraplex.kernels.cpu.isa import (
    BY_NAME,
    ISAS,
    Isa,
    IsaError,
    candidates,
    cpu_features,
    runnable,
)

SCALAR = BY_NAME["scalar"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache of the test's own, and a compiler that is looked for again."""
    monkeypatch.setenv(builder.CACHE_VARIABLE, str(tmp_path / "cache"))
    builder.find_compiler.cache_clear()
    yield
    builder.find_compiler.cache_clear()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    write(folder, 7)
    return folder


def write(folder: Path, number: int) -> None:
    (folder / "number.h").write_text(f"constexpr int number = {number};\n")
    (folder / "inner.cpp").write_text('#include "number.h"\nint inner() { return number; }\n')
    exported = 'extern "C" __attribute__((visibility("default"))) int get()'
    (folder / "step.cpp").write_text(f"int inner();\n{exported} {{ return inner(); }}\n")


def call(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).get())


def test_it_is_built_once(sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = builder.build(SCALAR, sources)
    assert call(path) == 7
    assert [r.message.split(" ")[0] for r in caplog.records] == ["compiling", "compiled"]
    caplog.clear()
    assert builder.build(SCALAR, sources) == path
    assert not caplog.records


def test_other_sources_make_another_object(sources: Path) -> None:
    first = builder.build(SCALAR, sources)
    write(sources, 8)
    second = builder.build(SCALAR, sources)
    assert (call(first), call(second)) == (7, 8)


def test_of_many_at_once_one_builds(sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with ThreadPoolExecutor(4) as pool:
        paths = {*pool.map(lambda _: builder.build(SCALAR, sources), range(4))}
    assert [call(path) for path in paths] == [7]
    assert len(caplog.records) == 2, "compiling, compiled"
    assert [p.name for p in paths] == [p.name for p in builder.cache_folder().iterdir()]


@pytest.mark.parametrize("errors", [1, 3])
def test_the_first_error_of_the_compiler_is_the_message(
    sources: Path, caplog: pytest.LogCaptureFixture, errors: int
) -> None:
    caplog.set_level("DEBUG")
    functions = (f"int get{i}() {{ return nothing{i}; }}\n" for i in range(errors))
    (sources / "step.cpp").write_text("".join(functions))
    with pytest.raises(builder.BuildError) as error:
        builder.build(SCALAR, sources)
    found = re.fullmatch(
        r"\S+ cannot compile the native step: \S+:1:\d+: error: .*nothing0[^(]*"
        r"(?:\(and (\d+) more, in the log at debug level\))?",
        str(error.value),
    )
    assert found, error.value
    assert int(found[1] or 0) == errors - 1
    told = [r.levelname for r in caplog.records if f"nothing{errors - 1}" in r.getMessage()]
    assert told == ["DEBUG"]
    assert not list(builder.cache_folder().iterdir())


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("echo; echo 'out of luck' >&2; exit 3", "out of luck"),
        (
            "printf 'In file\\nx.h:1: fatal error: no y.h\\n' >&2; exit 1",
            "x.h:1: fatal error: no y.h",
        ),
        ("exit 3", "it ended with 3"),
    ],
)
def test_a_compiler_that_fails_otherwise(
    sources: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, reason: str
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\ncase "$1" in --version) echo 1; exit;; esac\n{said}\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(builder.BuildError) as error:
        builder.build(SCALAR, sources)
    assert str(error.value) == f"{compiler} cannot compile the native step: {reason}"


def test_a_cache_that_others_may_write_is_not_loaded_from() -> None:
    builder.cache_folder().chmod(0o777)
    with pytest.raises(builder.BuildError, match="written by others"):
        builder.cache_folder()


def test_a_cache_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(builder.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(builder.BuildError, match="set LORAPLEX_CACHE"):
        builder.cache_folder()


def test_the_cache_is_in_the_user_s_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(builder.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert builder.cache_folder() == tmp_path / "xdg/loraplex/native"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert builder.cache_folder() == tmp_path / ".cache/loraplex/native"


def test_cxx_is_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builder.find_compiler()
    monkeypatch.setenv("CXX", found.path)
    builder.find_compiler.cache_clear()
    assert builder.find_compiler() == found
    monkeypatch.setenv("CXX", "no-such-compiler")
    builder.find_compiler.cache_clear()
    with pytest.raises(builder.NoCompiler, match="CXX is 'no-such-compiler'"):
        builder.find_compiler()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(builder.NoCompiler, match=r"install g\+\+"):
        builder.find_compiler()


@pytest.mark.parametrize(
    ("features", "names"),
    [
        ("", ["scalar"]),
        ("avx2 fma", ["scalar"]),
        ("avx2 fma f16c", ["avx2", "scalar"]),
        (
            "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16",
            ["avx512", "avx512-vnni", "avx2", "scalar"],
        ),
        (
            "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni",
            ["avx512-vnni", "avx2", "scalar"],
        ),
        ("avx2 fma f16c avx_vnni", ["avx2-vnni", "avx2", "scalar"]),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq", ["avx2", "scalar"]),
    ],
)
def test_instruction_sets_of_a_machine(features: str, names: list[str], tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {features}\nflags\t: other\n")
    assert [isa.name for isa in runnable(cpu_features(cpuinfo))] == names


def test_a_machine_that_does_not_tell(tmp_path: Path) -> None:
    assert cpu_features(tmp_path / "none") == frozenset()


def test_an_instruction_set_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_ISA", "scalar")
    assert [isa.name for isa in candidates()] == ["scalar"]
    monkeypatch.setenv("LORAPLEX_ISA", "neon")
    with pytest.raises(IsaError, match=r"'neon'; this machine runs .*scalar"):
        candidates()


def test_a_lesser_set_is_tried_where_the_compiler_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(isa: Isa) -> str:
        if isa is not SCALAR:
            raise builder.BuildError(f"no {isa.name}")
        return isa.name

    monkeypatch.setattr(library, "Library", make)
    monkeypatch.setattr(library, "candidates", lambda: ISAS)
    assert library.load_library.__wrapped__() == "scalar"
    said = [record.message for record in caplog.records]
    better = ("avx512", "avx512-vnni", "avx2-vnni", "avx2")
    assert said == [f"no {name}; trying a lesser instruction set" for name in better]
    monkeypatch.setattr(library, "candidates", lambda: ISAS[:1])
    with pytest.raises(builder.BuildError, match="no avx512"):
        library.load_library.__wrapped__()


def test_structs_are_those_of_the_compiler(tmp_path: Path) -> None:
    lines = ['#include <cstddef>\n#include <cstdio>\n#include "abi.h"\nint main() {']
    expected = []
    for struct in library.STRUCTS:
        name = f"loraplex::{struct.__name__}"
        lines.append(f'  printf("%zu\\n", sizeof({name}));')
        expected.append(ctypes.sizeof(struct))
        for field, *_ in struct._fields_:
            lines.append(f'  printf("%zu\\n", offsetof({name}, {field}));')
            expected.append(getattr(struct, field).offset)
    program = tmp_path / "sizes.cpp"
    program.write_text("\n".join([*lines, "}"]))
    compiler = builder.find_compiler().path
    command = [
        compiler,
        "-std=c++17",
        f"-I{builder.SOURCES}",
        str(program),
        "-o",
        str(tmp_path / "s"),
    ]
    subprocess.run(command, check=True)
    done = subprocess.run([tmp_path / "s"], check=True, capture_output=True, text=True)
    assert [int(line) for line in done.stdout.split()] == expected


def test_dispatch_needs_no_torch() -> None:
    program = (
        "import sys, loraplex.kernels.dispatch as d\n"
        "found = d.choose('cpu')\n"
        "print(found.name, found.isa, 'torch' in sys.modules, 'numpy' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["cpu", runnable()[0].name, "False", "False"]
