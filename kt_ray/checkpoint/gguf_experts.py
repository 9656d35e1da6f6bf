"""Routed experts from a GGUF file; everything else comes from the Hugging Face directory beside it.

llama.cpp stacks the experts of a layer (names.py) and, where they have biases, those. A row is a row of
blocks in the engine's own format, and experts follow each other, so they are read straight into place.
Types may differ from tensor to tensor and from layer to layer, as llama-quantize mixes them. The engine
does not compute with float16, so it is rounded to bfloat16 on load: exact for a model that was released in
bfloat16, a loss of three bits for others.

Legend: E experts, I intermediate size of one expert, H hidden size; n is the number of experts asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kt_ray.checkpoint.check_experts import check_float32, first_of_each, part_shapes
from kt_ray.checkpoint.content import check_stacks
from kt_ray.checkpoint.expert_layout import ExpertLayout
from kt_ray.checkpoint.gguf_file import GgufHeader, open_gguf
from kt_ray.checkpoint.index import CheckpointIndex, joined_digest, some, tensors_digest
from kt_ray.checkpoint.load_experts import ReadJob, as_weights, check_experts_exist, run_jobs
from kt_ray.checkpoint.names import gguf_expert_name, is_old_gguf_expert
from kt_ray.checkpoint.safetensors_file import TensorInfo, damaged
from kt_ray.native import ExpertFormula, ExpertMatrix, ExpertWeights, allocate
from kt_ray.native.matrix import GGUF_BLOCKS

_PLAIN = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_HELD = {"F16": "bf16"}  # types that become another format of the engine
_SUPPORTED = (*_PLAIN, *(name.upper() for name in GGUF_BLOCKS))
_READ_BYTES = 4 << 20  # neighbouring experts are read at once up to this size, larger ones one by one
_SAME = "choose the GGUF file that was made from this model, or set model.experts_path=null"
_QUANTISE = "choose a file in one of these types, or make one: llama-quantize MODEL.gguf OUT.gguf Q4_K_M"

# Families (model_type, without "_text") whose architecture in llama.cpp is known; the others are told
# apart by their sizes alone.
ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
    "glm_moe_dsa": "glm-dsa",
    "gpt_oss": "gpt-oss",
    "granitemoe": "granitemoe",
    "kimi_k2": "deepseek2",
    "minimax_m2": "minimax-m2",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "phimoe": "phimoe",
    "qwen2_moe": "qwen2moe",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_vl_moe": "qwen3vlmoe",
}


@dataclass(frozen=True)
class GgufExperts:
    """The routed experts of a GGUF file, checked against the Hugging Face directory."""

    header: GgufHeader  # the file, or the split set
    # names, layers and sizes as in the directory; `formats` and `expert_bytes` as in the file
    layout: ExpertLayout
    # layer -> part ("gate", "up", "down", "gate_up", each also with "_bias") -> tensor
    stacks: dict[int, dict[str, TensorInfo]] = field(repr=False)
    # experts of layers beyond the model's (multi-token prediction), never loaded
    skipped: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def open(cls, path: str | Path, index: CheckpointIndex, layout: ExpertLayout) -> GgufExperts:
        """Find and check the experts, from the headers alone.

        Args:
            path: a GGUF file, any file of a split set, or a directory that holds one model.
            index: the Hugging Face directory; layout: its expert layout, which has the same experts.

        Raises:
            UserError: a damaged or incomplete file; another architecture, other layers or sizes; types
                that the engine does not compute; float32 beside other types.
        """
        header = open_gguf(path)
        _check_architecture(header, index)
        stacks, skipped = _find(header, index, layout)
        for layer, parts in stacks.items():
            _check_parts(header, layout, layer, parts)
        formats = {
            layer: {
                p: _HELD.get(t.dtype, t.dtype.lower()) for p, t in parts.items() if not p.endswith("_bias")
            }
            for layer, parts in stacks.items()
        }
        check_float32(
            first_of_each(formats, _name), header.path, "F32 for all experts, or for none", _QUANTISE
        )
        sizes = {
            layer: sum(tensor.nbytes for tensor in parts.values()) // layout.num_experts
            for layer, parts in stacks.items()
        }
        own = dataclasses.replace(layout, formats=formats, expert_bytes=sizes, interleaved=False)
        return cls(header, own, stacks, skipped)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is passed over or rounded, one line each."""
        notes = []
        if self.skipped:
            beyond = some([*self.skipped], 3)
            notes.append(f"experts in the GGUF file beyond the model's layers, not read: {beyond}")
        rounded = [t.name for part, t in self._tensors() if t.dtype == "F16" and not part.endswith("_bias")]
        if rounded:
            notes.append(f"float16 experts of the GGUF file are held as bfloat16: {some(rounded, 3)}")
        return tuple(notes)

    @property
    def fingerprint(self) -> str:
        """Names, types, shapes and sampled bytes of the experts, hashed: the same whatever the splitting."""
        return tensors_digest([tensor for _, tensor in self._tensors()])

    def fingerprint_with(self, index: CheckpointIndex) -> str:
        """Of a model whose experts are these and whose other weights are in `index`."""
        return joined_digest(index.fingerprint, self.fingerprint)

    def check_content(self) -> None:
        """Sample every stack. Raises UserError: as `check_stacks`."""
        check_stacks(tensor for part, tensor in self._tensors() if not part.endswith("_bias"))

    def _tensors(self) -> Iterator[tuple[str, TensorInfo]]:
        for layer in sorted(self.stacks):
            yield from sorted(self.stacks[layer].items())

    def load(
        self,
        layer: int,
        experts: Sequence[int],
        *,
        formula: ExpertFormula | None = None,
        threads: int = 1,
        drop_cache: bool = False,
    ) -> ExpertWeights:
        """As `load_experts`: weights of n experts in the file's types, float16 as bfloat16."""
        check_experts_exist(self.layout, layer, experts)
        jobs: list[ReadJob] = []
        parts = {
            part: _place(tensor, experts, jobs, is_bias=part.endswith("_bias"))
            for part, tensor in self.stacks[layer].items()
        }
        run_jobs(jobs, threads, drop_cache)
        return as_weights(parts, self.layout, formula, layer, experts)


# -- checks ----------------------------------------------------------------------------------

_another = functools.partial(damaged, remedy=_SAME)


def _check_architecture(header: GgufHeader, index: CheckpointIndex) -> None:
    family = str(index.text_config.get("model_type", ""))
    required = ARCHITECTURES.get(family.removesuffix("_text"))
    if required is not None and header.architecture != required:
        observed = f"general.architecture {header.architecture or 'missing'}"
        required = f"{required}, as of {family} ({index.path / 'config.json'})"
        raise _another("GGUF file holds a model of another architecture", header.path, observed, required)


def _find(
    header: GgufHeader, index: CheckpointIndex, layout: ExpertLayout
) -> tuple[dict[int, dict[str, TensorInfo]], tuple[str, ...]]:
    """The experts' tensors by layer and part, and those of layers beyond the model's."""
    count = index.layer_count
    layers = max(layout.moe_layers) + 1 if count is None else count
    stacks: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
    skipped: list[str] = []
    for name, tensor in header.tensors.items():
        try:
            parts = gguf_expert_name(name)
        except ValueError as error:
            what = "GGUF file holds a tensor of the experts that is not known"
            required = "ffn_{gate,up,down,gate_up}_exps with .weight or .bias"
            raise _another(what, tensor.place, tensor.dtype, required) from error
        if parts is None or parts.layer is None:
            continue
        if parts.layer >= layers:
            skipped.append(name)
        else:
            stacks[parts.layer][parts.role + ("_bias" if parts.bias else "")] = tensor
    if not stacks:
        what, remedy = "GGUF file has no routed experts", _SAME
        observed = f"architecture {header.architecture}, {len(header.tensors)} tensors"
        single = next(filter(is_old_gguf_expert, header.tensors), None)
        if single is not None:
            what, remedy = (
                "GGUF file has an old form of experts",
                "convert the model again with a current llama.cpp",
            )
            observed = f"a tensor for each expert ({single})"
        raise damaged(what, header.path, observed, "tensors blk.N.ffn_{gate,up,down}_exps.weight", remedy)
    promised, own = set(layout.moe_layers), set(stacks)
    if promised != own:
        raise _another(
            "GGUF file and Hugging Face directory disagree about the layers that have routed experts",
            header.path,
            f"without: {sorted(promised - own)}; unexpected: {sorted(own - promised)}",
            f"{len(promised)} layers, as in {index.path}",
        )
    return {layer: stacks[layer] for layer in layout.moe_layers}, tuple(sorted(skipped))


def _check_parts(header: GgufHeader, layout: ExpertLayout, layer: int, parts: dict[str, TensorInfo]) -> None:
    """All tensors of a layer and none else, their shapes and types."""
    shapes = part_shapes(layout.hidden, layout.intermediate, False, layout.num_experts)
    if layout.gated:
        required = ["gate_up", "down"] if "gate_up" in parts else ["gate", "up", "down"]
    else:
        required = ["up", "down"]
    if layout.biased:
        required += [f"{part}_bias" for part in required]
    missing, extra = sorted(set(required) - set(parts)), sorted(set(parts) - set(required))
    if missing or extra:
        observed = some([_name(layer, part) for part in missing or extra])
        raise _another(
            f"GGUF file {'lacks tensors of the experts' if missing else 'has too many tensors of experts'}",
            f"{header.path}, layer {layer}",
            f"{'missing' if missing else 'unexpected'}: {observed}",
            ", ".join(_name(layer, part) for part in required),
        )
    for part, tensor in parts.items():
        weight = part.removesuffix("_bias")
        shape: tuple[int, ...] = shapes[weight] if part == weight else shapes[weight][:2]
        if tensor.shape != shape:
            what = "GGUF file and Hugging Face directory disagree about the sizes of the experts"
            expected = f"{list(shape)} (experts, outputs, inputs)"
            raise _another(what, tensor.place, list(tensor.shape), expected)
        supported = _SUPPORTED if part == weight else tuple(_PLAIN)
        if tensor.dtype not in supported:
            what = "experts are in a GGUF type that is not computed"
            raise damaged(what, tensor.place, tensor.dtype, ", ".join(supported), _QUANTISE)


def _name(layer: int, part: str) -> str:
    weight = part.removesuffix("_bias")
    return f"blk.{layer}.ffn_{weight}_exps.{'weight' if part == weight else 'bias'}"


# -- reading ---------------------------------------------------------------------------------


def _place(
    tensor: TensorInfo, experts: Sequence[int], jobs: list[ReadJob], *, is_bias: bool
) -> Tensor | ExpertMatrix:
    """Memory for experts of a stack, and the jobs that fill it; biases keep their type."""
    count, *shape = tensor.shape
    size = tensor.nbytes // count
    stored = _PLAIN.get(tensor.dtype, torch.uint8)
    if tensor.dtype not in _PLAIN:  # a row of blocks: bytes
        shape = [*shape[:-1], size // shape[0]]
    rounded = stored == torch.float16 and not is_bias
    slab = allocate((len(experts), *shape), torch.bfloat16 if rounded else stored)
    for i, expert, together in _neighbours(experts, max(1, _READ_BYTES // size)):
        target, stack = slab[i : i + together], tensor.rows(expert, expert + together)
        if rounded:
            scratch = functools.partial(torch.empty, (together, *shape), dtype=stored)
            jobs.append(ReadJob(stack, scratch, target.copy_))
        else:
            jobs.append(ReadJob(stack, functools.partial(slab.narrow, 0, i, together)))
    return slab if tensor.dtype in _PLAIN else ExpertMatrix.gguf(tensor.dtype, slab)


def _neighbours(experts: Sequence[int], most: int) -> Iterator[tuple[int, int, int]]:
    """(place, expert, number) of runs of experts that follow each other in `experts` and in the file."""
    i = 0
    while i < len(experts):
        n = 1
        while n < most and i + n < len(experts) and experts[i + n] == experts[i] + n:
            n += 1
        yield i, experts[i], n
        i += n
