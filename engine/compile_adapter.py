"""Compiles a PEFT LoRA checkpoint into an adapter image, or refuses it with every reason.

    python -m loraplex.engine.compile_adapter SOURCE --base base.json --out FILE [--dtype bf16]

The dtype is bf16, fp32, or int8 with one scale a row, which halves an adapter's bytes.

SOURCE holds `adapter_config.json` and `adapter_model.safetensors`; nothing else in it is opened.
Prints one line of JSON and exits with 0 (a `Report`) or 3 (`{"reasons": [...]}`); exits with 2 and
a sentence on stderr when it could not work. The same input gives the same digest.

This file knows the steps, and the limits of the process. It refuses to run what an upload brings,
be it pickle, code or a regular expression, and reads no weight before all headers are right.
"""

import argparse
import math
import os
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import msgspec

from loraplex.engine.checkpoint import PrepareError
from loraplex.engine.images import BaseManifest, ImageDtype
from loraplex.engine.peft_config import PeftConfig
from loraplex.engine.peft_config_reader import MAX_BYTES, read_config
from loraplex.engine.peft_format import LoraModule, match_modules
from loraplex.engine.reasons import Findings, Reason, Rejected
from loraplex.engine.safetensors_header import UNPICKLE, Tensor, read_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
CPU_SECONDS = 600
FAILED, REJECTED = 2, 3

_TOO_COSTLY = Reason("too_costly", "Checking the adapter took more memory than its size explains.")
_SEND_BOTH = f"send {CONFIG} and {WEIGHTS}, as PEFT's save_pretrained writes them"


class Report(msgspec.Struct, frozen=True):
    """What was compiled; `modules` counts the layers in which each linear is adapted."""

    digest: str
    bytes: int
    rank: int  # the largest
    modules: dict[str, int]
    dora: bool
    rslora: bool
    parameters: int
    invocation: tuple[int, ...] = ()  # of an activated adapter
    warnings: tuple[Reason, ...] = ()


def compile_adapter(
    source: Path, base: BaseManifest, out: Path, dtype: ImageDtype = "bf16"
) -> Report:
    """Write the image of the checkpoint in `source` to `out`.

    Raises `Rejected` with all reasons: those of the configuration and the weights' header together,
    and, when these are right, those of the weights. `out` is written whole or not at all.
    """
    findings = Findings()
    config = _read_config(source, findings)
    modules = _read_modules(source, config, base, findings)
    findings.raise_if_any()
    from loraplex.engine.lora_arrays import write_image  # NumPy, for what deserves it

    invocation = config.invocation if config else ()
    digest = write_image(modules, invocation, source / WEIGHTS, base, out, dtype, findings)
    return Report(
        digest=digest,
        bytes=out.stat().st_size,
        rank=max(m.rank for m in modules),
        modules=dict(Counter(m.name for m in modules)),
        dora=any(m.magnitude for m in modules),
        rslora=config is not None and config.rslora,
        parameters=sum(_parameters(m) for m in modules),
        invocation=invocation,
        warnings=findings.warnings,
    )


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


def _parameters(module: LoraModule) -> int:
    parts: tuple[Tensor | None, ...] = (module.a, module.b, module.bias, module.magnitude)
    return sum(math.prod(part.shape) for part in parts if part is not None)


def limit_process(weights: Path) -> None:
    """Bound this process's CPU time, memory and output by what the weights' size explains.

    Image and copies are a small multiple of the file: float32 doubles bf16, and one array at a time
    is in float64. BLAS gets one thread, for the machine is there to serve.
    """
    size = weights.stat().st_size if weights.is_file() else 0
    for kind, limit in (
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_AS, (2 << 30) + 8 * size),
        (resource.RLIMIT_FSIZE, (64 << 20) + 2 * size),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, hard))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m loraplex.engine.compile_adapter")
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("--base", type=Path, required=True, help="the base's base.json")
    parser.add_argument("--out", type=Path, required=True, help="the image file to write")
    parser.add_argument("--dtype", choices=get_args(ImageDtype), default="bf16")
    options = parser.parse_args(arguments)
    limit_process(options.source / WEIGHTS)
    try:
        base = msgspec.json.decode(options.base.read_bytes(), type=BaseManifest)
        report = compile_adapter(options.source, base, options.out, options.dtype)
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
