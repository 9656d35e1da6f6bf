"""A PEFT adapter as parameters of kt_ray: which LoRA settings it needs, and its tensors by our names.

Every actor reads its own tensors from the file; DeepSeek-V3's adapter of 13 GB never meets in one process.
Pairs of a smaller rank get zeros, and B takes up a scale that differs, so PEFT's patterns work, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kt_ray.adapter.adapter_dir import CONFIG, WEIGHTS
from kt_ray.adapter.adapter_file import Lora, Pair
from kt_ray.adapter.peft_config import module_of
from kt_ray.checkpoint.expert_reader import split_rows
from kt_ray.checkpoint.index import some
from kt_ray.checkpoint.names import expert_name
from kt_ray.config.schema import LoraConfig
from kt_ray.errors import UserError


def adapter_directory(path: str, key: str = "generate.adapter") -> str:
    """The adapter directory that a user means: itself, or a run's. `key`: where it was named.

    Raises:
        UserError: neither.
    """
    for directory in (Path(path), Path(path) / "adapter"):
        if (directory / CONFIG).is_file() and (directory / WEIGHTS).is_file():
            return str(directory)
    raise UserError(
        "not an adapter directory",
        where=f"{key}={path}",
        observed="no such directory" if not Path(path).is_dir() else f"no {CONFIG} with {WEIGHTS}",
        required=f"a directory with {CONFIG} and {WEIGHTS}, or a finished run's directory",
        remedy=f"correct {key}",
    )


def settings_of(readers: Sequence[AdapterReader]) -> LoraConfig:
    """LoRA settings under which a model has all parameters of all these adapters."""
    found = [reader.config for reader in readers]
    linear = sorted({name for reader in readers for name in reader.lora.linear})
    rank = max(config.rank for config in found)
    return LoraConfig(
        rank=rank,
        alpha=found[0].scale * rank,
        target_modules=linear or "none",
        experts=any(config.experts for config in found),
    )


class AdapterReader:
    """An adapter's tensors by parameter name.

    Args:
        directory: of adapter_config.json and adapter_model.safetensors.
        model_dir: of the model that it is for; tells the family (fused adapters only).

    Raises:
        UserError: not an adapter, or no plain LoRA.
    """

    def __init__(self, directory: str, model_dir: str) -> None:
        self.lora = Lora.open(directory)
        self._model_dir = model_dir
        self._interleaved: bool | None = None

    @property
    def config(self) -> LoraConfig:
        """LoRA settings under which a model has all parameters of this adapter."""
        lora = self.lora
        routed = [*lora.experts.values(), *lora.fused.values()]
        # Gate and up of our fused form lie side by side, so it has twice their rank.
        rank = max(pair.rank // (2 if self._halves(pair) else 1) for pair in lora.pairs())
        scale = next(iter([*lora.linear.values(), *routed])).scale
        return LoraConfig(
            rank=rank,
            alpha=scale * rank,
            target_modules=sorted(lora.linear) or "none",
            experts=bool(routed),
        )

    def _halves(self, pair: Pair) -> bool:
        prefix = next(
            (p for (p, role), known in self.lora.fused.items() if known is pair and role == "gate_up"), None
        )
        if prefix is None:
            return False
        down = self.lora.fused.get((prefix, "down"))
        return down is not None and pair.rank == 2 * down.rank

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
            found = self._find(module_of(name))
            if found is None:
                if one_of_several and not self._changes(name):
                    with torch.no_grad():
                        target.zero_()
                else:
                    missing.append(name)
                continue
            a, b, own = found
            value = a if name.endswith("lora_A.weight") else b * (own / scale)
            self._fill(name, target, value)
            count += 1
        if missing:
            raise UserError(
                "the adapter lacks parameters of this model",
                where=str(self.lora.path),
                observed=f"no value for {some(missing)}",
                required="an adapter of this model that covers every routed expert, or none",
                remedy="check that the adapter was trained on this model",
            )
        return count

    def _changes(self, name: str) -> bool:
        """Whether the adapter ought to have a parameter: it has the module, or routed experts at all."""
        module = module_of(name)
        if expert_name(f"{module}.weight") is None:
            return module in self.lora.linear
        return bool(self.lora.experts or self.lora.fused)

    def _find(self, module: str) -> tuple[Tensor, Tensor, float] | None:
        """A [r, in], B [out, r] and scale of a module."""
        lora = self.lora
        pair = lora.linear.get(module)
        if pair is not None:
            return (*pair.factors(), pair.scale)
        expert = expert_name(f"{module}.weight")
        if expert is None or expert.expert is None:
            return None
        pair = lora.experts.get((expert.prefix, expert.expert, expert.role))
        if pair is not None:
            return (*pair.factors(), pair.scale)
        if expert.role == "down":
            pair = lora.fused.get((expert.prefix, "down"))
            return None if pair is None else (*pair.factors(expert.expert), pair.scale)
        pair = lora.fused.get((expert.prefix, "gate_up"))
        if pair is None:
            return None
        a, b = pair.factors(expert.expert)
        second = expert.role == "up"
        b = split_rows(b, self._is_interleaved())[second]
        if self._halves(pair):
            ours, other = (slice(pair.rank // 2, None), slice(0, pair.rank // 2))
            if not second:
                ours, other = other, ours
            if bool(b[:, other].any()):
                raise UserError(
                    "gate and up of a fused adapter share their rank in a way that cannot be taken apart",
                    where=f"{lora.path}, {module}",
                    remedy="merge the adapter into the model: python -m kt_ray.tools merge",
                )
            a, b = a[ours], b[:, ours]
        return a, b, pair.scale

    def _is_interleaved(self) -> bool:
        if self._interleaved is None:
            from kt_ray.checkpoint.names import INTERLEAVED
            from kt_ray.model.family import read_family

            self._interleaved = read_family(self._model_dir).text_type in INTERLEAVED
        return self._interleaved

    def _fill(self, name: str, target: Tensor, value: Tensor) -> None:
        side = 0 if name.endswith("lora_A.weight") else 1
        fits = value.shape[side] <= target.shape[side] and value.shape[1 - side] == target.shape[1 - side]
        if not fits:
            raise UserError(
                "the adapter does not fit this model",
                where=f"{self.lora.path}, {name}",
                observed=f"shape {list(value.shape)}",
                required=f"shape {list(target.shape)}",
                remedy="check that the adapter was trained on this model",
            )
        with torch.no_grad():
            target.zero_()
            target.narrow(side, 0, value.shape[side]).copy_(value)
