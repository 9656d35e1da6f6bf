"""Hugging Face layers of one stage on a device: the layer loop, the experts hook, the probe, LoRA.

Nothing heavy is imported until it is asked for: the expert side takes LoRA's initialisation from here
without transformers, the driver takes `StageSpec` without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kt_ray.model.stage_spec import StageSpec

if TYPE_CHECKING:
    from kt_ray.model.stage import Stage

__all__ = ["Stage", "StageSpec"]


def __getattr__(name: str) -> Any:
    if name == "Stage":
        from kt_ray.model.stage import Stage

        return Stage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
