"""Load a PEFT adapter into a model: the LoRA settings that it needs, and its tensors by parameter name.

Every actor reads its own tensors from the file: DeepSeek-V3's adapter of 13 GB never meets in one process.
Where a model's settings give a module another rank or scale than the adapter does, the pair is padded with
zeros and the scale is folded into B.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kt_ray.adapter.adapter_file import Lora, instead_of
from kt_ray.adapter.fused import FusedLayer
from kt_ray.adapter.peft_config import CONFIG, TEXT_ALONE, WEIGHTS, module_of
from kt_ray.checkpoint.index import some
from kt_ray.checkpoint.names import (
    LEAVES,
    MAGNITUDE,
    family,
    is_interleaved,
    layer_of,
    one_expert,
    zero_experts,
)
from kt_ray.checkpoint.safetensors_file import damaged, read_tensor
from kt_ray.config.lora_patterns import module_lora
from kt_ray.config.schema import LoraConfig
from kt_ray.parse import read_json

_TRAINED = "check that the adapter was trained on this model"


def adapter_directory(path: str, key: str = "generate.adapter") -> str:
    """The adapter directory that a user means: itself, or a run's. `key`: where it was named.

    Raises:
        UserError: neither.
    """
    for directory in (Path(path), Path(path) / "adapter"):
        if (directory / CONFIG).is_file() and (directory / WEIGHTS).is_file():
            return str(directory)
    raise damaged(
        "not an adapter directory",
        f"{key}={path}",
        "no such directory" if not Path(path).is_dir() else f"no {CONFIG} with {WEIGHTS}",
        f"a directory with {CONFIG} and {WEIGHTS}, or a finished run's directory",
        instead_of(Path(path), f"correct {key}"),
    )


def digest_of(directory: str | Path) -> str:
    """SHA-256 of an adapter's file of weights, in hexadecimal."""
    with (Path(directory) / WEIGHTS).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state_of(directory: str | Path) -> tuple[bytes, int, int]:
    """What changes when another adapter is written there; the file of weights is not read."""
    weights = (Path(directory) / WEIGHTS).stat()
    return (Path(directory) / CONFIG).read_bytes(), weights.st_size, weights.st_mtime_ns


def settings_of(readers: Sequence[AdapterReader]) -> LoraConfig:
    """LoRA settings under which a model has all parameters of all these adapters.

    Raises:
        UserError: several, and one of them is DoRA: modules have magnitudes, or none has.
    """
    dora = next((reader.lora for reader in readers if reader.lora.dora), None)
    if dora is not None and len(readers) > 1:
        raise damaged(
            "a DoRA adapter cannot be used beside others",
            dora.path,
            f"{len(readers)} adapters",
            "plain LoRA, or one adapter",
            "merge it into a model of its own (python -m kt_ray.tools merge)",
        )
    scales = (pair.scale for reader in readers for pair in reader.lora.pairs())
    scale = next((scale for scale in scales if scale), 1.0)  # B is divided by it
    experts = max(reader.expert_rank for reader in readers)
    rank = max((pair.rank for r in readers for pair in r.lora.linear.values()), default=experts)
    differ = experts not in (0, rank)  # routed experts of attention's rank may take many times their memory
    return LoraConfig(
        rank=rank,
        alpha=scale * rank,
        rank_pattern={"experts": experts} if differ else None,
        alpha_pattern={"experts": scale * experts} if differ else None,
        target_modules=sorted({name for reader in readers for name in reader.lora.linear}) or "none",
        experts=any(reader.adapts_experts for reader in readers),
        layers=sorted({layer for reader in readers for layer in reader.expert_layers}) or None,
        dora=dora is not None,
    )


class AdapterReader:
    """An adapter's tensors by parameter name.

    Args:
        directory: of adapter_config.json and adapter_model.safetensors.
        model_dir: of the model that it is for; tells the family. None = not known: names are as in the file.

    Raises:
        UserError: not an adapter, or no plain LoRA.
    """

    def __init__(self, directory: str, model_dir: str | None) -> None:
        self._family, zero = "", range(0)
        if model_dir is not None:
            file = Path(model_dir) / "config.json"
            config = read_json(file, file.name, "set model.path to a model's directory")
            self._family, zero = family(config), zero_experts(config)
        self.lora = Lora.open(directory, self._family, len(zero))
        if self._family.removesuffix("_text") in TEXT_ALONE:
            self.lora = self.lora.of_text_model()
        self._layers: dict[str, FusedLayer] = {}

    @property
    def checked(self) -> AdapterReader:
        """The same, after `Lora.check_finite`."""
        self.lora.check_finite()
        return self

    @property
    def config(self) -> LoraConfig:
        """LoRA settings under which a model has all parameters of this adapter."""
        return settings_of([self])

    @property
    def expert_rank(self) -> int:
        """Smallest rank that holds every pair of routed experts; 0 = there is none."""
        return max((rank for rank, _ in self.expert_kinds), default=0)

    @cached_property
    def expert_kinds(self) -> dict[tuple[int, float], str]:
        """Rank and scale of routed experts -> a module that has them."""
        kinds: dict[tuple[int, float], str] = {}
        for pair in self.lora.experts.values():
            kinds.setdefault((pair.rank, pair.scale), pair.module)
        for (prefix, role), pair in self.lora.fused.items():
            halves = role == "gate_up" and self._fused(prefix).halves
            kinds.setdefault((pair.rank // (2 if halves else 1), pair.scale), pair.module)
        return kinds

    @cached_property
    def digest(self) -> str:
        """Of the file of weights."""
        return digest_of(self.lora.path)

    @property
    def adapts_experts(self) -> bool:
        """Whether it has routed experts."""
        return bool(self.lora.experts or self.lora.fused)

    @cached_property
    def _expert_prefixes(self) -> frozenset[str]:
        return frozenset(
            {prefix for prefix, *_ in self.lora.experts} | {prefix for prefix, _ in self.lora.fused}
        )

    @property
    def expert_layers(self) -> list[int]:
        """Layers whose routed experts it has."""
        return sorted({layer for prefix in self._expert_prefixes if (layer := layer_of(prefix)) is not None})

    def require_fit(self, shapes: Mapping[str, tuple[int, int]], num_experts: int) -> None:
        """Refuse an adapter of another model, by names and shapes alone.

        Args:
            shapes: every module that an adapter of the model may have -> (inputs, outputs).
            num_experts: routed experts of a layer.
        """
        own = {pair.module: (pair.in_features, pair.out_features) for pair in self.lora.linear.values()}
        names = {
            (of_expert.prefix, of_expert.expert, of_expert.role): name
            for name in shapes
            if (of_expert := one_expert(name)) is not None
        }
        for key, pair in self.lora.experts.items():
            own[names.get(key, pair.module)] = (pair.in_features, pair.out_features)
        for prefix in {prefix for prefix, _ in self.lora.fused}:
            layer = self._fused(prefix)
            for role in layer.projections:
                for expert in range(max(layer.experts, num_experts)):
                    name = names.get((prefix, expert, role), f"{prefix}.{expert}.{role}")
                    own[name] = layer.shape(role)[::-1] if expert < layer.experts else (0, 0)
        wrong = [name for name in own if shapes.get(name) != own[name]]
        absent = [key for key, name in names.items() if key[0] in self._expert_prefixes and name not in own]
        if not wrong and not absent:
            return
        lacking = some([names[key] for key in absent], 4)
        # Of this model, all the same: of parts of it that other programs adapt, or not of all of an expert.
        beside = all(name in self.lora.linear and name not in shapes for name in wrong)
        partly = all(any(names.get((*key[:2], role)) in own for role in LEAVES) for key in absent)
        if beside and partly and len(wrong) < len(own):
            raise damaged(
                "the adapter is of other parts of the model than kt_ray adapts",
                self.lora.path,
                some(wrong, 4) if wrong else f"nothing for {lacking}",
                "linear modules of layers, neither router nor head; all projections of an expert, or none",
                "if it was trained on this model, merge them: python -m kt_ray.tools merge MODEL ADAPTER OUT",
            )
        sizes = [f"{name} {_sizes(own[name])}" for name in wrong]
        examples = [f"{name} {_sizes(shapes[name])}" for name in own if name in shapes] or [
            f"{name} {_sizes(size)}" for name, size in shapes.items()
        ]
        base, commit = self.lora.base or "no model", self.lora.revision
        raise damaged(
            "the adapter does not fit this model",
            self.lora.path,
            some(sizes, 4) if wrong else f"nothing for {lacking}",
            f"inputs and outputs as in {some(examples, 2)}" if wrong else "every routed expert, or none",
            f"it names {f'hf://{base}@{commit}' if commit else base} as its base: set model.path to that, or "
            "choose an adapter of this model",
        )

    def _fused(self, prefix: str) -> FusedLayer:
        if prefix not in self._layers:
            self._layers[prefix] = FusedLayer.of(self.lora, prefix, is_interleaved(self._family))
        return self._layers[prefix]

    def read_into(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        lora: LoraConfig,
        *,
        others: Literal["refused", "zero", "kept"] = "refused",
    ) -> int:
        """Fill parameters.

        Args:
            parameters: (name, float32 tensor to fill), A and B of the same modules.
            lora: settings that they will be used with.
            others: what becomes of the parameters of modules that the adapter does not change.

        Returns:
            How many the adapter had.

        Raises:
            UserError: the adapter has no such tensor, or of another shape.
        """
        count, missing = 0, []
        for name, target in parameters:
            factors = self._factors(module_of(name))
            if factors is None:
                if others == "refused" or self._changes(name):
                    missing.append(name)
                elif others == "zero":
                    with torch.no_grad():
                        target.zero_()
                continue
            a, b, own = factors
            if name.endswith("lora_B.weight"):
                value = b * (own / module_lora(lora, module_of(name)).scale)
            else:
                value = a if name.endswith("lora_A.weight") else self._magnitude(module_of(name))
            self._fill(name, target, value)
            count += 1
        if missing:
            observed = f"no value for {some(missing)}"
            required = "an adapter of this model that covers every routed expert, or none"
            what = "the adapter lacks parameters of this model"
            raise damaged(what, self.lora.path, observed, required, _TRAINED)
        return count

    def _changes(self, name: str) -> bool:
        """Whether the adapter ought to have a parameter: it has the module, or the layer's routed experts."""
        module = module_of(name)
        expert = one_expert(module)
        return module in self.lora.linear if expert is None else expert.prefix in self._expert_prefixes

    def _factors(self, module: str) -> tuple[Tensor, Tensor, float] | None:
        """A [r, in], B [out, r] and scale of a module."""
        pair, expert = self.lora.linear.get(module), one_expert(module)
        if pair is None and expert is not None and expert.expert is not None:
            pair = self.lora.experts.get((expert.prefix, expert.expert, expert.role))
            roles = ("down",) if expert.role == "down" else ("gate_up", "up")
            if pair is None and any((expert.prefix, role) in self.lora.fused for role in roles):
                return self._fused(expert.prefix).split(expert.expert, expert.role)
        return None if pair is None else (*pair.factors(), pair.scale)

    def _magnitude(self, module: str) -> Tensor:
        info = self.lora.linear[module].magnitude
        assert info is not None, f"{module} has a magnitude, its adapter has none"
        return read_tensor(info).float()

    def _fill(self, name: str, target: Tensor, value: Tensor) -> None:
        side = 1 if name.endswith("lora_B.weight") else 0
        own, whole = list(value.shape), list(target.shape)
        missing = 0 if name.endswith(MAGNITUDE) else whole[side] - own[side]  # of the rank
        own[side] += max(0, missing)
        if own != whole:
            where, required = f"{self.lora.path}, {name}", f"shape {list(target.shape)}"
            observed = f"shape {list(value.shape)}"
            raise damaged("the adapter does not fit this model", where, observed, required, _TRAINED)
        with torch.no_grad():
            target.zero_()
            target.narrow(side, 0, value.shape[side]).copy_(value)


def _sizes(size: tuple[int, int]) -> str:
    return f"{size[0]}→{size[1]}"
