"""Large memory of the host that a device copies from and to by itself.

torch rounds what it pins up to a power of two, so that 17 GiB would take 32. This file knows bytes;
it refuses to know what is kept in them.
"""

import torch
from torch import Tensor


def pinned_blocks(count: int, block_bytes: int, device: torch.device) -> Tensor:
    """Memory uint8 `[count, block_bytes]`, of any content, pinned where DEVICE is a GPU.

    Raises `RuntimeError` when the system lets no more be pinned.
    """
    memory = torch.empty(count, block_bytes, dtype=torch.uint8)
    if device.type == "cuda" and memory.numel():
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    return memory
