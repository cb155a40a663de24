"""Which backend a process takes: by what is there, or by what is asked for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.kernels import dispatch
from loraplex.kernels.cpu import build


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No GPU, no override, and nothing remembered of other tests."""
    monkeypatch.setattr(dispatch, "GPU_FILES", ())
    for name in (dispatch.VARIABLE, "LORAPLEX_ISA"):
        monkeypatch.delenv(name, raising=False)
    forget()
    yield
    forget()


def forget() -> None:
    dispatch.choose.cache_clear()
    build.find_compiler.cache_clear()


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def test_a_compiler_makes_it_native() -> None:
    found = dispatch.choose()
    assert found.name == "cpu"
    assert found.why.startswith("no GPU was found; ")
    assert found.why.endswith(f"compiles the native step for {found.isa}")
    assert dispatch.choose() is found


def test_no_compiler_leaves_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    found = dispatch.choose()
    assert found.name == "reference"
    assert "CXX is 'no-such-compiler'" in found.why and dispatch.LOSS in found.why


def test_a_shared_cache_leaves_the_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LORAPLEX_CACHE", str(tmp_path))
    build.cache_folder().chmod(0o770)
    assert dispatch.choose().name == "reference"


@pytest.mark.parametrize("by_argument", [True, False])
def test_one_may_be_asked_for(by_argument: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_argument:
        monkeypatch.setenv(dispatch.VARIABLE, "reference")
    found = dispatch.choose("reference" if by_argument else None)
    assert found.name == "reference"
    assert found.why == "LORAPLEX_BACKEND asks for it"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("triton", "LORAPLEX_BACKEND is triton, but no GPU was found"),
        ("cpu", "LORAPLEX_BACKEND is cpu, but CXX is 'no-such-compiler'"),
        ("cuda", "LORAPLEX_BACKEND is 'cuda'; give one of triton, cpu, reference"),
    ],
)
def test_one_that_is_not_there(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    with pytest.raises(dispatch.BackendError, match=message):
        dispatch.choose(name)


def test_an_instruction_set_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_ISA", "neon")
    with pytest.raises(dispatch.BackendError, match="LORAPLEX_ISA is 'neon'"):
        dispatch.choose()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU, and what its kernels' launchers take; the folder of Python's headers."""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(dispatch, "GPU_FILES", (tmp_path,))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    return tmp_path


def test_a_gpu_comes_first(gpu: Path) -> None:
    assert dispatch.choose() == dispatch.Backend("triton", "torch can use a GPU")


def test_a_gpu_that_torch_cannot_use(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert dispatch.choose().why.startswith("torch cannot use the GPU; ")


def test_a_gpu_that_is_too_old_is_left_alone(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    assert "compute capability is below 8.0" in dispatch.choose().why


def test_a_gpu_without_a_c_compiler(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC")
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(dispatch.BackendError, match="no C compiler, which it needs: install gcc"):
        dispatch.choose("triton")


def test_a_gpu_without_headers(gpu: Path) -> None:
    (gpu / "Python.h").unlink()
    with pytest.raises(dispatch.BackendError, match="install python3-dev"):
        dispatch.choose("triton")


def test_interpreted_kernels_do_not_run_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dispatch, "GPU_FILES", (tmp_path,))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.choose().why.startswith("TRITON_INTERPRET is set")
