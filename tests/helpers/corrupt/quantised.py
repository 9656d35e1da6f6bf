"""Quantised weights whose parts do not fit, and formats that are not read."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.corrupt.case import Case
from tests.helpers.corrupt.folder import Folder, Tensors

EXPERT = "model.layers.1.mlp.experts.2.up_proj"
STACK = "model.layers.1.mlp.experts"
ROTATED = {
    "transform_config": {
        "config_groups": {
            "R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]},
            "R3": {"type": "hadamard", "apply": [{"targets": ["re:.*attn$"], "location": "q_attn"}]},
        }
    }
}
_FIT = "do not fit together"


def _foreign(*suffixes: str) -> Any:
    """Replace an expert's weight by tensors of other formats."""

    def change(tensors: Tensors) -> None:
        del tensors[f"{EXPERT}.weight"]
        for suffix in suffixes:
            tensors[EXPERT + suffix] = torch.zeros(8, 4, dtype=torch.int32)

    return lambda folder: folder.weights(change)


def _beside(name: str, value: torch.Tensor) -> Any:
    return lambda folder: folder.weights(lambda tensors: tensors.update({name: value}))


def _groups(folder: Folder) -> None:
    """The layer's scales as for groups of 16, which the engine does not compute."""
    folder.tensor(f"{EXPERT}.weight_scale", lambda t: t.repeat_interleave(2, 1))


def _other_shapes(tensors: Tensors) -> None:
    stated = [n for n in tensors if n.endswith("weight_shape")]
    tensors.update({n: torch.tensor([64, 128], dtype=torch.int32) for n in stated})


QUANTISED: list[Case] = [
    Case(
        "fp8 scale missing",
        "fp8",
        lambda f: f.weights(lambda t: t.pop(f"{EXPERT}.weight_scale_inv")),
        [_FIT, f"{EXPERT}.weight", "F8_E4M3 without scales"],
    ),
    Case(
        "fp8 scale of another shape",
        "fp8",
        lambda f: f.tensor(f"{EXPERT}.weight_scale_inv", lambda t: torch.ones(3, 5)),
        [_FIT, f"{EXPERT}.weight [32, 64] with {EXPERT}.weight_scale_inv [3, 5]"],
    ),
    Case(
        "fp8 scale without weight",
        "fp8",
        lambda f: f.weights(lambda t: t.pop(f"{EXPERT}.weight")),
        [_FIT, f"{EXPERT}.weight_scale_inv (no weight)"],
    ),
    Case(
        "fp8 blocks of another size by config",
        "fp8",
        lambda f: f.config(quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]}),
        [_FIT, "in all"],
    ),
    Case(
        "fp8 expert beside bf16 ones",
        "bf16",
        lambda f: f.weights(
            lambda t: t.update(
                {
                    f"{EXPERT}.weight": t[f"{EXPERT}.weight"].to(torch.float8_e4m3fn),
                    f"{EXPERT}.weight_scale_inv": torch.ones(1, 1),
                }
            )
        ),
        ["mixed types", f"{EXPERT}.weight", "7 of BF16, 1 of F8_E4M3"],
    ),
    Case(
        "fp8 attention scale missing",
        "fp8",
        lambda f: f.weights(lambda t: t.pop("model.layers.2.self_attn.o_proj.weight_scale_inv")),
        [_FIT, "model.layers.2.self_attn.o_proj.weight"],
    ),
    Case(
        "fp8 of the other kind",
        "fp8",
        lambda f: f.tensor(f"{EXPERT}.weight", lambda t: t.float().to(torch.float8_e5m2)),
        [f"{EXPERT}.weight", "F8_E5M2"],
    ),
    Case(
        "int4 scale missing",
        "int4",
        lambda f: f.weights(lambda t: t.pop(f"{EXPERT}.weight_scale")),
        [_FIT, f"{EXPERT}.weight_packed", "I32 without scales"],
    ),
    Case(
        "int4 weight_shape of another model",
        "int4",
        lambda f: f.weights(_other_shapes),
        ["shape stated beside them", ".weight_shape", "found [64, 128]", "required [64, 32]"],
    ),
    Case("int4 groups of 16", "int4", _groups, ["format cannot be read", EXPERT, "groups of 16"]),
    Case(
        "int4 zero points",
        "int4",
        _beside(f"{EXPERT}.weight_zero_point", torch.zeros(32, 2, dtype=torch.int8)),
        ["mixed types", EXPERT, "with zero points"],
    ),
    Case(
        "int4 in an order of its own",
        "int4",
        _beside(f"{EXPERT}.weight_g_idx", torch.zeros(64, dtype=torch.int32)),
        ["actorder", f"{EXPERT}.weight_g_idx"],
    ),
    Case("GPTQ", "bf16", _foreign(".qweight", ".qzeros", ".scales", ".g_idx"), ["GPTQ", f"{EXPERT}.qweight"]),
    Case(
        "rotated",
        "int4",
        lambda f: f.config(quantization_config=ROTATED | {"quant_method": "compressed-tensors"}),
        ["rotations left to the model's code (q_attn)"],
    ),
    Case("NVFP4", "int4", _beside(f"{EXPERT}.weight_global_scale", torch.ones(1)), ["NVFP4", EXPERT]),
    Case(
        "bitsandbytes",
        "bf16",
        _beside(f"{EXPERT}.weight.absmax", torch.ones(8)),
        ["bitsandbytes", f"{EXPERT}.weight.absmax"],
    ),
    *(
        Case(what, "bf16", _beside(EXPERT + end, torch.ones(8, dtype=torch.int8)), [what, EXPERT + end])
        for what, end in (("HQQ", ".W_q"), ("quanto", ".weight._data"), ("torchao", "._weight_qdata"))
    ),
    Case(
        "Quark's MXFP6",
        "fp8",
        lambda f: f.weights(
            lambda t: t.update(
                {
                    f"{EXPERT}.weight": torch.ones(32, 48).byte(),
                    f"{EXPERT}.weight_scale": torch.ones(32, 2).byte(),
                }
            )
        ),
        ["Quark's MXFP6", f"{EXPERT}.weight"],
    ),
    Case(
        "mxfp4 scales missing",
        "mxfp4",
        lambda f: f.weights(lambda t: t.pop(f"{STACK}.gate_up_proj_scales")),
        [_FIT, f"{STACK}.gate_up_proj_blocks", "without scales"],
    ),
    Case(
        "mxfp4 blocks missing",
        "mxfp4",
        lambda f: f.weights(lambda t: t.pop(f"{STACK}.gate_up_proj_blocks")),
        [f"{STACK}.gate_up_proj_scales"],
    ),
    Case(
        "mxfp4 scales of another shape",
        "mxfp4",
        lambda f: f.tensor(f"{STACK}.gate_up_proj_scales", lambda t: t[..., :1]),
        [_FIT, f"{STACK}.gate_up_proj_scales [8, 64, 1]"],
    ),
    Case(
        "mxfp4 fewer experts in the blocks",
        "mxfp4",
        lambda f: f.tensor(f"{STACK}.down_proj_blocks", lambda t: t[:7]),
        [_FIT, f"{STACK}.down_proj_blocks [7, 64, 1, 16]"],
    ),
    Case(
        "mxfp4 bias of another shape",
        "mxfp4",
        lambda f: f.tensor(f"{STACK}.gate_up_proj_bias", lambda t: t[:, :-1]),
        ["mixed shapes", f"{STACK}.gate_up_proj_bias", "found [8, 63]", "required [8, 64]"],
    ),
    Case(
        "mxfp4 bias missing",
        "mxfp4",
        lambda f: f.weights(lambda t: t.pop(f"{STACK}.down_proj_bias")),
        ["lacks experts", f"missing: {STACK}.down_proj_bias"],
    ),
]
