"""Which GPU the process of an actor sees.

Expert actors reserve no GPU of Ray's: what their lane uses of one is counted by the plan, beside the
attention worker's share. Ray leaves the environment of an actor without GPUs alone or hides them all, by
version, so the actor names its own before CUDA starts. Untested on hardware.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from kt_ray.experts import LocalExpertsSpec
from kt_ray.model.stage_spec import StageSpec

VARIABLE = "CUDA_VISIBLE_DEVICES"


def own_gpu(spec: StageSpec) -> StageSpec:
    """The spec for an attention worker's process, which Ray gives one GPU: cuda:0, whatever its ordinal."""
    return replace(spec, device="cuda:0") if spec.device.startswith("cuda") else spec


def own_lane(spec: LocalExpertsSpec, visible: str | None) -> LocalExpertsSpec:
    """The spec for a process that sees the lane's GPU only, as its cuda:0.

    Args:
        visible: CUDA_VISIBLE_DEVICES of the driver, in whose order the plan numbers GPUs; None = unset.
    """
    if spec.lane is None or spec.lane.device == "cpu":
        return spec
    ordinal = int(spec.lane.device.removeprefix("cuda:"))
    named = str(ordinal) if visible is None else visible.split(",")[ordinal].strip()
    return replace(spec, lane=replace(spec.lane, device="cuda:0", visible=named))


def show_own_gpu(spec: LocalExpertsSpec) -> None:
    """Let this process see the GPU of its lane, and no other.

    Raises:
        RuntimeError: CUDA runs already and would not look again.
    """
    if spec.lane is None or not spec.lane.visible:
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(f"{VARIABLE} is set too late: CUDA runs already in this process")
    os.environ[VARIABLE] = spec.lane.visible
