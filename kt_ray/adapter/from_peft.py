"""Load a PEFT adapter into a model: the LoRA settings that it needs, and its tensors by parameter name.

Every actor reads its own tensors from the file: DeepSeek-V3's adapter of 13 GB never meets in one process.
Pairs of a smaller rank are padded with zeros, and another scale is folded into B, so PEFT's rank and alpha
patterns work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kt_ray.adapter.adapter_file import Lora
from kt_ray.adapter.fused import FusedLayer
from kt_ray.adapter.peft_config import CONFIG, WEIGHTS, module_of
from kt_ray.checkpoint.index import some
from kt_ray.checkpoint.names import family, is_interleaved, one_expert
from kt_ray.checkpoint.safetensors_file import damaged
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
        f"correct {key}",
    )


def settings_of(readers: Sequence[AdapterReader]) -> LoraConfig:
    """LoRA settings under which a model has all parameters of all these adapters."""
    rank = max(reader.rank for reader in readers)
    return LoraConfig(
        rank=rank,
        alpha=readers[0].lora.pairs()[0].scale * rank,
        target_modules=sorted({name for reader in readers for name in reader.lora.linear}) or "none",
        experts=any(reader.lora.experts or reader.lora.fused for reader in readers),
    )


class AdapterReader:
    """An adapter's tensors by parameter name.

    Args:
        directory: of adapter_config.json and adapter_model.safetensors.
        model_dir: of the model that it is for; tells the family.

    Raises:
        UserError: not an adapter, or no plain LoRA.
    """

    def __init__(self, directory: str, model_dir: str) -> None:
        file = Path(model_dir) / "config.json"
        self._family = family(read_json(file, file.name, "set model.path to a model's directory"))
        self.lora = Lora.open(directory, self._family)
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
    def rank(self) -> int:
        """Smallest rank that holds every pair."""
        single = [pair.rank for pair in (*self.lora.linear.values(), *self.lora.experts.values())]
        return max([*single, *(self._fused(prefix).rank for prefix, _ in self.lora.fused)])

    def _fused(self, prefix: str) -> FusedLayer:
        if prefix not in self._layers:
            self._layers[prefix] = FusedLayer.of(self.lora, prefix, is_interleaved(self._family))
        return self._layers[prefix]

    def read_into(
        self, parameters: Iterable[tuple[str, Tensor]], scale: float, *, one_of_several: bool = False
    ) -> int:
        """Fill parameters.

        Args:
            parameters: (name, float32 tensor to fill), A and B of the same modules.
            scale: that they will be used with.
            one_of_several: parameters of modules that only other adapters change become zero.

        Returns:
            How many the adapter had.

        Raises:
            UserError: the adapter has no such tensor, or of another shape.
        """
        count, missing = 0, []
        for name, target in parameters:
            factors = self._factors(module_of(name))
            if factors is None:
                if one_of_several and not self._changes(name):
                    with torch.no_grad():
                        target.zero_()
                else:
                    missing.append(name)
                continue
            a, b, own = factors
            value = a if name.endswith("lora_A.weight") else b * (own / scale)
            self._fill(name, target, value)
            count += 1
        if missing:
            observed = f"no value for {some(missing)}"
            required = "an adapter of this model that covers every routed expert, or none"
            what = "the adapter lacks parameters of this model"
            raise damaged(what, self.lora.path, observed, required, _TRAINED)
        return count

    def _changes(self, name: str) -> bool:
        """Whether the adapter ought to have a parameter: it has the module, or routed experts at all."""
        module = module_of(name)
        if one_expert(module) is None:
            return module in self.lora.linear
        return bool(self.lora.experts or self.lora.fused)

    def _factors(self, module: str) -> tuple[Tensor, Tensor, float] | None:
        """A [r, in], B [out, r] and scale of a module."""
        pair, expert = self.lora.linear.get(module), one_expert(module)
        if pair is None and expert is not None and expert.expert is not None:
            pair = self.lora.experts.get((expert.prefix, expert.expert, expert.role))
            roles = ("down",) if expert.role == "down" else ("gate_up", "up")
            if pair is None and any((expert.prefix, role) in self.lora.fused for role in roles):
                return self._fused(expert.prefix).split(expert.expert, expert.role)
        return None if pair is None else (*pair.factors(), pair.scale)

    def _fill(self, name: str, target: Tensor, value: Tensor) -> None:
        side = 0 if name.endswith("lora_A.weight") else 1
        fits = value.shape[side] <= target.shape[side] and value.shape[1 - side] == target.shape[1 - side]
        if not fits:
            where, required = f"{self.lora.path}, {name}", f"shape {list(target.shape)}"
            observed = f"shape {list(value.shape)}"
            raise damaged("the adapter does not fit this model", where, observed, required, _TRAINED)
        with torch.no_grad():
            target.zero_()
            target.narrow(side, 0, value.shape[side]).copy_(value)
