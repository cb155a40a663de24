"""Runs steps before there are requests: kernels are compiled, and graphs of base rows captured.

Both take seconds, for which the first requests would wait otherwise, and a step that has no memory
fails before there is anybody to fail. This file knows which steps are unlike each other; it refuses
to know models.
"""

import numpy as np
import torch

from loraplex.engine.batch import Batch, Span
from loraplex.engine.executor import AsyncExecutor
from loraplex.engine.gpu.step_layout import Limits, buckets_for
from loraplex.engine.settings import SettingsError


def warm_up(executor: AsyncExecutor, limits: Limits) -> None:
    """Run the longest prompt, decodes of each bucket, and a token that only the device knows.

    What they write to the first block of the KV cache is overwritten by whoever gets it. Raises
    `SettingsError` when the memory that KV and images do not take is too little for a step.
    """
    try:
        executor.execute(_batch(limits, 1, min(limits.tokens, limits.length)))
        for bucket in buckets_for(limits.sequences):
            executor.execute(_batch(limits, min(bucket, limits.sequences), 1))
        for token in (0, -1):
            executor.launch(_batch(limits, 1, 1, token), [None]).result()
    except torch.OutOfMemoryError as error:
        raise SettingsError(
            "KV blocks and images leave too little of the device's memory for a step: lower "
            "memory_utilization, max_num_batched_tokens or max_num_seqs"
        ) from error


def _batch(limits: Limits, sequences: int, rows: int, token: int = 0) -> Batch:
    """Sequences of some rows each, all of them in block 0; their last rows are wanted."""
    ends = range(rows, sequences * rows + 1, rows)
    table = np.zeros(-(-rows // limits.block_size), np.int32)
    return Batch(
        token_ids=np.full(sequences * rows, token, np.int32),
        positions=np.tile(np.arange(rows, dtype=np.int32), sequences),
        spans=tuple(Span(end - rows, end, rows) for end in ends),
        block_tables=(table,) * sequences,
        segments=(),
        wanted=np.array(ends, np.int32) - 1,
    )
