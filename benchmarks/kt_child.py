"""KTransformers' expert layer in a process of its own, on its own environment (kt_venv.py).

    <kt venv>/bin/python kt_child.py '{"case": {...}}'

Uses kt_kernel's public wrapper as its trainer does: forward with the activations kept, then the transposed
copy of the weights that its backward multiplies with, then backward. In training that copy is made anew
for every layer in every step, because all layers share one buffer; it is counted as part of backward here
and reported as repack_ms besides. FP8 does it inside its backward, MXFP4 and INT4 need none.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from child import Message, serve_built
from layer_inputs import Case, Stored, make_inputs, make_weights

METHODS = {
    "bf16": "AMXBF16_SFT",
    "fp8": "AMXFP8_SFT",
    "mxfp4": "MXFP4_SFT",
    "int8": "INT8_SFT",
    "int4": "RAWINT4_SFT",
}
SHARED = ("bf16", "fp8", "int8")  # layers share the buffer of transposed weights, as its trainer configures
REPACKS = ("bf16", "int8")  # it is filled before backward; FP8 does so inside, the others need none


class Layer:
    """One layer and its inputs."""

    def __init__(self, case: Case) -> None:
        import kt_kernel

        torch.set_num_threads(case.threads)
        self.case, self.inputs = case, make_inputs(case)
        self.variant = kt_kernel.__cpu_variant__
        with tempfile.TemporaryDirectory(prefix="kt_ray_kt_") as folder:
            if case.format == "int8":
                self._write_int8(folder)
            self.layer: Any = self._wrapper(METHODS[case.format], mode="sft", weight_path=folder)
            self._load()
        lora = [torch.nn.Parameter(t.to(torch.bfloat16)) for t in self.inputs.lora or []]
        self.layer.init_lora_weights(*lora, *[torch.zeros_like(t.data) for t in lora])
        self.dy = self.inputs.dy.to(torch.bfloat16)

    def _wrapper(self, method: str, **more: Any) -> Any:
        from kt_kernel import KTMoEWrapper

        h, i, e, k = self.case.dims
        sft = more["mode"] == "sft"
        if sft:
            more |= {
                "num_gpu_experts": 0,
                "lora_rank": self.case.rank,
                "lora_alpha": float(self.case.rank),
                "group_size": 32 if method in ("MXFP4_SFT", "RAWINT4_SFT") else 128,
                "zero_point": method not in ("MXFP4_SFT", "RAWINT4_SFT"),
                "swiglu_limit": 1e4 if method == "MXFP4_SFT" else 0.0,  # it wants one; this clamps nothing
            }
        wrapper = KTMoEWrapper(
            layer_idx=0,
            num_experts=e,
            num_experts_per_tok=k,
            hidden_size=h,
            moe_intermediate_size=i,
            gpu_experts_mask=None,
            cpuinfer_threads=self.case.threads,
            threadpool_count=1,
            chunked_prefill_size=max(self.case.tokens, 32),
            method=method,
            **more,
        )
        if sft:
            wrapper.share_backward_bb = self.case.format in SHARED
            wrapper.share_cache_pool = False
        return wrapper

    def _write_int8(self, folder: str) -> None:
        """It reads INT8 only from files that its inference side wrote."""
        tensors = [stored.data for stored in make_weights(replace(self.case, format="bf16"))]
        zeros = torch.zeros
        # Its constructor wants pinned memory, which a machine without an accelerator has not.
        with mock.patch.object(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k)):
            writer = self._wrapper("AMXINT8", mode="inference", weight_path=folder, cpu_save=True)
        writer.load_weights_from_tensors(*tensors, torch.arange(self.case.experts))

    def _load(self) -> None:
        order = torch.arange(self.case.experts)
        if self.case.format == "int8":
            self.layer.load_weights(order)
            return
        weights = make_weights(self.case)
        if self.case.format == "bf16":
            self.layer.load_weights_from_tensors(*[stored.data for stored in weights], order)
            return
        from kt_kernel.sft import BlockFP8ExpertWeights, RAWINT4ExpertWeights

        flat: dict[str, torch.Tensor] = {}
        for stored, projection in zip(weights, ("gate", "up", "down"), strict=True):
            flat |= self._named(stored, projection)
        if self.case.format == "mxfp4":
            experts = {name.replace("_proj", ""): list(value) for name, value in flat.items()}
            self.layer.load_mxfp4_weights(experts, order)
        elif self.case.format == "fp8":
            lists: Any = {name: list(value) for name, value in flat.items()}
            self.layer.load_block_fp8_weights(BlockFP8ExpertWeights(**lists), order)
        else:
            self.layer.load_rawint4_weights(RAWINT4ExpertWeights(**flat), order)

    def _named(self, stored: Stored, projection: str) -> dict[str, torch.Tensor]:
        """The tensors under its names and in its types; both copies are freed after loading."""
        data, scales = stored.data, stored.scales
        assert scales is not None
        if self.case.format == "int4":
            data = data.view(torch.uint8)
        if self.case.format == "mxfp4":
            scales = torch.exp2(scales.float() - 127).to(torch.bfloat16)
        return {f"{projection}_proj": data, f"{projection}_scale": scales}

    def __call__(self, question: Message) -> Message:
        """Measure; it keeps one forward at a time, so each is followed by its backward."""
        repacks = self.case.format in REPACKS
        total = {"forward_ms": 0.0, "backward_ms": 0.0, "repack_ms": 0.0}
        layer, x = self.layer, self.inputs.x
        for ids, router in self.inputs.routings:
            begin = time.perf_counter()
            layer.forward(x, ids, router, save_for_backward=True)
            forward = time.perf_counter()
            if repacks:
                layer.submit_backward_repack()
                layer.wait_backward_repack()
            repack = time.perf_counter()
            layer.backward(self.dy)
            end = time.perf_counter()
            layer.release_authoritative_optimizer_grads()
            seconds = (forward - begin, end - forward, repack - forward)
            for key, value in zip(total, seconds, strict=True):
                total[key] += value * 1e3 / self.case.calls
        note = f"{self.variant}; adapters bfloat16"
        if not repacks:
            del total["repack_ms"]
            return {**total, "note": note}
        return {**total, "note": f"{note}; transpose repack counted in backward"}


def main() -> None:
    asked = json.loads(sys.argv[1])
    serve_built(lambda: Layer(Case(**asked["case"])))


if __name__ == "__main__":
    main()
