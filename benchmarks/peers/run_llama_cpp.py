"""llama.cpp as a peer, through llama-cpp-python: one row, the base alone.

The bf16 and the Q8_0 model are made by llama.cpp's own quantiser from the GGUF file that our base
was converted from, so both sides run the same weights.
"""

import time
from collections.abc import Callable
from pathlib import Path

import llama_cpp
from wire import Facts, Setup, Times, Work, serve, versions

FILE_TYPES = {
    "bfloat16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "float32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
}


def start(setup: Setup) -> tuple[Facts, Callable[[Work], Times]]:
    """Load the model; a run is `Llama.generate` on one prompt."""
    dtype = "bfloat16" if setup.dtype == "auto" else setup.dtype
    dtype = "int8" if setup.quantization == "int8" else dtype
    model = llama_cpp.Llama(
        str(convert(setup, dtype)),
        n_ctx=setup.max_len,
        n_threads=setup.threads,
        n_threads_batch=setup.threads,
        use_mmap=False,
        verbose=False,
    )

    def run(work: Work) -> Times:
        started, row = time.perf_counter(), []
        (prompt,) = work.prompts
        for _, _ in zip(range(work.tokens), model.generate(list(prompt), temp=0.0), strict=False):
            row.append(time.perf_counter() - started)
        return [row]

    system = llama_cpp.llama_print_system_info().decode()
    return {**versions(["llama-cpp-python"]), "dtype": dtype, "build": system}, run


def convert(setup: Setup, dtype: str) -> Path:
    """The GGUF file in another type, made once."""
    target = Path(setup.folder) / f"{dtype}.gguf"
    if not target.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = FILE_TYPES[dtype], True
        params.nthread, params.pure = setup.threads, True
        part = target.with_suffix(".part")
        failed = llama_cpp.llama_model_quantize(setup.gguf.encode(), str(part).encode(), params)
        if failed:
            raise SystemExit(f"llama.cpp could not convert {setup.gguf} to {dtype}")
        part.replace(target)
    return target


if __name__ == "__main__":
    serve(start)
