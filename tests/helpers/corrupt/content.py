"""Damage that no header shows: zeros of interrupted downloads, values that are not finite."""

from __future__ import annotations

import os

import torch

from tests.helpers.corrupt.case import Case
from tests.helpers.corrupt.folder import Folder

FIRST = "model-00001-of-00002.safetensors"


def _zeros(folder: Folder) -> None:
    """The header arrived, the rest did not; zeros written out, as a copy of a sparse file has them."""
    raw = folder.shard().read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    folder.shard().write_bytes(raw[:end] + bytes(len(raw) - end))


def _hole(folder: Folder) -> None:
    """Two thirds arrived."""
    size = folder.shard().stat().st_size
    os.truncate(folder.shard(), size * 2 // 3)
    os.truncate(folder.shard(), size)


def _infinite(scales: torch.Tensor) -> torch.Tensor:
    scales = scales.clone()
    scales.view(-1)[0] = float("inf")
    return scales


def _last_infinite(values: torch.Tensor) -> torch.Tensor:
    return torch.cat((values[:-1], torch.full_like(values[-1:], float("inf"))))


def _every_scale(folder: Folder, value: float) -> None:
    folder.weights(
        lambda t: t.update({n: torch.full_like(s, value) for n, s in t.items() if n.endswith("_scale_inv")})
    )


CONTENT: list[Case] = [
    Case("shard of zeros", "bf16", _zeros, ["zeros instead of weights", f"{{model}}/{FIRST}"]),
    Case("shard with a hole", "bf16", _hole, ["has holes", f"{{model}}/{FIRST}", "never written"]),
    Case(
        "weights not a number",
        "bf16",
        lambda f: f.weights(
            lambda t: t.update({n: v * float("nan") for n, v in t.items() if ".experts." in n})
        ),
        ["weights are not finite", "tensor model.layers"],
    ),
    Case(
        "a router's correction not a number",
        "bf16",
        lambda f: f.tensor("model.layers.2.mlp.gate.e_score_correction_bias", lambda t: t * float("nan")),
        ["weights are not finite", "tensor model.layers.2.mlp.gate.e_score_correction_bias"],
    ),
    Case(
        "the last value of a norm infinite",
        "bf16",
        lambda f: f.tensor("model.norm.weight", _last_infinite),
        ["weights are not finite", "tensor model.norm.weight", "1 of 64"],
    ),
    Case(
        "attention stored as integers",
        "bf16",
        lambda f: f.tensor("model.layers.1.self_attn.o_proj.weight", lambda t: (t * 100).to(torch.int16)),
        ["stored as integers without scales", "model.layers.1.self_attn.o_proj.weight", "I16"],
    ),
    Case(
        "a norm stored as truth values",
        "bf16",
        lambda f: f.tensor("model.norm.weight", lambda t: t > 0),
        ["stored as integers without scales", "model.norm.weight", "BOOL"],
    ),
    Case(
        "config with fewer layers",
        "fused",
        lambda f: f.config(num_hidden_layers=f.read_config()["num_hidden_layers"] - 1),
        ["fewer layers than the checkpoint", "num_hidden_layers"],
    ),
    Case(
        "config with an unknown kind of rotary embedding",
        "fused",
        lambda f: f.config(rope_parameters={"rope_type": "nonsense", "rope_theta": 1e4}),
        ["nonsense", "To fix: correct config.json"],
    ),
    Case(
        "scales infinite",
        "fp8",
        lambda f: _every_scale(f, float("inf")),
        ["scales of quantised weights are not finite", "weight_scale_inv", "fp8"],
    ),
    Case(
        "scales zero",
        "fp8",
        lambda f: _every_scale(f, 0.0),
        ["scales of quantised weights are zero", "weight_scale_inv"],
    ),
    Case(
        "int4 scales not a number",
        "int4",
        lambda f: f.weights(
            lambda t: t.update({n: _infinite(s) for n, s in t.items() if n.endswith("weight_scale")})
        ),
        ["scales of quantised weights are not finite", "weight_scale", "int4"],
    ),
    Case(
        "mxfp4 scales not a number",
        "mxfp4",
        lambda f: f.weights(
            lambda t: t.update({n: torch.full_like(s, 255) for n, s in t.items() if n.endswith("_scales")})
        ),
        ["scales of quantised weights are not finite", "_scales", "mxfp4"],
    ),
]
