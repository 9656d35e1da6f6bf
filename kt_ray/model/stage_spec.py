"""What a stage is built from. No torch: the driver makes these."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kt_ray.config.schema import LoraConfig
from kt_ray.dims.model_dims import Handed
from kt_ray.placement.plan_types import ALL_LAYERS, BackwardPart


@dataclass(frozen=True)
class StartAdapter:
    """The adapter that a run starts from (lora.adapter)."""

    directory: str
    digest: str  # of its weights: `AdapterReader.digest`
    initial: bool = True  # whether LoRA begins with it; False = a checkpoint has what came of it
    reference: bool = False  # whether a copy is kept: the reference of a preference loss

    @property
    def is_read(self) -> bool:
        """Whether actors need the file."""
        return self.initial or self.reference


@dataclass(frozen=True)
class StageSpec:
    """What one stage of a model is."""

    model_dir: str  # Hugging Face directory with config.json and safetensors
    layers: tuple[int, int]  # own decoder layers, half-open range (start, stop)
    num_layers: int  # decoder layers of the whole model
    device: str = "cpu"  # "cpu" or "cuda:0"
    # "auto" (the checkpoint's), "float32" or "bfloat16": attention, norms, shared experts
    dtype: str = "auto"
    attn_implementation: str = "sdpa"  # "sdpa" or "eager"
    seed: int = 0  # of LoRA's initialisation
    lora: LoraConfig = field(default_factory=LoraConfig)  # rank, targets, dropout
    # rows of logits per cross-entropy chunk; "auto" or 0 (never), see TrainerConfig
    loss_chunk: int | str = "auto"
    # quantised weights outside the experts stay as stored, dequantised at each use
    keep_quantized: bool = False
    fingerprint: str = ""  # of the weights in `model_dir` (`CheckpointIndex.fingerprint`); "" = any
    activations: str = "group"  # rule.activations, without "auto"
    attention_output: str = "recompute"  # rule.attention_output, likewise
    head_ranges: int = 0  # ranges of heads that attention goes by, with activations = "ranges"
    waiting: int = 0  # bytes that the plan has for hidden states in host memory
    handed: tuple[Handed, ...] = ()  # what layers hand to later ones beside the hidden state, as planned
    streamed: tuple[int, ...] = ()  # layers whose weights wait in host memory (rule.resident_layers)
    slots: int = 0  # places for them on the device
    embedding_on_host: bool = False  # whether the embedding waits there, too, and tokens are looked up there
    # path and name of a file in memory for those weights, which replicas share; None = their own memory
    weights_file: tuple[str, str] | None = None
    backward: BackwardPart = ALL_LAYERS  # of the whole model
    absorbs_keys: bool = True  # generation: whether latent keys stay as cached (latent_keys.py)
    padded: bool = False  # whether micro-batches may hold padding after their rows
    start: StartAdapter | None = None  # what LoRA starts from; None = `lora.init`

    def of_layer(self, layer: int) -> StageSpec:
        """One layer of the same model on the same device, whole and nothing of it streamed."""
        whole = {
            "streamed": (),
            "slots": 0,
            "weights_file": None,
            "embedding_on_host": False,
            "head_ranges": 0,
        }
        if self.activations == "ranges":
            whole["activations"] = "group"
        return replace(self, layers=(layer, layer + 1), **whole)  # type: ignore[arg-type]

    @property
    def first(self) -> bool:
        return self.layers[0] == 0

    @property
    def last(self) -> bool:
        return self.layers[1] == self.num_layers
