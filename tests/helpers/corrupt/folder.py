"""A checkpoint's directory that a case may damage, and the good ones that cases begin with."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from kt_ray.native import quantize
from kt_ray.parse import read_json
from tests.helpers.hf_reference import build_checkpoint

INDEX = "model.safetensors.index.json"
VOCAB = 400
H, I, E = 64, 32, 8  # every stored format has room for them
Tensors = dict[str, torch.Tensor]


@dataclass
class Folder:
    """A checkpoint of two shards with their index."""

    path: Path

    @property
    def index(self) -> Path:
        return self.path / INDEX

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    def shard(self, number: int = 1) -> Path:
        return self.path / f"model-{number:05d}-of-00002.safetensors"

    def copy(self, path: Path) -> Folder:
        shutil.copytree(self.path, path)
        return Folder(path)

    def load(self) -> Tensors:
        return {k: v for n in (1, 2) for k, v in load_file(self.shard(n)).items()}

    def save(self, tensors: Tensors) -> None:
        """Write the shards anew, sorted by name, and the index."""
        names = sorted(tensors)
        weight_map: dict[str, str] = {}
        for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
            save_file({n: tensors[n].contiguous() for n in part}, self.shard(number), {"format": "pt"})
            weight_map |= dict.fromkeys(part, self.shard(number).name)
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        self.index.write_text(json.dumps(content))

    def weights(self, change: Callable[[Tensors], object]) -> None:
        """Let `change` alter all tensors in place."""
        tensors = self.load()
        change(tensors)
        self.save(tensors)

    def tensor(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.weights(lambda tensors: tensors.update({name: change(tensors[name])}))

    def config(self, drop: tuple[str, ...] = (), **changes: Any) -> None:
        config = {k: v for k, v in self.read_config().items() if k not in drop}
        self.config_file.write_text(json.dumps({**config, **changes}))

    def read_config(self) -> dict[str, Any]:
        return read_json(self.config_file, "config.json", "")

    def mapping(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Alter the index, not the shards."""
        content = json.loads(self.index.read_text())
        change(content["weight_map"])
        self.index.write_text(json.dumps(content))

    def header(self, change: Callable[[dict[str, Any]], object], number: int = 2) -> None:
        """Alter a shard's header, not its data."""
        raw = self.shard(number).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        self.shard(number).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    def cut(self, size: int, number: int = 1) -> None:
        """Keep the first `size` bytes of a shard; negative: lose so many."""
        raw = self.shard(number).read_bytes()
        self.shard(number).write_bytes(raw[:size])


def make_bases(root: Path) -> dict[str, Folder]:
    """One good checkpoint per format: bf16, fp8, int4 (per expert), fused, mxfp4 (gpt-oss)."""
    bases = {"bf16": _family(root / "bf16", "deepseek_v3", num_nextn_predict_layers=0)}
    for name, quantisation, convert in (("fp8", _FP8, _to_fp8), ("int4", _INT4, _to_int4)):
        bases[name] = Folder(root / name)
        shutil.copytree(bases["bf16"].path, root / name)
        bases[name].weights(convert)
        bases[name].config(quantization_config=quantisation)
    bases["fused"] = _family(root / "fused", "qwen3_moe")
    bases["fused"].weights(_fuse)
    bases["mxfp4"] = _family(root / "mxfp4", "gpt_oss", **_GPT_OSS)
    bases["mxfp4"].weights(_to_mxfp4)
    bases["mxfp4"].config(quantization_config={"quant_method": "mxfp4"})
    return bases


_GPT_OSS: dict[str, Any] = {
    "intermediate_size": I,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_scaling": None,
}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
            },
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
}


def _family(path: Path, family: str, **overrides: Any) -> Folder:
    sizes = {"vocab_size": VOCAB, "hidden_size": H, "moe_intermediate_size": I, **overrides}
    made = build_checkpoint(path.parent / f".{path.name}", family, dtype=torch.bfloat16, **sizes)
    made.rename(path)
    made.parent.rmdir()
    train_tokenizer(persona_path(), VOCAB).save_pretrained(path)
    folder = Folder(path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    folder.save(tensors)
    return folder


def _linear(name: str, tensor: torch.Tensor) -> bool:
    plain = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
    return tensor.dim() == 2 and name.endswith("_proj.weight") and not name.endswith(plain)


def _to_fp8(tensors: Tensors) -> None:
    for name in [n for n, t in tensors.items() if _linear(n, t)]:
        rows, columns = tensors[name].shape
        matrix = quantize("fp8", tensors[name].float()[None], block=(32, 32))
        assert matrix.scales is not None
        tensors[name] = matrix.data[0]
        tensors[f"{name}_scale_inv"] = matrix.scales[0]
        assert matrix.scales[0].shape == (-(-rows // 32), -(-columns // 32))


def _to_int4(tensors: Tensors) -> None:
    for name in [n for n in tensors if ".experts." in n]:
        value = tensors.pop(name)
        matrix = quantize("int4", value.float()[None], group=32, scale_type="bfloat16")
        assert matrix.scales is not None
        stem = name.removesuffix(".weight")
        tensors[f"{stem}.weight_packed"] = matrix.data[0]
        tensors[f"{stem}.weight_scale"] = matrix.scales[0]
        tensors[f"{stem}.weight_shape"] = torch.tensor(value.shape, dtype=torch.int32)


def _fuse(tensors: Tensors) -> None:
    """Experts one by one -> experts.gate_up_proj [E, 2I, H] and experts.down_proj [E, H, I]."""
    prefixes = {n.partition(".experts.")[0] + ".experts" for n in tensors if ".experts." in n}
    for prefix in prefixes:
        parts = {
            leaf: torch.stack([tensors.pop(f"{prefix}.{e}.{leaf}.weight") for e in range(E)])
            for leaf in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{prefix}.gate_up_proj"] = torch.cat((parts["gate_proj"], parts["up_proj"]), 1)
        tensors[f"{prefix}.down_proj"] = parts["down_proj"]


def _to_mxfp4(tensors: Tensors) -> None:
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        matrix = quantize("mxfp4", tensors.pop(name).float().transpose(1, 2).contiguous())
        assert matrix.scales is not None
        tensors[f"{name}_blocks"] = matrix.data
        tensors[f"{name}_scales"] = matrix.scales
