"""How torch uses a GPU here. Untested on hardware but for what tests/model/test_gpu.py covers."""

from __future__ import annotations

import torch


def host_event(*, timing: bool = False) -> torch.cuda.Event:
    """An event that the host may wait for: asleep, since a wait that spins takes a core from the experts."""
    return torch.cuda.Event(enable_timing=timing, blocking=True)


def choose_attention_kernels() -> None:
    """Attention of this process by flash, memory-efficient or plain kernels, without cuDNN's.

    Where cuDNN's are the first choice (H100 and later), one may compute the forward and another the
    recomputation under grad; routers then choose other experts, which ends the run. And each length that
    cuDNN has not seen costs 25 to 35 ms.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
