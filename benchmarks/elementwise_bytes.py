"""Bytes that a decoder layer's attention side moves beside its products, and its kernels, counted.

    python benchmarks/elementwise_bytes.py CONFIG.json ... --json out.json

For each config.json one layer with experts is built at its released widths, with constant weights, and run
forward and backward on the CPU. Every operation but products, attention and views counts the bytes of its
inputs and outputs, as if no cache held any of them; expanded tensors count once. A norm that a GPU computes
in one kernel (kt_ray/model/fused_norms.py) counts as one. LoRA is not injected (kt_ray/model/lora_linear.py
counts its own), and attention and the routed experts answer at no cost. Beside the counts stand those by
which a plan predicts a GPU (kt_ray/timing/layer_work.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import add_common_arguments, machine, write_json
from kt_ray.checkpoint.non_experts import materialize_buffers
from kt_ray.config.schema import LoraConfig
from kt_ray.dims.config_json import dims_from_config
from kt_ray.hardware.rates import NORM_BYTES
from kt_ray.model import fused_norms
from kt_ray.model.build import StageModel, build_on_meta
from kt_ray.model.layer_calls import is_experts
from kt_ray.model.layer_checks import check_family
from kt_ray.model.stage_spec import StageSpec
from kt_ray.timing.layer_work import NORM_PASSES, LayerWork

TOKENS = 512
LAYER = 1
VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "transpose",
        "t",
        "slice",
        "split",
        "split_with_sizes",
        "expand",
        "unsqueeze",
        "squeeze",
        "permute",
        "select",
        "detach",
        "alias",
        "as_strided",
        "unbind",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
    ]
)
PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm"))


class Counted(TorchDispatchMode):
    """Bytes that operations read and write, and kernels: of products, too."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        self.kernels += name not in VIEWS
        if name not in VIEWS | PRODUCTS:
            self.bytes += sum(_size(t) for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
        return out


class _Norm(torch.autograd.Function):
    """A norm in one kernel, forward and backward: of what it reads and writes, all as wide as x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.clone(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] + torch.empty_like(grads[0])  # the other is x


class _Free(torch.autograd.Function):
    """An answer of the shape of `like`, and gradients for all, at no bytes: attention, and the experts."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(like, *others)
        return torch.empty_like(like)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors)


def counted(config: Mapping[str, Any], tokens: int = TOKENS) -> tuple[Counted, Counted]:
    """Bytes and kernels of a layer of this model, forward and backward."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model = build_on_meta(StageSpec(folder, (0, 2), 2, dtype="bfloat16"))
    _fill(model)
    fused_norms.fuse_norms(model.layers.values())
    check_family(model.capture, True, True, model.hidden_size, "cpu")
    call = model.capture.record({"input_ids": torch.zeros(1, tokens, dtype=torch.int64)}, None)[LAYER]
    hidden = torch.randn(1, tokens, model.hidden_size).bfloat16().requires_grad_()
    forward, backward = Counted(), Counted()
    with _one_kernel(), model.experts[LAYER].handled_by(lambda x, ids, w: _Free.apply(x, w)):
        with forward:
            out = call.run(model.layers[LAYER], hidden)
        with backward:
            torch.autograd.backward(out, torch.ones_like(out))
    return forward, backward


def predicted(config: Mapping[str, Any], tokens: int = TOKENS) -> tuple[tuple[float, float], ...]:
    """Bytes and kernels by which a plan predicts the same layer on a GPU, forward and backward."""
    dims = dims_from_config({**config}, "model")
    work = LayerWork(dims, LAYER, LoraConfig(target_modules="none"), "bfloat16", gpu=True)
    first, rest = work.forward(1, tokens)
    both = (first.plus(rest), work.backward(1, tokens))
    return tuple(
        (c.normed * size + c.passes * NORM_BYTES[0] / NORM_PASSES, c.operations)
        for c, size in zip(both, NORM_BYTES, strict=True)
    )


def shortened(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model of two layers, both with experts, and few words."""
    small = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    text = small["text_config"] = {**small["text_config"]} if "text_config" in small else small
    if text is small:
        del small["text_config"]
    text |= {
        "num_hidden_layers": 2,
        "vocab_size": 256,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if "first_k_dense_replace" in text:
        text["first_k_dense_replace"] = 0
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:2]
    return small


def _fill(model: StageModel) -> None:
    """Constant values for all but the routed experts."""
    for module in model.causal.modules():
        if is_experts(module):
            for name in list(module._parameters):
                module.register_parameter(name, None)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                value = torch.full(parameter.shape, 0.01, dtype=parameter.dtype)
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    materialize_buffers(model.causal, "cpu")


@contextmanager
def _one_kernel() -> Iterator[None]:
    """Attention and norms as a GPU has them."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *masks: Any, **how: Any) -> Tensor:
        # Its own layout: heads of a token lie together.
        like = torch.empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1], dtype=q.dtype).transpose(1, 2)
        out: Tensor = _Free.apply(like, q, k, v)
        return out

    with (
        mock.patch.object(nn.functional, "scaled_dot_product_attention", attention),
        mock.patch.object(nn.functional, "rms_norm", lambda x, *rest: _Norm.apply(x)),
        mock.patch.object(fused_norms, "takes_kernel", lambda x: True),
    ):
        yield


def _size(tensor: Tensor) -> int:
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="+", type=Path)
    add_common_arguments(parser)
    args = parser.parse_args()
    records = []
    for path in args.configs:
        config = shortened(json.loads(path.read_text()))
        record: dict[str, Any] = {"model": path.stem}
        both = zip(("forward", "backward"), counted(config), predicted(config), strict=True)
        for way, found, (size, kernels) in both:
            record[way] = {"bytes": found.bytes / TOKENS, "plan_bytes": size / TOKENS}
            record[way] |= {"kernels": found.kernels, "plan_kernels": kernels}
            print(
                f"{path.stem:28} {way:8} {found.bytes / TOKENS / 1e3:6.0f} KB per token, plan "
                f"{size / TOKENS / 1e3:6.0f}; {found.kernels:4} kernels, plan {kernels:4.0f}",
                flush=True,
            )
        records.append(record)
    if args.json:
        write_json(args.json, records, machine())


if __name__ == "__main__":
    main()
