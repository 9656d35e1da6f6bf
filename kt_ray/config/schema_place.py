"""A part of the schema: which model (`model.*`), and the groups below `rule.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """Which checkpoint is trained.

    Attributes:
        name: a label for logs and run names; "custom" is replaced by the directory's name.
        path: Hugging Face directory with config.json, *.safetensors and a tokenizer; None = only
            a plan can be made from `config`, or (with `build`) the model is built locally.
        config: the released config.json, inline, so that `mode=plan` works without a checkpoint.
            Ignored when `path` holds a config.json.
        build: "demo_base" = the small pretrained model inside the package; "demo" or "mini" = build this
            small model from `seed` on first use, with random weights; ignored when `path` is given.
        seed: seed of a model with random weights.
        dtype: compute type of attention, norms, router and shared experts: "auto" takes the
            checkpoint's torch_dtype; "bfloat16"; "float32". Experts stay in the checkpoint's type.
        attn_implementation: "sdpa" or "eager", as transformers names them.
        tokenizer: directory of the tokenizer; None = `path`.
        chat_template: a Jinja chat template file overriding the tokenizer's own; None = the tokenizer's.
        experts_path: GGUF file (the first, where there are several) that the routed experts are read
            from instead of the checkpoint; None = the checkpoint's own. rule.experts.backend=llamafile
            needs it.
        keep_quantized: weights outside the experts stay FP8 or INT in memory, as the checkpoint has
            them, and are dequantised when used; false = once, when they are loaded.
    """

    name: str = "custom"
    path: str | None = None
    config: dict[str, Any] | None = None
    build: str | None = None
    seed: int = 0
    dtype: str = "auto"
    attn_implementation: str = "sdpa"
    tokenizer: str | None = None
    chat_template: str | None = None
    experts_path: str | None = None
    keep_quantized: bool = False


@dataclass(frozen=True)
class ExpertsRule:
    """Where the routed experts live and how they compute.

    Attributes:
        sockets: number of expert actors per host, one per NUMA socket; "auto" = every socket of the host.
        backend: "auto" = the checkpoint's own format; "AMXBF16" = likewise, in bf16 arithmetic; "AMXINT8"
            or "AMXINT4" = quantised while they stream in (int8 per row, int4 in groups of 128); or
            "llamafile" = GGUF (model.experts_path). The reference system's names.
        isa: "auto", "reference", "avx2", "avx512", "avx512_bf16" or "amx"; a forced one that the
            machine lacks is an error.
        threads: engine threads per expert actor; "auto" = the socket's physical cores.
        activations: "retain" keeps x, gate and up for backward; "recompute" keeps x only; "auto" =
            retain where a whole step fits, else the one whose step is simulated to be faster.
        placement: which experts a socket holds: "contiguous" (runs of expert ids), "balanced" (by observed
            load, per layer) or "auto" (balanced where a load is known, else contiguous).
        load: checkpoint directory whose histogram of tokens per expert tells the load; None = that of the
            checkpoint resumed from, if any.
        gpu_resident: experts of each MoE layer, the most used ones, that stay in GPU memory and are computed
            and trained there; 0 = none.
        stream: "off"; "auto" = where the plan says that it pays, part of each layer's experts is carried
            to the GPU for each large call and computed there; or that part as a share of the experts.
        lane_device: where resident and streamed experts are computed: "auto" (the first GPU), "cuda:i", or
            "cpu" (a stand-in with the same numerics).
    """

    sockets: int | str = "auto"
    backend: str = "auto"
    isa: str = "auto"
    threads: int | str = "auto"
    activations: str = "auto"
    placement: str = "auto"
    load: str | None = None
    gpu_resident: int = 0
    stream: float | str = "off"
    lane_device: str = "auto"


@dataclass(frozen=True)
class RayRule:
    """Ray resources that a rule asks for.

    Attributes:
        worker_cpus: CPUs each attention worker reserves ("auto" = its torch threads).
        expert_cpus: CPUs each expert actor reserves ("auto" = its engine threads).
        strategy: placement-group strategy: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
    """

    worker_cpus: float | str = "auto"
    expert_cpus: float | str = "auto"
    strategy: str = "PACK"
