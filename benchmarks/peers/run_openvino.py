"""OpenVINO GenAI as a peer: its continuous-batching pipeline, step by step, the base alone.

It accepts an adapter with each request but applies one to the whole batch, so adapters are not
compared. The model is exported once with optimum-intel.
"""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from wire import Facts, Setup, Times, Work, has_cpu_flag, serve, versions

FORMATS = {"none": "fp16", "int8": "int8"}  # of the exported weights


def start(setup: Setup) -> tuple[Facts, Callable[[Work], Times]]:
    """Export the model if need be, and compile it."""
    folder = export(setup)
    precision = {"float32": "f32", "bfloat16": "bf16", "auto": best_precision()}[setup.dtype]
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GiB
    scheduler.max_num_seqs = setup.max_rows
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": setup.threads,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
    }
    pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
    numbers = itertools.count()

    def run(work: Work) -> Times:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = work.tokens, True, False
        started = time.perf_counter()
        prompts = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in work.prompts]
        handles = [pipeline.add_request(next(numbers), prompt, config) for prompt in prompts]
        rows: Times = [[] for _ in handles]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - started
            for row, handle in zip(rows, handles, strict=True):
                row += [now] * count_new(handle)
        return rows

    facts = {"dtype": precision, "weights": FORMATS[setup.quantization]}
    return {**versions(["openvino", "openvino-genai", "optimum-intel"]), **facts}, run


def count_new(handle: Any) -> int:
    """How many tokens a request made since it was asked last."""
    made = 0
    while handle.can_read():
        made += sum(len(output.generated_ids) for output in handle.read().values())
    return made


def best_precision() -> str:
    """bf16 where the processor multiplies it, else f32."""
    return "bf16" if has_cpu_flag("avx512_bf16", "amx_bf16") else "f32"


def export(setup: Setup) -> Path:
    """The model in OpenVINO's format."""
    weights = FORMATS[setup.quantization]
    target = Path(setup.folder) / f"model-{weights}"
    if not target.exists():
        part = target.with_suffix(".part")
        command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        command += ["--model", setup.model, "--task", "text-generation-with-past"]
        subprocess.run([*command, "--weight-format", weights, str(part)], check=True)
        part.rename(target)
    return target


if __name__ == "__main__":
    serve(start)
