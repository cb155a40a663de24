"""Settings from a file: which source goes first, what is refused, and what is shown."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loraplex.platform.boot import StartError, read_settings
from loraplex.platform.cli import app
from loraplex.platform.config_file import origins
from loraplex.platform.settings import Settings

FILE = """
port = 9000
host = "0.0.0.0"
redis_url = "redis://:hunter2-hunter2@cache/0"
key_pepper = "0123456789abcdef"

[engine]
max_num_seqs = 3
threads = 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "loraplex.toml"
    path.write_text(FILE)
    return path


def test_options_go_before_variables_and_they_before_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_CONFIG", str(file))
    monkeypatch.setenv("LORAPLEX_HOST", "::1")
    monkeypatch.setenv("LORAPLEX_ENGINE__THREADS", "4")
    given = {"port": 9002, "engine": {"cores": "0"}}
    settings = read_settings(**given, model=None)
    assert (settings.port, settings.host) == (9002, "::1")
    assert settings.engine == {"max_num_seqs": 3, "threads": "4", "cores": "0"}
    assert settings.redis_url == "redis://:hunter2-hunter2@cache/0"
    found = origins(Settings, given)
    assert {name: found[name] for name in found if found[name] != "default"} == {
        "config": "LORAPLEX_CONFIG",
        "port": "option",
        "host": "LORAPLEX_HOST",
        "redis_url": str(file),
        "key_pepper": str(file),
        "engine.max_num_seqs": str(file),
        "engine.threads": "LORAPLEX_ENGINE__THREADS",
        "engine.cores": "option",
    }


def test_the_option_goes_before_the_variable_for_the_file_too(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.toml"
    other.write_text("port = 9009")
    monkeypatch.setenv("LORAPLEX_CONFIG", str(file))
    assert read_settings(config=other).port == 9009


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("prot = 1", "has a setting 'prot', which is none; 'port' is."),
        ("LORAPLEX_PORT = 1", "'LORAPLEX_PORT', which is none; 'port' is."),
        ("zzz = 1", "has a setting 'zzz', which is none; docs/settings.md lists all."),
        ("config = 'x'", "has a setting 'config', which is none"),
        ("port = ", "is not TOML: "),
        ("port = 70000", "port of {file} cannot be used: Input should be less than or equal"),
        ("port = 'many'", "port of {file} cannot be used: Input should be a valid integer"),
        ("key_pepper = 'short-one'", "key_pepper of {file} cannot be used"),
    ],
)
def test_a_file_that_cannot_be_used_says_what_is_wrong_in_it(
    content: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "loraplex.toml"
    path.write_text(content)
    with pytest.raises(StartError) as caught:
        read_settings(config=path)
    assert said.format(file=path) in str(caught.value)
    assert str(path) in str(caught.value)
    assert "short-one" not in str(caught.value)


def test_a_file_that_is_not_there_is_no_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"none\.toml of LORAPLEX_CONFIG or --config cannot be"):
        read_settings(config=tmp_path / "none.toml")


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_PORT", "many")
    with pytest.raises(StartError, match=r"^LORAPLEX_PORT cannot be used"):
        read_settings()


@pytest.fixture
def shown(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LORAPLEX_DATABASE_URL", "postgresql://u:p4ssw0rd!@db/x")

    def show(*options: str) -> str:
        done = CliRunner().invoke(app, ["config", "show", "--config", str(file), *options])
        assert done.exit_code == 0, done.output
        for secret in ("hunter2", "0123456789abcdef", "p4ssw0rd!"):
            assert secret not in done.output
        return done.output

    return show


def test_what_is_in_force_is_shown_with_its_source(shown, file: Path) -> None:
    lines = {line.split()[0]: line.split()[1:] for line in shown().splitlines()}
    assert lines["port"] == ["9000", str(file)]
    assert lines["database_url"] == ["postgresql://u:…@db/x", "LORAPLEX_DATABASE_URL"]
    assert lines["engine.threads"] == ["2", str(file)]
    assert lines["lease_s"] == ["45.0", "default"]
    rows = {row["setting"]: row for row in json.loads(shown("--json"))}
    assert set(Settings.model_fields) - {"engine"} <= set(rows)
    assert rows["port"] == {"setting": "port", "value": 9000, "from": str(file)}


def test_a_bad_file_is_one_sentence_to_a_command(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["config", "show", "--config", str(tmp_path / "none.toml")])
    assert done.exit_code == 1
    assert "cannot be read" in done.output
