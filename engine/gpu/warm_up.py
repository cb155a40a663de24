"""Runs steps before there are requests: kernels are compiled, and graphs of decodes captured.

Both take seconds, for which the first requests would wait otherwise, and a step that has no memory
fails before there is anybody to fail. There are no images yet; steps run as if there were some of
the usual dtype. This file knows which steps are unlike each other; it refuses to know models.
"""

import numpy as np
import torch

from loraplex.engine.batch import Batch, Span
from loraplex.engine.gpu.executor import GpuExecutor
from loraplex.engine.gpu.step_layout import Limits, buckets_for
from loraplex.engine.settings import SettingsError

USUAL = "bf16"  # dtype of the images of uploads that do not say another


def warm_up(executor: GpuExecutor, limits: Limits, wanted: int) -> None:
    """Run decodes of each bucket, the largest step, and a token that only the device knows.

    The largest step runs beside what graphs have taken; its last `wanted` rows want logits. What
    steps write to the first block of the KV cache is overwritten by whoever gets it. Raises
    `SettingsError` when the memory that KV and images do not take is too little for a step.
    """
    try:
        decodes = [
            _batch(limits, [1] * min(bucket, limits.sequences))
            for bucket in buckets_for(limits.sequences)
        ]
        for batch in (*decodes, _batch(limits, _largest(limits), wanted)):
            executor.execute(batch)
            executor.rehearse(batch, USUAL)
        for token in (0, -1):
            executor.launch(_batch(limits, [1], token=token), [None]).result()
    except torch.OutOfMemoryError as error:
        raise SettingsError(
            "KV blocks and images leave too little of the device's memory for a step: lower "
            "memory_utilization, max_num_batched_tokens or max_num_seqs"
        ) from error


def _largest(limits: Limits) -> list[int]:
    """Rows of each sequence of the largest step that there can be."""
    rows = min(limits.tokens, limits.sequences * limits.length)
    whole, rest = divmod(rows, limits.length)
    return [limits.length] * whole + [rest] * (rest > 0)


def _batch(limits: Limits, rows: list[int], wanted: int | None = None, token: int = 0) -> Batch:
    """Sequences of some rows each, all of them in block 0; all rows or the last ones are wanted."""
    ends = np.cumsum(rows, dtype=np.int32)
    total = int(ends[-1])
    return Batch(
        token_ids=np.full(total, token, np.int32),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in rows]),
        spans=tuple(Span(int(end) - n, int(end), n) for end, n in zip(ends, rows, strict=True)),
        block_tables=tuple(np.zeros(-(-n // limits.block_size), np.int32) for n in rows),
        segments=(),
        wanted=np.arange(total, dtype=np.int32)[-(wanted or total) :],
    )
