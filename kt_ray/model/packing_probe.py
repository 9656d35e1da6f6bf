"""Do a family's layers keep packed documents apart? Found out numerically, never assumed.

transformers builds block-diagonal masks from position ids that restart; a layer that carries a state
from token to token (linear attention, Mamba), or groups neighbouring tokens (compressed keys), has no
use for the mask and would mix documents without a word.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kt_ray.errors import UserError
from kt_ray.model.probe import as_float
from kt_ray.model.recording import RecordedCall, Recorder

_DOCUMENTS = (5, 9, 3)  # tokens of each: no multiples of each other, of 4 or of 8
_TOLERANCE = 1e-4  # relative, of float32 layers; documents that see each other are off by far more


def check_packing(
    recorder: Recorder,
    layers: Mapping[int, nn.Module],
    state_shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Run every layer on three documents packed and alone, and compare.

    Args:
        recorder: of the family.
        layers: of this stage, their experts answered by the caller.
        state_shape: of the hidden state after [b, s].

    Raises:
        UserError: a layer whose output for a document depends on its neighbours in the row.
    """
    total = sum(_DOCUMENTS)
    ids = torch.zeros(1, total, dtype=torch.int64, device=device)
    positions = torch.cat([torch.arange(n) for n in _DOCUMENTS])[None].to(device)
    packed = recorder.record({"input_ids": ids, "position_ids": positions}, None)
    starts = [sum(_DOCUMENTS[:i]) for i in range(len(_DOCUMENTS))]
    alone = [recorder.record({"input_ids": ids[:, :n]}, None) for n in _DOCUMENTS]
    generator = torch.Generator().manual_seed(0)
    shape = (1, total, *state_shape)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float32).to(device)
    for index, layer in layers.items():
        if any(p.dtype != torch.float32 for p in layer.parameters()):
            layer = copy.deepcopy(layer).float()
        with torch.no_grad():
            together = _run(packed[index], layer, hidden)
            apart = [
                _run(calls[index], layer, hidden[:, start : start + n])
                for calls, start, n in zip(alone, starts, _DOCUMENTS, strict=True)
            ]
        expected = torch.cat(apart, dim=1)
        error = float((together - expected).abs().max())
        if not error <= _TOLERANCE * max(1.0, float(expected.abs().max())):
            raise UserError(
                f"{recorder.causal.config.model_type} cannot train packed rows",
                where=f"layer {index}, {_attention_name(layer)}",
                observed=f"a document's output changes by {error:.2g} with its neighbours in the row",
                required="layers that keep documents apart",
                remedy="set data.packing=false (data.group_by_length=true saves padding too)",
            )


def _run(call: RecordedCall, layer: nn.Module, hidden: Tensor) -> Tensor:
    call = RecordedCall(as_float(call.args), as_float(call.kwargs), call.keyword, call.carried)
    return call.run(layer, hidden)


def _attention_name(layer: nn.Module) -> str:
    for name in ("self_attn", "linear_attn", "mixer", "mamba", "attention"):
        if hasattr(layer, name):
            return type(getattr(layer, name)).__name__
    return type(layer).__name__
