"""Compiles every Triton kernel for GPUs that are not here, and says what each one takes.

    python benchmarks/aot.py [--out benchmarks/results/aot.json]

The launchers of `kernels/triton` are called with tensors of an 8B Llama's shapes that have no
memory, and what they launch is compiled instead: for sm_80, sm_90 and gfx942. Recorded are
registers, bytes of shared memory, spills, matrix instructions and, for sm_90, how many bytes a
thread's global loads fetch at a time. It needs no GPU and must not run under TRITON_INTERPRET.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from aot_cases import CASES
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DISASSEMBLED = 90
RESULTS = Path(__file__).parent / "results" / "aot.json"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "matrix_instr_nonkdim")
PROCESSES = 2
Figures = dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """A kernel, and the arguments that it would have been launched with."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]

    def compile(self, target: GPUTarget) -> Any:
        """The kernel for `target`, specialised as at a launch."""
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(self.kernel.params):
            name, value = parameter.name, self.arguments[parameter.name]
            signature[name] = "constexpr" if parameter.is_constexpr else _type(value)
            if signature[name] == "constexpr":
                constants[name] = value
            elif not parameter.do_not_specialize and _divisible(value):
                attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constexprs=constants, attrs=attributes)
        return triton.compile(source, target=target, options=self.options)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "constexpr" if value == 1 else "i32"


def _divisible(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.element_size() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def record(case: Callable[[], None], target: GPUTarget) -> list[Launch]:
    """What a case launches on `target`."""
    launches: list[Launch] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        bound = dict(zip(self.arg_names, args, strict=False)) | named
        launches.append(Launch(self, bound, options))

    hip = "7" if target.backend == "hip" else None
    with mock.patch.object(JITFunction, "run", run), mock.patch.object(torch.version, "hip", hip):
        case()
    return launches


def measure(compiled: Any) -> Figures:
    """Registers, shared memory, spills and instructions of a compiled kernel."""
    target = compiled.metadata.target
    shared = {"shared": compiled.metadata.shared, "warps": compiled.metadata.num_warps}
    if target.backend == "hip":
        return shared | _amd(compiled.asm["amdgcn"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = shared | _usage(_tool("cuobjdump", "--dump-resource-usage", file.name))
        if target.arch != DISASSEMBLED:
            return usage
        return usage | _instructions(_tool("nvdisasm", "-c", file.name))


def _tool(name: str, *arguments: str) -> str:
    command = [TOOLS / name, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _amd(text: str) -> Figures:
    """Spills are of vector registers; a scalar one spills to a lane of those, not to memory."""
    names = {"registers": "vgpr_count", "spills": "vgpr_spill_count"}
    counts = {n: int(re.search(rf"\.{name}:\s*(\d+)", text)[1]) for n, name in names.items()}
    return counts | {"products": dict(Counter(re.findall(r"\bv_mfma_\w+", text)))}


def _usage(text: str) -> Figures:
    """Spills are bytes of stack, which nothing else takes."""
    names = {"registers": "REG", "spills": "STACK"}
    return {n: int(re.search(rf"\b{name}:(\d+)", text)[1]) for n, name in names.items()}


def _instructions(text: str) -> Figures:
    loads = re.findall(r"\b(LDG|LDGSTS)(\.[\w.]+)", text)
    return {
        "products": dict(Counter(re.findall(r"\b(?:[HQI]G?MMA)\.[\w.]+", text))),
        "load_bytes": dict(sorted(Counter(_bytes(kind, rest) for kind, rest in loads).items())),
    }


def _bytes(kind: str, modifiers: str) -> str:
    widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    size = next((widths[part] for part in modifiers.split(".") if part in widths), 4)
    return f"{'async ' if kind == 'LDGSTS' else ''}{size}"


def figures(name: str, target: str) -> dict[str, Figures]:
    """The kernels of a case on a target, as `case/kernel/target`."""
    return {
        f"{name}/{launch.kernel.__name__.removesuffix('_kernel')}/{target}": measure(
            launch.compile(TARGETS[target])
        )
        for launch in record(CASES[name][0], TARGETS[target])
    }


def compile_all() -> dict[str, Figures]:
    """`figures` of all cases and targets, printed as they come."""
    jobs = [(name, target) for name, (_, targets) in CASES.items() for target in targets]
    found: dict[str, Figures] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, spawn) as pool:
        for part in pool.map(figures, *zip(*jobs, strict=True)):
            for key, value in part.items():
                print(key, json.dumps(value), flush=True)
            found |= part
    return found


def main() -> None:
    """Write what was found, and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TRITON_CACHE_DIR": cache, "TRITON_DEFAULT_FP_FUSION": "1"}
        found = compile_all()
    out.write_text(json.dumps({"triton": triton.__version__, "kernels": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
