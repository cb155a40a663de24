"""Compiles a PEFT LoRA checkpoint into an adapter image, or refuses it with every reason.

    python -m loraplex.engine.compile_adapter SOURCE --base base.json --out FILE [--dtype bf16]

The dtype is bf16, fp32, or int8 with one scale a row, which halves an adapter's bytes.

SOURCE holds `adapter_config.json` and `adapter_model.safetensors`; nothing else in it is opened.
Prints one line of JSON and exits with 0 (a `Report`) or 3 (`{"reasons": [...]}`); exits with 2 and
a sentence on stderr when it could not work. The same input gives the same digest.

This file knows the steps. It refuses to run what an upload brings, be it pickle, code or a regular
expression, and reads no weight before all headers are right.
"""

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import get_args

import msgspec

from loraplex.engine import sandbox
from loraplex.engine.adapter_report import (
    Dtypes,
    Report,
    coverage,
    match_base,
    parameters,
    scaling,
    source_dtypes,
)
from loraplex.engine.checkpoint import PrepareError
from loraplex.engine.images import BaseManifest, ImageDtype
from loraplex.engine.peft_config import PeftConfig
from loraplex.engine.peft_config_reader import MAX_BYTES, read_config
from loraplex.engine.peft_format import LoraModule, match_modules
from loraplex.engine.reasons import Findings, Reason, Rejected
from loraplex.engine.safetensors_header import UNPICKLE, read_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
FAILED, REJECTED = 2, 3

_TOO_COSTLY = Reason("too_costly", "Checking the adapter took more memory than its size explains.")
_SEND_BOTH = f"send {CONFIG} and {WEIGHTS}, as PEFT's save_pretrained writes them"


def compile_adapter(
    source: Path, base: BaseManifest, out: Path, dtype: ImageDtype = "bf16"
) -> Report:
    """Write the image of the checkpoint in `source` to `out`.

    Raises `Rejected` with all reasons: those of the configuration and the weights' header together,
    and, when these are right, those of the weights. `out` is written whole or not at all, and only
    once it was read back and found to add what the checkpoint adds.
    """
    findings, clock = Findings(), _Stages()
    config, modules = _read_headers(source, base, findings)
    match = match_base(config, base, findings)
    clock.end("headers")
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        from loraplex.engine.lora_arrays import write_image  # NumPy, for what deserves it
        from loraplex.engine.parity import check_parity

        weights = source / WEIGHTS
        written = write_image(modules, config.invocation, weights, base, part, dtype, findings)
        clock.end("image")
        parity, norms = check_parity(modules, weights, part, written.digest, base, findings)
        clock.end("parity")
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return Report(
        digest=written.digest,
        bytes=out.stat().st_size,
        rank=max(m.rank for m in modules),
        modules=dict(Counter(m.name for m in modules)),
        dora=any(m.magnitude for m in modules),
        rslora=config.rslora,
        parameters=parameters(modules),
        source_bytes=weights.stat().st_size,
        coverage=coverage(modules, base),
        base=match,
        scaling=scaling(modules),
        dtype=Dtypes(source_dtypes(modules), dtype),
        parity=parity,
        norms=norms,
        zero_modules=written.idle,
        invocation=config.invocation,
        warnings=findings.warnings,
        seconds=clock.seconds,
    )


class _Stages:
    """Times the stages of a compilation."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self.seconds: dict[str, float] = {}

    def end(self, stage: str) -> None:
        """A stage ends here, and the next begins."""
        now = time.monotonic()
        self.seconds[stage], self._since = round(now - self._since, 4), now


def _read_headers(
    source: Path, base: BaseManifest, findings: Findings
) -> tuple[PeftConfig, list[LoraModule]]:
    """The configuration and the linears that it adapts; raises `Rejected`."""
    config = _read_config(source, findings)
    modules = _read_modules(source, config, base, findings)
    findings.raise_if_any()
    if config is None or not modules:
        raise AssertionError("headers without faults describe an adapter")
    return config, modules


def _read_config(source: Path, findings: Findings) -> PeftConfig | None:
    path = source / CONFIG
    if not path.is_file():
        findings.reject("config_missing", f"there is no {CONFIG}", _SEND_BOTH)
        return None
    with path.open("rb") as file:
        return read_config(file.read(MAX_BYTES + 1), findings)


def _read_modules(
    source: Path, config: PeftConfig | None, base: BaseManifest, findings: Findings
) -> list[LoraModule]:
    path = source / WEIGHTS
    if not path.is_file():
        _reject_missing(source, findings)
        return []
    header = Findings()
    tensors = read_tensors(path, header)
    findings.extend(header)
    return match_modules(None if header.reasons else config, tensors, base, findings)


def _reject_missing(source: Path, findings: Findings) -> None:
    """There are no weights; if there is a pickle, say how to convert it."""
    pickles = sorted(p.name for p in source.glob("*") if p.suffix in PICKLE_SUFFIXES)
    for name in pickles:
        detail = f"{name} is a pickle, which may run code when it is read"
        findings.reject("weights_pickle", detail, UNPICKLE)
    if not pickles:
        findings.reject("weights_missing", f"there is no {WEIGHTS}", _SEND_BOTH)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m loraplex.engine.compile_adapter")
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("--base", type=Path, required=True, help="the base's base.json")
    parser.add_argument("--out", type=Path, required=True, help="the image file to write")
    parser.add_argument("--dtype", choices=get_args(ImageDtype), default="bf16")
    parser.add_argument(
        "--seconds", type=int, default=600, help="of computing at most; twice that in all"
    )
    options = parser.parse_args(arguments)
    source: Path = options.source
    confined = sandbox.enter(source, options.out.parent, _size(source / WEIGHTS), options.seconds)
    try:
        base = msgspec.json.decode(options.base.read_bytes(), type=BaseManifest)
        report = compile_adapter(source, base, options.out, options.dtype)
        report = msgspec.structs.replace(report, sandbox=confined)
    except Rejected as rejected:
        print(msgspec.json.encode({"reasons": rejected.reasons}).decode())
        return REJECTED
    except MemoryError:
        print(msgspec.json.encode({"reasons": [_TOO_COSTLY]}).decode())
        return REJECTED
    except (OSError, msgspec.DecodeError, PrepareError) as error:
        print(f"the adapter could not be compiled: {error}", file=sys.stderr)
        return FAILED
    print(msgspec.json.encode(report).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
