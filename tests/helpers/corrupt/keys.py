"""Weights and configuration that do not belong together."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from tests.helpers.corrupt.case import Case
from tests.helpers.corrupt.folder import VOCAB, E, Folder, H, I, Tensors

EXPERTS = "model.layers.1.mlp.experts"
EXPERT = f"{EXPERTS}.2.up_proj.weight"
_AGAIN = "config.json belongs to it"


def _drop(part: str) -> Callable[[Folder], object]:
    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if part in n]:
            del tensors[name]

    return lambda folder: folder.weights(change)


def _extra_expert(tensors: Tensors) -> None:
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"{EXPERTS}.{E}.{leaf}.weight"] = tensors[f"{EXPERTS}.0.{leaf}.weight"].clone()


def _all_experts(tensors: Tensors, dtype: torch.dtype) -> None:
    tensors.update({n: t.to(dtype) for n, t in tensors.items() if ".experts." in n})


def _rename(tensors: Tensors) -> None:
    tensors[f"{EXPERTS}.2.w3.weight"] = tensors.pop(EXPERT)


def _no_tokenizer(folder: Folder) -> None:
    for file in folder.path.iterdir():
        if "token" in file.name:
            file.unlink()


def _small_vocabulary(folder: Folder) -> None:
    folder.weights(
        lambda t: t.update({n: t[n][:200] for n in ("lm_head.weight", "model.embed_tokens.weight")})
    )
    folder.config(vocab_size=200)


def _one_expert_fused(folder: Folder) -> None:
    folder.weights(lambda t: t.update({f"{EXPERTS}.gate_up_proj": torch.ones(E, 2 * I, H)}))


def _other_tokenizer(folder: Folder) -> None:
    file = folder.path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = {}
    file.write_text(json.dumps(content)[:-40])


KEYS: list[Case] = [
    Case(
        "expert missing", "bf16", _drop(f"{EXPERTS}.5."), ["lacks experts", f"{EXPERTS}.5.down_proj.weight"]
    ),
    Case("projection missing", "bf16", _drop(EXPERT), ["lacks experts", f"missing: {EXPERT}", "8 experts"]),
    Case(
        "many experts missing",
        "bf16",
        _drop(".down_proj.weight"),
        ["lacks experts", f"{EXPERTS}.0.down_proj.weight, {EXPERTS}.1.down_proj.weight", "(16 in all)"],
    ),
    Case(
        "expert too many",
        "bf16",
        lambda f: f.weights(_extra_expert),
        ["more experts than its configuration", f"{EXPERTS}.8.down_proj.weight", "8 experts"],
    ),
    Case(
        "expert of another shape",
        "bf16",
        lambda f: f.tensor(EXPERT, lambda t: t[:-4]),
        ["mixed shapes", EXPERT, "found [28, 64]", "required [32, 64]"],
    ),
    Case(
        "expert of another type",
        "bf16",
        lambda f: f.tensor(EXPERT, lambda t: t.float()),
        ["mixed types", EXPERT, "found 7 of BF16, 1 of F32"],
    ),
    Case("expert under another name", "bf16", lambda f: f.weights(_rename), ["mixed names", "w3"]),
    Case(
        "experts in F16",
        "bf16",
        lambda f: f.weights(lambda t: _all_experts(t, torch.float16)),
        ["format that is not read", f"{EXPERTS}.0.gate_proj.weight", "found F16"],
    ),
    Case("experts fused and one by one", "bf16", _one_expert_fused, ["mixes fused and per-expert"]),
    Case(
        "layer missing",
        "bf16",
        _drop("layers.2."),
        ["layers that have routed experts", "without: [2]"],
    ),
    Case(
        "layer too many",
        "bf16",
        lambda f: f.config(num_hidden_layers=4),
        ["layers that have routed experts", "without: [3]"],
    ),
    Case(
        "layer dense by configuration",
        "bf16",
        lambda f: f.config(first_k_dense_replace=2),
        ["layers that have routed experts", "unexpected: [1]"],
    ),
    Case(
        "attention weight missing",
        "bf16",
        _drop("model.layers.2.self_attn.o_proj.weight"),
        ["lacks weights of the model", "missing: model.layers.2.self_attn.o_proj.weight"],
    ),
    Case(
        "attention weight of another shape",
        "bf16",
        lambda f: f.tensor("model.layers.2.self_attn.o_proj.weight", lambda t: t[:-1]),
        ["disagree about a shape", "layers.2.self_attn.o_proj.weight", "found [63, 48]", "required [64, 48]"],
    ),
    Case(
        "weights that no module takes",
        "bf16",
        lambda f: f.weights(lambda t: t.update({"model.layers.1.self_attn.q_norm.weight": torch.ones(8)})),
        ["no place for", "unexpected: model.layers.1.self_attn.q_norm.weight", "model-0000"],
    ),
    Case("head missing", "bf16", _drop("lm_head.weight"), ["lacks weights", "missing: lm_head.weight"]),
    Case(
        "embedding missing",
        "bf16",
        _drop("embed_tokens"),
        ["lacks weights", "missing: model.embed_tokens.weight"],
    ),
    Case(
        "config without experts",
        "bf16",
        lambda f: f.config(("n_routed_experts",)),
        ["no routed experts", "{model}/config.json"],
    ),
    Case(
        "config with more experts",
        "bf16",
        lambda f: f.config(n_routed_experts=16),
        ["lacks experts", f"{EXPERTS}.10.down_proj.weight", "16 experts", _AGAIN],
    ),
    Case(
        "config with another hidden size",
        "bf16",
        lambda f: f.config(hidden_size=128),
        ["hidden size", "found 64 in the weights", "required 128"],
    ),
    Case(
        "config with another expert size",
        "bf16",
        lambda f: f.config(moe_intermediate_size=64),
        ["intermediate size of the experts", "found 32", "required 64"],
    ),
    Case(
        "config with a larger vocabulary",
        "bf16",
        lambda f: f.config(vocab_size=VOCAB + 64),
        ["disagree about a shape", "weight", "found [400, 64]", "required [464, 64]"],
    ),
    Case(
        "config of another family",
        "bf16",
        lambda f: f.config(model_type="deepseek_v99", architectures=["X"]),
        ["deepseek_v99", "config.json"],
    ),
    Case("tokenizer missing", "bf16", _no_tokenizer, ["tokenizer", "{model}"]),
    Case("tokenizer damaged", "bf16", _other_tokenizer, ["tokenizer", "{model}"]),
    Case("tokenizer larger than the embedding", "bf16", _small_vocabulary, ["tokenizer does not belong"]),
    Case(
        "fused projection missing",
        "fused",
        _drop("model.layers.2.mlp.experts.down_proj"),
        ["lacks experts", "missing: model.layers.2.mlp.experts.down_proj"],
    ),
    Case(
        "fused projection of another shape",
        "fused",
        lambda f: f.tensor("model.layers.0.mlp.experts.gate_up_proj", lambda t: t[:, :-2]),
        ["shapes that do not fit together", "[8, 62, 64]"],
    ),
    Case(
        "fused with fewer experts",
        "fused",
        lambda f: f.tensor("model.layers.2.mlp.experts.down_proj", lambda t: t[:-1]),
        ["mixed shapes", "model.layers.2.mlp.experts.down_proj", "found [7, 64, 32]", "required [8, 64, 32]"],
    ),
]
