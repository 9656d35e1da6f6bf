"""What a stage is built from. No torch: the driver makes these."""

from __future__ import annotations

from dataclasses import dataclass, field

from kt_ray.config.schema import LoraConfig


@dataclass(frozen=True)
class StageSpec:
    """What one stage of a model is.

    Attributes:
        model_dir: Hugging Face directory with config.json and safetensors.
        layers: own decoder layers, half-open range (start, stop).
        num_layers: decoder layers of the whole model.
        device: "cpu" or "cuda:0".
        dtype: "auto" (the checkpoint's), "float32" or "bfloat16": attention, norms, shared experts.
        attn_implementation: "sdpa" or "eager".
        seed: of LoRA's initialisation.
        lora: rank, targets, dropout.
        loss_chunk: rows of logits per cross-entropy chunk; "auto" or 0 (never), see TrainerConfig.
        keep_quantized: quantised weights outside the experts stay as stored, dequantised at each use.
    """

    model_dir: str
    layers: tuple[int, int]
    num_layers: int
    device: str = "cpu"
    dtype: str = "auto"
    attn_implementation: str = "sdpa"
    seed: int = 0
    lora: LoraConfig = field(default_factory=LoraConfig)
    loss_chunk: int | str = "auto"
    keep_quantized: bool = False

    @property
    def first(self) -> bool:
        return self.layers[0] == 0

    @property
    def last(self) -> bool:
        return self.layers[1] == self.num_layers
