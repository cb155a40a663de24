"""Which executor runs a model, and why; decided without torch and without the weights.

`python -m loraplex.engine.choice` prints it, for a prepared base and the engine's settings, as one
line `executor: why`. This file knows the backends of `kernels.dispatch` and what each executor
covers; it refuses to know how an executor is loaded.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from loraplex.engine import settings as knobs
from loraplex.engine.images import BaseManifest
from loraplex.engine.model.config import ModelConfig, ModelError, read_model_config
from loraplex.engine.native.coverage import covers
from loraplex.kernels.dispatch import LOSS, BackendError, choose

ExecutorName = Literal["gpu", "native", "torch"]


@dataclass(frozen=True)
class Choice:
    """An executor, and the reason for it as the end of a sentence."""

    executor: ExecutorName
    why: str


def choose_executor(config: ModelConfig, settings: knobs.EngineSettings) -> Choice:
    """The fastest executor that runs the model here.

    Raises `BackendError` for a backend that was insisted on, and `SettingsError` for a quantisation
    that only the native executor has.
    """
    backend = choose()
    reason = covers(config, settings) if backend.name == "cpu" else None
    if backend.name == "cpu" and reason is None:
        return Choice("native", backend.why)
    found = (
        Choice("gpu", backend.why)
        if backend.name == "triton"
        else Choice("torch", f"{reason}; {LOSS}" if reason else backend.why)
    )
    refuse_quantization(settings, found)
    return found


def refuse_quantization(settings: knobs.EngineSettings, choice: Choice) -> None:
    """Raise `SettingsError` when `choice` would leave the quantisation that is asked for out."""
    if settings.quantization != "none":
        raise knobs.SettingsError(
            f"quantization is {settings.quantization}, which the native executor has and the"
            f" {choice.executor} executor has not ({choice.why}): give none"
        )


def main(arguments: list[str] | None = None) -> int:
    """Print the choice; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m loraplex.engine.choice", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="base.json of a prepared base")
    knobs.add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        manifest = msgspec.json.decode(options.base.read_bytes(), type=BaseManifest)
        config = read_model_config(Path(manifest.path))
        choice = choose_executor(config, knobs.from_arguments(options))
    except (knobs.SettingsError, ModelError, BackendError, OSError, msgspec.DecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{choice.executor}: {choice.why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
