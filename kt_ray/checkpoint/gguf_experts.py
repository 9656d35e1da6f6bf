"""Routed experts from a GGUF file beside a Hugging Face directory, which has everything else.

llama.cpp keeps the experts of layer N as stacks of all experts: blk.N.ffn_{gate,up,down}_exps.weight (or
ffn_gate_up_exps.weight, rows of gate, then rows of up) and, in gpt-oss, .bias. A row is a row of blocks as
the engine computes from them, and experts follow each other, so they are read straight into place. Types
may differ from tensor to tensor and from layer to layer, as llama-quantize mixes them. float16, which the
engine does not compute with, becomes bfloat16 while it is read (of a model that was released in bfloat16
these are its own values again; others lose three bits).

Legend: E experts, I intermediate size of one expert, H hidden size; n is the number of experts asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kt_ray.checkpoint.expert_layout import ExpertLayout
from kt_ray.checkpoint.gguf_file import open_gguf
from kt_ray.checkpoint.gguf_header import GgufHeader, GgufTensor
from kt_ray.checkpoint.index import CheckpointIndex, some
from kt_ray.checkpoint.load_experts import BytesRead, ReadJob, as_weights, run_jobs
from kt_ray.errors import UserError
from kt_ray.native import ExpertFormula, ExpertMatrix, ExpertWeights, allocate
from kt_ray.native.matrix import GGUF_BLOCKS

_PLAIN = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_HELD = {torch.float16: torch.bfloat16}  # read as the first, held as the second
_SUPPORTED = (*_PLAIN, *(name.upper() for name in GGUF_BLOCKS))
_STACK = re.compile(r"^blk\.(?P<layer>\d+)\.ffn_(?P<part>\w+)_exps\.(?P<leaf>[\w.]+)$")
_SINGLE = re.compile(r"^blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight$")
_LEAVES = {"weight": "", "bias": "_bias"}
_PARTS = ("gate", "up", "down", "gate_up")
_READ_BYTES = 4 << 20  # neighbouring experts are read at once up to this size, larger ones one by one
_SAMPLES, _SAMPLE_BYTES = 64, 64
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
    """The routed experts of a GGUF file, checked against the Hugging Face directory.

    Attributes:
        header: the file, or the split set.
        layout: names, layers and sizes as in the directory; `formats` and `expert_bytes` as in the file.
        stacks: layer -> part ("gate", "up", "down", "gate_up", each also with "_bias") -> tensor.
        skipped: experts of layers beyond the model's (multi-token prediction), never loaded.
    """

    header: GgufHeader
    layout: ExpertLayout
    stacks: dict[int, dict[str, GgufTensor]] = field(repr=False)
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
            layer: {part: _format(tensor) for part, tensor in parts.items() if not part.endswith("_bias")}
            for layer, parts in stacks.items()
        }
        _check_float32(header, formats)
        sizes = {
            layer: sum(tensor.nbytes for tensor in parts.values()) // layout.num_experts
            for layer, parts in stacks.items()
        }
        own = dataclasses.replace(layout, formats=formats, expert_bytes=sizes)
        return cls(header, own, stacks, skipped)

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats that occur, as the engine names them, sorted."""
        return self.layout.distinct_formats

    @property
    def file_bytes(self) -> int:
        """Bytes of all experts in the file."""
        return self.layout.num_experts * sum(self.layout.expert_bytes.values())

    def nbytes(self, layer: int, experts: Sequence[int]) -> int:
        """Bytes that experts of a layer take, in the file and in memory (biases become float32)."""
        return len(experts) * self.layout.expert_bytes[layer]

    @property
    def notes(self) -> tuple[str, ...]:
        """What is passed over or rounded, one line each."""
        found = []
        if self.skipped:
            beyond = some([*self.skipped], 3)
            found.append(f"experts in the GGUF file beyond the model's layers, not read: {beyond}")
        rounded = [t.name for part, t in self._tensors() if t.type == "F16" and not part.endswith("_bias")]
        if rounded:
            found.append(f"float16 experts of the GGUF file are held as bfloat16: {some(rounded, 3)}")
        return tuple(found)

    @property
    def fingerprint(self) -> str:
        """Names, types, shapes and sampled bytes of the experts, hashed: the same whatever the splitting."""
        digest = hashlib.sha256()
        tensors = [tensor for _, tensor in self._tensors()]
        for tensor in tensors:
            digest.update(f"{tensor.name} {tensor.type} {tensor.shape}\n".encode())
        for tensor in tensors[:: max(1, len(tensors) // _SAMPLES)]:
            with tensor.file.open("rb") as file:
                file.seek(tensor.start + max(0, tensor.nbytes - _SAMPLE_BYTES) // 2)
                digest.update(file.read(min(_SAMPLE_BYTES, tensor.nbytes)))
        return digest.hexdigest()

    def _tensors(self) -> Iterator[tuple[str, GgufTensor]]:
        for layer in sorted(self.stacks):
            yield from sorted(self.stacks[layer].items())

    def load(
        self,
        layer: int,
        experts: Sequence[int],
        *,
        formula: ExpertFormula | None = None,
        threads: int = 1,
        progress: BytesRead | None = None,
        drop_cache: bool = False,
    ) -> ExpertWeights:
        """Read some experts of one layer.

        Args:
            layer, experts, formula, threads, progress, drop_cache: as of `load_experts`.

        Returns:
            Weights of n experts in the file's types, float16 as bfloat16.

        Raises:
            ValueError: a layer or expert the file does not have.
            UserError: the file ended early.
        """
        if layer not in self.stacks:
            raise ValueError(f"layer {layer} has no routed experts")
        if any(not 0 <= e < self.layout.num_experts for e in experts):
            raise ValueError(f"experts {list(experts)} outside 0..{self.layout.num_experts - 1}")
        formula = formula or ExpertFormula()
        jobs: list[ReadJob] = []
        made = {
            part: _place(tensor, experts, jobs, as_stored=part.endswith("_bias"))
            for part, tensor in self.stacks[layer].items()
        }
        run_jobs(sorted(jobs, key=lambda job: (job.file, job.offset)), threads, progress, drop_cache)
        parts = {part: make() for part, make in made.items()}
        half = self.layout.intermediate
        both = parts.get("gate_up")
        if both is not None:
            parts["gate"], parts["up"] = _rows(both, 0, half), _rows(both, half, 2 * half)
        bias = {p: v.float() for p, v in parts.items() if p.endswith("_bias") and isinstance(v, Tensor)}
        if "gate_up_bias" in bias:
            first, second = bias["gate_up_bias"].chunk(2, 1)
            bias |= {"gate_bias": first.contiguous(), "up_bias": second.contiguous()}
        named = {part.removesuffix("_bias"): value for part, value in bias.items()}
        return as_weights(parts, named, formula, layer, experts)


# -- checks ----------------------------------------------------------------------------------


def _check_architecture(header: GgufHeader, index: CheckpointIndex) -> None:
    family = str(index.text_config.get("model_type", ""))
    required = ARCHITECTURES.get(family.removesuffix("_text"))
    if required is not None and header.architecture != required:
        raise UserError(
            "GGUF file holds a model of another architecture",
            where=str(header.path),
            observed=f"general.architecture {header.architecture or 'missing'}",
            required=f"{required}, as of {family} ({index.path / 'config.json'})",
            remedy=_SAME,
        )


def _find(
    header: GgufHeader, index: CheckpointIndex, layout: ExpertLayout
) -> tuple[dict[int, dict[str, GgufTensor]], tuple[str, ...]]:
    """The experts' tensors by layer and part, and those of layers beyond the model's."""
    count = index.text_config.get("num_hidden_layers")
    layers = count if isinstance(count, int) else max(layout.moe_layers) + 1
    stacks: dict[int, dict[str, GgufTensor]] = defaultdict(dict)
    skipped: list[str] = []
    for name, tensor in header.tensors.items():
        match = _STACK.match(name)
        if match is None:
            continue
        if match["part"] not in _PARTS or match["leaf"] not in _LEAVES:
            raise UserError(
                "GGUF file holds a tensor of the experts that is not known",
                where=f"{tensor.file}, tensor {name}",
                observed=tensor.type,
                required="ffn_{gate,up,down,gate_up}_exps with .weight or .bias",
                remedy=_SAME,
            )
        if int(match["layer"]) >= layers:
            skipped.append(name)
        else:
            stacks[int(match["layer"])][match["part"] + _LEAVES[match["leaf"]]] = tensor
    if not stacks:
        single = next((name for name in header.tensors if _SINGLE.match(name)), None)
        raise UserError(
            "GGUF file has no routed experts" if single is None else "GGUF file has an old form of experts",
            where=str(header.path),
            observed=f"architecture {header.architecture}, {len(header.tensors)} tensors"
            if single is None
            else f"a tensor for each expert ({single})",
            required="tensors blk.N.ffn_{gate,up,down}_exps.weight",
            remedy=_SAME if single is None else "convert the model again with a current llama.cpp",
        )
    promised, found = set(layout.moe_layers), set(stacks)
    if promised != found:
        raise UserError(
            "GGUF file and Hugging Face directory disagree about the layers that have routed experts",
            where=str(header.path),
            observed=f"without: {sorted(promised - found)}; unexpected: {sorted(found - promised)}",
            required=f"{len(promised)} layers, as in {index.path}",
            remedy=_SAME,
        )
    return {layer: stacks[layer] for layer in layout.moe_layers}, tuple(sorted(skipped))


def _check_parts(header: GgufHeader, layout: ExpertLayout, layer: int, parts: dict[str, GgufTensor]) -> None:
    """All tensors of a layer and none else, their shapes and types."""
    E, I, H = layout.num_experts, layout.intermediate, layout.hidden
    shapes = {"gate": (E, I, H), "up": (E, I, H), "gate_up": (E, 2 * I, H), "down": (E, H, I)}
    if "gate_up" in parts and layout.gated:
        required = ["gate_up", "down"]
    else:
        required = ["gate", "up", "down"] if layout.gated else ["up", "down"]
    if layout.biased:
        required += [f"{part}_bias" for part in required]
    missing, extra = sorted(set(required) - set(parts)), sorted(set(parts) - set(required))
    if missing or extra:
        raise UserError(
            "GGUF file lacks tensors of the experts"
            if missing
            else "GGUF file has too many tensors of experts",
            where=f"{header.path}, layer {layer}",
            observed=("missing: " if missing else "unexpected: ")
            + some([_name(layer, part) for part in missing or extra]),
            required=", ".join(_name(layer, part) for part in required),
            remedy=_SAME,
        )
    for part, tensor in parts.items():
        weight = part.removesuffix("_bias")
        shape: tuple[int, ...] = shapes[weight] if part == weight else shapes[weight][:2]
        where = f"{tensor.file}, tensor {tensor.name}"
        if tensor.shape != shape:
            raise UserError(
                "GGUF file and Hugging Face directory disagree about the sizes of the experts",
                where=where,
                observed=list(tensor.shape),
                required=f"{list(shape)} (experts, outputs, inputs)",
                remedy=_SAME,
            )
        supported = _SUPPORTED if part == weight else tuple(_PLAIN)
        if tensor.type not in supported:
            raise UserError(
                "experts are in a GGUF type that is not computed",
                where=where,
                observed=tensor.type,
                required=", ".join(supported),
                remedy=_QUANTISE,
            )


def _name(layer: int, part: str) -> str:
    weight = part.removesuffix("_bias")
    return f"blk.{layer}.ffn_{weight}_exps.{'weight' if part == weight else 'bias'}"


def _format(tensor: GgufTensor) -> str:
    """The engine's name of the format that a tensor is held in."""
    return {"F32": "f32", "BF16": "bf16", "F16": "bf16"}.get(tensor.type, tensor.type.lower())


def _check_float32(header: GgufHeader, formats: dict[int, dict[str, str]]) -> None:
    """The engine computes float32 weights in float32, all of them or none."""
    where: dict[str, str] = {}
    for layer, parts in formats.items():
        for part, name in parts.items():
            where.setdefault(name, _name(layer, part))
    if "f32" in where and len(where) > 1:
        raise UserError(
            "experts have mixed types",
            where=str(header.path),
            observed=", ".join(f"{name} ({tensor})" for name, tensor in sorted(where.items())),
            required="F32 for all experts, or for none",
            remedy=_QUANTISE,
        )


# -- reading ---------------------------------------------------------------------------------


def _place(
    tensor: GgufTensor, experts: Sequence[int], jobs: list[ReadJob], *, as_stored: bool
) -> Callable[[], Tensor | ExpertMatrix]:
    """Memory for experts of a stack, the jobs that fill it, and what makes them weights."""
    count, *shape = tensor.shape
    size = tensor.nbytes // count
    plain = _PLAIN.get(tensor.type)
    held = torch.uint8 if plain is None else plain if as_stored else _HELD.get(plain, plain)
    if plain is None:  # a row of blocks: bytes
        shape = [*shape[:-1], size // shape[0]]
    slab = allocate((len(experts), *shape), held)
    for i, expert, together in _neighbours(experts, max(1, _READ_BYTES // size)):
        target, offset = slab[i : i + together], tensor.start + expert * size
        if held is plain or plain is None:
            jobs.append(ReadJob(tensor.file, offset, functools.partial(_itself, target)))
        else:
            scratch = functools.partial(torch.empty, (together, *shape), dtype=plain)
            jobs.append(ReadJob(tensor.file, offset, scratch, target.copy_))
    if plain is None:
        return lambda: ExpertMatrix.gguf(tensor.type, slab)
    return lambda: slab


def _itself(target: Tensor) -> Tensor:
    return target


def _neighbours(experts: Sequence[int], most: int) -> Iterator[tuple[int, int, int]]:
    """(place, expert, number) of runs of experts that follow each other in `experts` and in the file."""
    i = 0
    while i < len(experts):
        n = 1
        while n < most and i + n < len(experts) and experts[i + n] == experts[i] + n:
            n += 1
        yield i, experts[i], n
        i += n


def _rows(stack: Tensor | ExpertMatrix, start: int, stop: int) -> Tensor | ExpertMatrix:
    return stack[:, start:stop] if isinstance(stack, Tensor) else stack.rows(start, stop)
