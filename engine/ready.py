"""Who an engine is, for those that connect to it: what it runs on, not what it is doing."""

from loraplex.engine.executor import Executor
from loraplex.engine.images import BaseManifest
from loraplex.engine.memory_share import model_len
from loraplex.engine.protocol import Ready
from loraplex.engine.settings import EngineSettings


def ready(
    epoch: str,
    executor: Executor,
    settings: EngineSettings,
    manifest: BaseManifest,
    blocks: int,
) -> Ready:
    """An engine with `blocks` KV blocks, in the life of the process that `epoch` names."""
    return Ready(
        epoch,
        base=manifest.fingerprint,
        max_model_len=model_len(executor, settings, manifest),
        max_num_seqs=settings.max_num_seqs,
        kv_capacity_tokens=blocks * executor.block_size,
        executor=executor.name,
        device=executor.device,
        dtype=executor.dtype,
        weight_bytes=executor.weight_bytes,
        memory_bytes=executor.memory_bytes,
        block_bytes=executor.block_bytes,
    )
