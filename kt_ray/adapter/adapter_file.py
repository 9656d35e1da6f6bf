"""Read an adapter for merging and exporting: ours, PEFT's on linear modules and on fused experts.

    ...self_attn.q_proj.lora_A.weight [r, in], lora_B [out, r]             linear modules
    ...self_attn.q_proj.lora_magnitude_vector [out]                        besides, with DoRA
    ...experts.5.gate_proj.lora_A.weight [r, in], lora_B [out, r]          one expert
    ...experts.base_layer.lora_A.weight [E*r', H], lora_B [2I, r'*E]       fused gate and up
    ...experts.lora_A.weight [E*r, I], lora_B [H, r*E]                     fused down
    ...experts.base_layer.lora_A.weight [E*r, H], lora_B [I, r*E]          fused up of experts without a gate

Nothing is read before it is asked for; an adapter of DeepSeek-V3 has 13 GB.
Legend: E experts, r rank, H hidden size, I intermediate size of one expert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from typing import Any

import regex
import torch
from torch import Tensor

from kt_ray.adapter.peft_config import CONFIG, PREFIX, WEIGHTS, converts_keys, module_name, outside
from kt_ray.checkpoint.index import some
from kt_ray.checkpoint.names import MAGNITUDE, one_expert
from kt_ray.checkpoint.safetensors_file import TensorInfo, damaged, read_header, read_tensor
from kt_ray.config.lora_patterns import first_meaning
from kt_ray.parse import check_shape, read_json

_KEY = re.compile(
    r"^(?P<module>.+)\.lora_(?P<part>[AB](?=(\.default)?\.weight$)|magnitude_vector)(\.default)?(\.weight)?$"
)
_FUSED = re.compile(r"^(?P<prefix>.*\bexperts)(?P<inner>(\.base_layer)*)$")
# Initialisations of PEFT after which the base stays as it is; the others (PiSSA, OLoRA, LoftQ, CorDA,
# LoRA-GA) take scale * B A off the base first, so that adding to the released weights gives another model.
_KEEPS_BASE = ("gaussian", "eva", "orthogonal", "mica")
_VARIANTS = (
    *("lora_bias", "fan_in_fan_out", "layer_replication", "trainable_token_indices"),
    *("use_qalora", "use_bdlora", "kasa_config", "monteclora_config", "velora_config", "arrow_config"),
)
_SHAPE = {
    "r": int,
    "lora_alpha": float,
    "rank_pattern?": {str: int},
    "alpha_pattern?": {str: float},
    "use_rslora?": bool,
    "use_dora?": bool,
    "peft_type?": str,
    "peft_version?": str,
    "base_model_name_or_path?": str,
    "revision?": str,
    "target_parameters?": [str],
}
_TYPES = ("F32", "BF16", "F16", "F64")
# Before 0.19.1 PEFT took the first axis after E of a fused parameter for A and the last for B, whichever of
# them is the input; 0.19.0 did the opposite. 0.18 is the first to say which PEFT it was.
_OLD_PEFT = re.compile(r"0\.(18\.|19\.0)")
# Families whose parameters transformers keeps as [E, in, out] (qwen3_vl_moe: before its version 5).
_INPUT_FIRST = ("aria", "gpt_oss", "llama4", "qwen3_vl_moe")
_UNTOLD = "llama4"  # whose class does not tell PEFT so (is_transposed)
_OLD_WEIGHTS = "adapter_model.bin"
_REMEDY = "choose a LoRA adapter that PEFT or kt_ray wrote"


@dataclass(frozen=True)
class Pair:
    """A and B of one module: W + scale * B A."""

    module: str
    a: TensorInfo  # [r, in]; fused [E*r, in]; turned [E*r, out]
    b: TensorInfo  # [out, r]; fused [out, r*E]; turned [in, r*E]
    rank: int
    scale: float  # alpha / r (rsLoRA: alpha / sqrt(r))
    experts: int = 0  # E of a fused pair
    zero_experts: int = 0  # behind them, whose parameters nothing reads (LongCat-Flash)
    magnitude: TensorInfo | None = None  # [out], DoRA: norms of the rows of the result
    turned: bool = False  # fused: `a` holds B turned round, `b` A (`is_turned`)

    @property
    def out_features(self) -> int:
        return self.a.shape[1] if self.turned else self.b.shape[0]

    @property
    def in_features(self) -> int:
        return self.b.shape[0] if self.turned else self.a.shape[1]

    def factors(self, expert: int = 0) -> tuple[Tensor, Tensor]:
        """A [r, in] and B [out, r], float32; of one expert where the pair is fused."""
        if not self.experts:
            return read_tensor(self.a).float(), read_tensor(self.b).float()
        a = read_tensor(self.a.rows(expert * self.rank, (expert + 1) * self.rank)).float()
        b = self._stacked()[:, :, expert].float()
        return (b.T.contiguous(), a.T.contiguous()) if self.turned else (a, b)

    def stacked_b(self) -> Tensor:
        """B of a fused pair as [out, r, E]."""
        if self.turned:
            return read_tensor(self.a).view(self.experts, self.rank, -1).permute(2, 1, 0)
        return self._stacked()

    def _stacked(self) -> Tensor:
        """`b` of a fused pair as [rows, r, E]."""
        columns = _whole(self.b, self.b.file.stat().st_mtime_ns)
        return columns.view(-1, self.rank, self.experts + self.zero_experts)[:, :, : self.experts]

    def delta(self, expert: int = 0) -> Tensor:
        """scale * B A, [out, in], float32."""
        a, b = self.factors(expert)
        return self.scale * (b @ a)


def is_turned(model_type: str) -> bool:
    """Whether PEFT takes the parameters of a family's experts, [E, in, out], for [E, out, in] (0.19.0 and all
    later): A [E*r, out] and B [in, r*E] then hold B and A turned round."""
    return model_type.removesuffix("_text") == _UNTOLD


@lru_cache(maxsize=8)  # gate_up and down of the layers that several threads are at
def _whole(info: TensorInfo, written: int) -> Tensor:  # another adapter may get the same name
    return read_tensor(info)


@dataclass(frozen=True)
class Lora:
    """An adapter's matrices, checked against its configuration."""

    path: Path  # of the directory
    config: dict[str, Any]  # adapter_config.json
    linear: dict[str, Pair] = field(default_factory=dict)  # by module
    # by prefix "...experts", expert, "gate" | "up" | "down"
    experts: dict[tuple[str, int, str], Pair] = field(default_factory=dict)
    # by prefix, "gate_up" | "up" | "down"
    fused: dict[tuple[str, str], Pair] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: str | Path, model_type: str = "", zero_experts: int = 0) -> Lora:
        """Read the headers and the configuration.

        Args:
            model_type: of the base's language model; without it modules have their names in the file.
            zero_experts: that the base's fused gate and up have besides (LongCat-Flash).

        Raises:
            UserError: not an adapter; not LoRA, or a variant that is not W + scale * B A; keys or shapes
                that do not fit together.
        """
        path = Path(directory)
        for name in (CONFIG, WEIGHTS):
            if not (path / name).is_file():
                raise damaged("not an adapter directory", path, f"no {name}", remedy=instead_of(path))
        config = read_json(path / CONFIG, CONFIG, _REMEDY)
        _check_config(path, config)
        pairs = _pairs(path, read_header(path / WEIGHTS, remedy=_REMEDY), model_type)
        lora = cls(path, config)
        wrapped: dict[str, dict[str, tuple[TensorInfo, TensorInfo]]] = {}
        for module, (a, b, magnitude) in pairs.items():
            if (magnitude is None) == lora.dora:
                raise damaged(
                    "the adapter's magnitudes and its configuration disagree",
                    f"{path}, {module}",
                    f"{'no' if magnitude is None else 'a'} lora_magnitude_vector",
                    f"one for every module where use_dora is true (here {str(lora.dora).lower()})",
                    _REMEDY,
                )
            match, expert = _FUSED.match(module), one_expert(module)
            routed = match is not None or (expert is not None and expert.expert is not None)
            if routed and magnitude is not None:
                what = "adapter has DoRA on routed experts"
                raise damaged(what, f"{path}, {module}", "lora_magnitude_vector", "plain LoRA there", _REMEDY)
            if match is not None:
                wrapped.setdefault(match["prefix"], {})[module] = (a, b)
            elif expert is not None and expert.expert is not None:
                pair = lora._pair(module, a, b, lora._named(module))
                lora.experts[expert.prefix, expert.expert, expert.role] = pair
            else:
                pair = lora._pair(module, a, b, lora._named(module))
                lora.linear[module] = replace(pair, magnitude=magnitude)
        for prefix, wrappers in wrapped.items():
            lora._add_fused(prefix, wrappers, model_type, zero_experts)
        return lora

    def of_text_model(self) -> Lora:
        """The same under the text model's own names, where it has those inside the multimodal model."""
        linear, experts = dict[str, Pair](), dict[tuple[str, int, str], Pair]()
        fused = dict[tuple[str, str], Pair]()
        for module, pair in self.linear.items():
            linear[outside(module)] = replace(pair, module=outside(module))
        for (prefix, expert, role), pair in self.experts.items():
            experts[outside(prefix), expert, role] = replace(pair, module=outside(pair.module))
        for (prefix, role), pair in self.fused.items():
            fused[outside(prefix), role] = replace(pair, module=outside(pair.module))
        own = replace(self, linear=linear, experts=experts, fused=fused)
        if len(own.pairs()) < len(self.pairs()):
            what, required = "adapter holds matrices twice", "one name for each module"
            observed = 'modules with "language_model." in their names and without'
            raise damaged(what, self.path / WEIGHTS, observed, required, _REMEDY)
        return own

    def check_finite(self) -> None:
        """Read every value once.

        Raises:
            UserError: some are NaN or infinite.
        """
        for pair in self.pairs():
            for info in (pair.a, pair.b, pair.magnitude):
                if info is not None and not bool(torch.isfinite(read_tensor(info)).all()):
                    what = "adapter holds values that are not finite"
                    raise damaged(what, info.place, "NaN or infinite values", "finite values", _REMEDY)

    @property
    def dora(self) -> bool:
        """Whether modules have magnitudes."""
        return bool(self.config.get("use_dora"))

    @property
    def base(self) -> str:
        """The base model that the configuration names."""
        return str(self.config.get("base_model_name_or_path") or "")

    @property
    def revision(self) -> str | None:
        """The base model's commit, where `base` is its name on the hub."""
        return self.config.get("revision")

    def base_directory(self) -> Path | None:
        """Where the base model lies: the directory that it names, or the hub's cache; None = not here."""
        if not self.base:
            return None
        if (Path(self.base) / "config.json").is_file():
            return Path(self.base)
        try:
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(self.base, revision=self.revision, local_files_only=True))
        except (OSError, ValueError):  # not in the cache; no name on the hub
            return None
        return folder if (folder / "config.json").is_file() else None

    def pairs(self) -> list[Pair]:
        """All pairs, linear modules first."""
        return [*self.linear.values(), *self.experts.values(), *self.fused.values()]

    def merged_by_peft(self, model_type: str) -> bool:
        """Whether PEFT makes fused parameters of single experts, if there are any: by the family, and not of
        gate and up without down, which it looks for beneath down's."""
        down = {prefix for prefix, _, role in self.experts if role == "down"}
        return not self.experts or (converts_keys(model_type) and down >= {p for p, *_ in self.experts})

    def _named(self, module: str) -> str:
        """What PEFT's patterns are compared with: the parameter, where target_parameters names it."""
        weight, targets = f"{module}.weight", self.config.get("target_parameters") or []
        return weight if any(weight == t or weight.endswith(f".{t}") for t in targets) else module

    def _setting(self, module: str) -> tuple[int, float]:
        """Rank and alpha of a module, as PEFT's patterns give them."""
        values = []
        for default, name in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
            patterns: Mapping[str, Any] = self.config.get(name) or {}
            where = f"{self.path / CONFIG}, {name}"
            try:
                key = first_meaning(patterns, (module,), where=where)
            except regex.error as error:
                fault = "adapter's configuration holds a pattern that is no regular expression"
                observed = f"{error.pattern!r} ({error})"
                raise damaged(fault, where, observed, "a Python regular expression", _REMEDY) from error
            values.append(self.config[default] if key is None else patterns[key])
        return int(values[0]), float(values[1])

    def _pair(self, module: str, a: TensorInfo, b: TensorInfo, named: str, experts: int = 0) -> Pair:
        rank, alpha = self._setting(named)
        rows = rank * max(1, experts)
        if a.shape[0] != rows or b.shape[1] != rows:
            raise damaged(
                "adapter's matrices and its configuration disagree about the rank",
                f"{self.path}, {module}",
                f"A {list(a.shape)}, B {list(b.shape)}",
                f"A [{rows}, in], B [out, {rows}] (r {rank})",
                "check r and rank_pattern in adapter_config.json",
            )
        scale = alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank
        return Pair(module, a, b, rank, scale, experts)

    def _add_fused(
        self,
        prefix: str,
        wrappers: dict[str, tuple[TensorInfo, TensorInfo]],
        model_type: str,
        zero_experts: int,
    ) -> None:
        turned = self._is_turned(prefix, wrappers, model_type)
        for role, module in self._roles(prefix, wrappers, turned).items():
            a, b = wrappers[module]
            named = f"{prefix}.{role}_proj"
            count = a.shape[0] // self._setting(named)[0]
            pair, zero = self._pair(module, a, b, named, count), 0 if role == "down" else zero_experts
            self.fused[prefix, role] = replace(pair, experts=count - zero, zero_experts=zero, turned=turned)

    def _is_turned(
        self, prefix: str, wrappers: dict[str, tuple[TensorInfo, TensorInfo]], model_type: str
    ) -> bool:
        """Whether A and B have each other's place: by the shapes of two, or by the PEFT that wrote one.

        Raises:
            UserError: they have, and the family is none of `is_turned`.
        """
        version = str(self.config.get("peft_version") or "")
        first_is_input = model_type.removesuffix("_text") in _INPUT_FIRST  # there 0.18 was right
        old = bool(_OLD_PEFT.match(version))
        turned = old and bool(model_type) and not (first_is_input and version.startswith("0.18."))
        turned = turned or (not old and is_turned(model_type))
        sizes = [(a.shape[1], b.shape[0]) for a, b in wrappers.values()]
        for (a, b), (a2, b2) in permutations(sizes) if len(sizes) == 2 else ():  # of gate_up, and of down
            if (a, b) == (b2, 2 * a2):
                turned = False
            elif (a, b) == (2 * b2, a2):
                turned = True
        if turned and not is_turned(model_type) and (old or model_type):
            raise damaged(
                "adapter's fused expert matrices A and B have each other's place, as PEFT stores them before "
                "0.19.1",
                f"{self.path}, {prefix}",
                "; ".join(f"{m} A {list(a.shape)}, B {list(b.shape)}" for m, (a, b) in wrappers.items())
                + (f"; peft_version {version}" if version else ""),
                "A [E*r, in] and B [out, r*E]",
                "merge it with the PEFT that wrote it (merge_and_unload), or train it again",
            )
        return turned

    def _roles(
        self, prefix: str, wrappers: dict[str, tuple[TensorInfo, TensorInfo]], turned: bool
    ) -> dict[str, str]:
        """Which wrapper adapts gate_up (or up) and which down: by shapes, or the only one configured."""
        if len(wrappers) == 2:
            for first, down in (sorted(wrappers, reverse=True), sorted(wrappers)):
                sizes = [(a.shape[1], b.shape[0]) for a, b in (wrappers[first], wrappers[down])]
                (n_in, n_out), (n_in2, n_out2) = [s[::-1] for s in sizes] if turned else sizes
                inner = {2 * n_in2: "gate_up", n_in2: "up"}.get(n_out)
                if n_in == n_out2 and inner is not None:
                    return {inner: first, "down": down}
        elif len(wrappers) == 1:
            # As PEFT compares: targets are ends of parameters' names, and may be other layers'.
            targets = [f".{t}" for t in self.config.get("target_parameters") or []]
            named = {
                role
                for role in ("gate_up", "up", "down")
                if any(f".{prefix}.{role}_proj".endswith(target) for target in targets)
            }
            if len(named) == 1:
                return {named.pop(): next(iter(wrappers))}
        raise damaged(
            "adapter's fused expert matrices fit neither gate_up_proj or up_proj nor down_proj",
            f"{self.path}, {prefix}",
            "; ".join(f"{m} A {list(a.shape)}, B {list(b.shape)}" for m, (a, b) in wrappers.items()),
            "A [E*r, H], B [2I or I, r*E] and A [E*r, I], B [H, r*E]",
            _REMEDY,
        )


def instead_of(path: Path, remedy: str = _REMEDY) -> str:
    """What to do about a directory that is no adapter's; `remedy`: if nothing in it tells."""
    for place in (path / "adapter", path):
        if (place / CONFIG).is_file() and (place / _OLD_WEIGHTS).is_file():
            return f"load {place / _OLD_WEIGHTS} with PEFT and save it again (save_pretrained), as {WEIGHTS}"
    if all((path / "adapter" / name).is_file() for name in (CONFIG, WEIGHTS)):
        return f"name the adapter in it: {path / 'adapter'}"
    return remedy


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    check_shape(config, _SHAPE, path / CONFIG, CONFIG, _REMEDY)
    init = config.get("init_lora_weights")
    wrong: list[tuple[bool, str]] = [
        (config.get("peft_type") != "LORA", f"peft_type {config.get('peft_type')!r}"),
        (config["r"] < 1, f"r {config['r']!r}"),
        *((rank < 1, f"rank_pattern {rank}") for rank in (config.get("rank_pattern") or {}).values()),
        (config.get("bias", "none") != "none", f"bias {config.get('bias')!r}"),
        (bool(config.get("modules_to_save")), f"modules_to_save {config.get('modules_to_save')!r}"),
        (config.get("alora_invocation_tokens") is not None, "alora_invocation_tokens"),
        *((bool(config.get(name)), name) for name in _VARIANTS),
        (
            isinstance(init, str) and init.lower() not in _KEEPS_BASE,
            f"init_lora_weights {init!r} (a changed base)",
        ),
    ]
    faults = [text for is_wrong, text in wrong if is_wrong]
    if faults:
        required = "LORA: W + scale * B A, r and lora_alpha given"
        remedy = "merge it with PEFT, or train without this option"
        raise damaged("adapter is not plain LoRA", path / CONFIG, ", ".join(faults), required, remedy)


def _pairs(
    path: Path, tensors: Mapping[str, TensorInfo], model_type: str
) -> dict[str, tuple[TensorInfo, TensorInfo, TensorInfo | None]]:
    halves: dict[str, dict[str, TensorInfo]] = {}
    other: list[str] = []
    twice: list[str] = []  # with "base_model.model." and without, or under an adapter's name and under none
    for key, info in tensors.items():
        match = _KEY.match(key.removeprefix(PREFIX))
        if match is None:
            other.append(key)
            continue
        own = halves.setdefault(module_name(match["module"], model_type), {})
        if match["part"] in own:
            twice.append(key)
        own[match["part"]] = info
    if copies := [key for key in other if key.endswith(".base_layer.weight")]:
        raise damaged(
            "adapter holds weights of the base, too, as PEFT saves them of a head that has LoRA",
            path / WEIGHTS,
            some(sorted(copies), 8),
            "a lora_A.weight and a lora_B.weight for each module",
            "if the vocabulary is as it was, load it with PEFT and save it without them: "
            "save_pretrained(DIR, save_embedding_layers=False)",
        )
    single = [f"{m}.lora_{min(pair)}" for m, pair in halves.items() if not {"A", "B"} <= pair.keys()]
    for names, what in (
        (other, "adapter holds tensors that are not LoRA matrices"),
        (twice, "adapter holds matrices twice"),
        (single, "adapter holds one half of a pair"),
        ([] if halves else ["none"], "adapter holds no LoRA matrices"),
    ):
        if names:
            required = "a lora_A.weight and a lora_B.weight for each module"
            raise damaged(what, path / WEIGHTS, some(sorted(names), 8), required, _REMEDY)
    odd = [f"{name} {info.dtype}" for name, info in tensors.items() if info.dtype not in _TYPES]
    if odd:  # integers would be taken for values, without their scales
        what, remedy = "adapter's matrices are of a type that is not read", "save it in bfloat16 or float32"
        raise damaged(what, path / WEIGHTS, some(sorted(odd), 4), ", ".join(_TYPES), remedy)
    odd = [f"{k} {list(t.shape)}" for k, t in tensors.items() if len(t.shape) != 1 + (MAGNITUDE not in k)]
    if odd:  # of a convolution, or damaged
        required = "A [r, in], B [out, r] and lora_magnitude_vector [out]"
        what = "adapter's matrices have another number of dimensions"
        raise damaged(what, path / WEIGHTS, some(sorted(odd), 4), required, _REMEDY)
    return {m: (pair["A"], pair["B"], pair.get("magnitude_vector")) for m, pair in halves.items()}
