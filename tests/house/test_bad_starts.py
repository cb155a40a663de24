"""A start that cannot succeed ends with exit code 2 and a sentence that says what to do."""

import socket
import subprocess
from pathlib import Path

import pytest

PATIENCE_S = 120


@pytest.fixture
def refused(house, tmp_path: Path):
    """Start with these options and settings; return what was said on standard error."""

    def start(*options: str, **settings: str) -> str:
        data_dir = () if "--data-dir" in options else ("--data-dir", str(tmp_path / "data"))
        done = subprocess.run(
            [house.command, "serve", "--port", "0", *data_dir, *options],
            env=house.environment(**settings),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        assert str(tmp_path / "data") not in _running()
        return done.stderr

    return start


def _running() -> str:
    """The command lines of all processes."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(lines)


def test_a_port_in_use(refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("--port", str(port), "--model", "/nowhere")
    assert said.strip() == (
        f"Port {port} is in use; stop what uses it, or choose another with --port or PORT."
    )


def test_a_missing_model_file(refused) -> None:
    said = refused("--model", "/nowhere/model.gguf")
    assert "/nowhere/model.gguf does not exist" in said.splitlines()[-1]


def test_a_folder_that_is_no_model(refused, tmp_path: Path) -> None:
    said = refused("--model", str(tmp_path))
    assert "has no config.json" in said.splitlines()[-1]


def test_no_model_at_all(refused) -> None:
    assert refused().startswith("No model is chosen: give --model")


def test_a_data_directory_that_cannot_be_written(refused, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refused("--data-dir", str(tmp_path / "file" / "data"), "--model", "/nowhere")
    assert said.startswith("The data directory ")
    assert "Choose another" in said


def test_a_second_server_on_the_same_data(refused, served, demo_base) -> None:
    said = refused("--data-dir", str(served.data_dir), "--model", demo_base.path)
    assert said.startswith("Another `loraplex serve` is running on ")


def test_a_setting_of_the_wrong_type(refused) -> None:
    assert refused(LORAPLEX_LEASE_S="soon").startswith("LORAPLEX_LEASE_S cannot be used: ")


def test_an_engine_that_cannot_start(refused, demo_base) -> None:
    said = refused("--model", demo_base.path, LORAPLEX_ENGINE__BLOCK_SIZE="0")
    assert "The engine cannot start" in said
    assert "block_size is 0; give at least 1" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("option", "value", "cure"),
    [
        ("--max-model-len", "100000", "the base was made for 8192 tokens: give at most 8192"),
        ("--kv-cache-bytes", "1000", "raise kv_cache_bytes or memory_utilization"),
    ],
)
def test_an_option_that_cannot_be_had(refused, demo_base, option, value, cure) -> None:
    said = refused("--model", demo_base.path, option, value).splitlines()
    assert any(line.startswith("The engine cannot start: ") for line in said)
    assert said[-1].endswith(cure)


def test_an_engine_setting_that_does_not_exist(refused, demo_base) -> None:
    said = refused("--model", demo_base.path, LORAPLEX_ENGINE__BLOK_SIZE="8")
    assert "--blok-size" in said.splitlines()[-1]


def test_a_redis_that_does_not_answer(refused, demo_base) -> None:
    url = "redis://:hushhush@127.0.0.1:1/0"
    said = refused("--model", demo_base.path, LORAPLEX_REDIS_URL=url)
    assert said.splitlines()[-1].startswith("Redis does not answer; start it")
    assert "hushhush" not in said


def test_a_database_that_cannot_be_opened(refused, demo_base) -> None:
    url = "sqlite+aiosqlite:////nowhere/at/all.db"
    said = refused("--model", demo_base.path, LORAPLEX_DATABASE_URL=url)
    assert said.splitlines()[-1].startswith("The database cannot be opened: ")


def test_a_database_that_does_not_answer(refused, demo_base) -> None:
    url = "postgresql+asyncpg://user:hushhush@127.0.0.1:1/db"
    said = refused("--model", demo_base.path, LORAPLEX_DATABASE_URL=url)
    assert said.splitlines()[-1].startswith("The database cannot be opened: ")
    assert "hushhush" not in said
