"""The documents say what is true: settings, commands, make targets and links."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic_core import PydanticUndefined
from typer.testing import CliRunner

from loraplex.engine.settings import EngineSettings
from loraplex.platform.cli import app
from loraplex.platform.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])


def _cell(default: Any) -> str:
    if default is None or default is PydanticUndefined:
        return "–"
    return f"`{default}`"


def _platform_rows() -> list[str]:
    return [
        f"| `LORAPLEX_{name.upper()}` | {_cell(field.default)} | {field.description} |"
        for name, field in Settings.model_fields.items()
    ]


def _engine_rows() -> list[str]:
    return [
        f"| `LORAPLEX_ENGINE__{field.name.upper()}` | {_cell(field.default)} "
        f"| {_sentence(field.metadata['help'])} |"
        for field in dataclasses.fields(EngineSettings)
    ]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def test_the_table_of_settings_is_the_settings() -> None:
    text = (ROOT / "docs/settings.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| `")]
    expected = [*_platform_rows(), *_engine_rows()]
    assert table == expected, "the table should be:\n" + "\n".join(expected)


@pytest.mark.parametrize("field", dataclasses.fields(EngineSettings), ids=lambda f: f.name)
def test_serve_has_an_option_for_each_knob_of_the_engine(field: dataclasses.Field[Any]) -> None:
    options = {
        option.name: option for option in typer.main.get_command(app).commands["serve"].params
    }
    option, names = options[field.name], (field.name, *field.metadata["aliases"])
    assert {*option.opts} == {f"--{name.replace('_', '-')}" for name in names}
    assert option.help == _sentence(field.metadata["help"])
    assert option.default is None


def test_serve_passes_on_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    monkeypatch.setattr("loraplex.platform.serve.run", lambda *given: heard.append(given))
    monkeypatch.setenv("LORAPLEX_ENGINE__MAX_WAITING", "7")
    monkeypatch.setenv("LORAPLEX_ENGINE__MAX_NUM_SEQS", "8")
    words = "--model m --name n --max-num-seqs 9 --gpu-memory-utilization 0.9 --cores 0-1"
    words += " --no-enable-prefix-caching --swap-space 0"
    done = CliRunner().invoke(app, ["serve", *words.split()])
    assert done.exit_code == 0, done.output
    ((settings, name),) = heard
    assert (settings.model, name) == ("m", "n")
    assert settings.engine == {
        "max_waiting": "7",
        "max_num_seqs": 9,
        "memory_utilization": 0.9,
        "swap_space": 0.0,
        "enable_prefix_caching": False,
        "cores": "0-1",
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_make_targets_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {*re.findall(r"^([a-z]+):", makefile, re.MULTILINE)}
    named = {*re.findall(r"`(?:[A-Z_]+=\S+ )*make ([a-z]+)", document.read_text())}
    named |= {*re.findall(r"^(?:[A-Z_]+=\S+ )*make ([a-z]+)", document.read_text(), re.MULTILINE)}
    assert named <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_commands_exist(document: Path) -> None:
    commands = _commands()
    for words in re.findall(r"(?:^|`)loraplex ([a-z]+(?: [a-z]+)?)", document.read_text(), re.M):
        first, _, second = words.partition(" ")
        assert first in commands, f"loraplex {first}"
        assert not commands[first] or second in commands[first], f"loraplex {words}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    """A path in code marks that starts with a room or a folder of ours is one on the disk."""
    folders = "engine|kernels|platform|web|migrations|examples|benchmarks|docs|tests"
    for path in re.findall(rf"`((?:{folders})/[\w./-]*\w)`", document.read_text()):
        found = any((ROOT / name).exists() for name in (path, f"{path}.py"))
        assert found, f"{document.name} names {path}"


def test_the_version_is_in_the_changelog() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def _commands() -> dict[str, set[str]]:
    """The commands, each with its sub-commands."""
    tree = typer.main.get_command(app)
    return {name: {*getattr(sub, "commands", {})} for name, sub in tree.commands.items()}
