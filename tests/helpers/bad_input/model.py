"""Checkpoints that cannot be trained, or are damaged."""

from __future__ import annotations

import shutil

import torch

from tests.helpers.bad_input.place import TINY, VOCAB, Case, Place, truncate

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def _corrupt_header(place: Place) -> None:
    file = place.model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:24] = b"not json at all!"
    file.write_bytes(bytes(content))


def _same_shard_twice(place: Place) -> None:
    first, second = place.shards()
    shutil.copy(first, second)


def _index(place: Place, text: str) -> None:
    place.shards()
    (place.model / "model.safetensors.index.json").write_text(text)


MODEL: list[Case] = [
    Case(
        "model directory missing",
        "data=demo model.path={dir}/absent",
        ["model directory does not exist", "{dir}/absent", "give model.path a Hugging Face checkpoint"],
    ),
    Case(
        "model path is a file",
        "data=demo model.path={dir}/m",
        ["model directory does not exist", "{dir}/m", "give model.path a Hugging Face checkpoint"],
        lambda p: p.write("m", "x"),
    ),
    Case(
        "no config.json",
        TINY,
        ["no config.json", "{dir}/model", "directory that holds config.json"],
        lambda p: (p.model / "config.json").unlink(),
    ),
    Case(
        "config.json no JSON",
        TINY,
        ["config.json cannot be read", "line 1 column 2", "download config.json again"],
        lambda p: (p.model / "config.json").write_text("{hidden"),
    ),
    Case(
        "config.json a list",
        TINY,
        ["not a JSON object", "found list", "download config.json again"],
        lambda p: (p.model / "config.json").write_text("[1]"),
    ),
    Case(
        "config.json without hidden_size",
        TINY,
        ["lacks hidden_size", "point model.path"],
        lambda p: p.config(["hidden_size"]),
    ),
    Case(
        "hidden_size a word",
        TINY,
        ["hidden_size", "found 'wide'", "integer of at least 1", "download config.json again"],
        lambda p: p.config(hidden_size="wide"),
    ),
    Case(
        "a dense model",
        TINY,
        ["no routed experts", "model_type llama", "choose a MoE checkpoint"],
        lambda p: p.config(["n_routed_experts"], model_type="llama"),
    ),
    Case(
        "more experts per token than experts",
        TINY,
        ["num_experts_per_tok is larger", "found 99", "at most 8", "correct config.json"],
        lambda p: p.config(num_experts_per_tok=99),
    ),
    Case(
        "unknown model_type",
        TINY,
        ["'deepseek_v99'", "config.json", "a family that the installed transformers knows"],
        lambda p: p.config(model_type="deepseek_v99", architectures=["X"]),
    ),
    Case(
        "experts with another activation",
        TINY,
        ["the activation 'gelu'", "known: silu", "use another checkpoint"],
        lambda p: p.config(hidden_act="gelu"),
    ),
    Case(
        "config.json names an unknown dtype",
        TINY,
        ["dtype in the model's config.json", "found int8", "saved in bfloat16"],
        lambda p: p.config(dtype="int8"),
    ),
    Case(
        "no weights",
        TINY,
        ["no safetensors weights", "no weight files", "download its safetensors files"],
        lambda p: (p.model / "model.safetensors").unlink(),
    ),
    Case(
        "weights only as pytorch_model.bin",
        TINY,
        ["no safetensors weights", "found pytorch_model.bin", "save_pretrained"],
        lambda p: (p.model / "model.safetensors").rename(p.model / "pytorch_model.bin"),
    ),
    Case(
        "index names an absent shard",
        TINY,
        [
            "names shards that are absent",
            "model.safetensors.index.json",
            "found model-00002-of-00002.safetensors",
            "copy the missing files",
        ],
        lambda p: p.shards()[1].unlink(),
    ),
    Case(
        "index is no JSON",
        TINY,
        ["checkpoint index cannot be read", "index.json", "download the checkpoint again"],
        lambda p: _index(p, "{"),
    ),
    Case(
        "index without weight_map",
        TINY,
        ["no weight_map", "index.json", "download the checkpoint again"],
        lambda p: _index(p, "{}"),
    ),
    Case(
        "index and shards of two checkpoints",
        TINY,
        [
            "holds tensors twice",
            "lm_head.weight (model-00001-of-00002",
            "remove files left from another checkpoint",
        ],
        _same_shard_twice,
    ),
    Case(
        "weights truncated",
        TINY,
        [
            "truncated",
            "{dir}/model/model.safetensors",
            "bytes; required",
            "download the checkpoint again",
        ],
        lambda p: truncate(p.model / "model.safetensors"),
    ),
    Case(
        "weights empty",
        TINY,
        ["truncated or no safetensors", "found 0 bytes", "download the checkpoint again"],
        lambda p: (p.model / "model.safetensors").write_bytes(b""),
    ),
    Case(
        "weights with a corrupt header",
        TINY,
        ["safetensors header is damaged", "{dir}/model/model.safetensors", "download the checkpoint again"],
        _corrupt_header,
    ),
    Case(
        "mixed expert shapes",
        TINY,
        ["mixed shapes", EXPERT, "found [20, 48]", "required [24, 48]", "config.json belongs to it"],
        lambda p: p.tensor(EXPERT, lambda t: t[:-4]),
    ),
    Case(
        "mixed expert types",
        TINY,
        ["mixed types", EXPERT, "1 of BF16, 7 of F32", "kt_ray.tools convert"],
        lambda p: p.tensor(EXPERT, lambda t: t.bfloat16()),
    ),
    Case(
        "an expert missing",
        TINY,
        [
            "lacks experts",
            f"missing: {EXPERT}",
            "8 experts with gate_proj, up_proj, down_proj in each of 2 layers",
            "download the checkpoint again",
        ],
        lambda p: p.weights(lambda t: t.pop(EXPERT)),
    ),
    Case(
        "experts FP8",
        TINY,
        [
            "scales do not fit together",
            "(F8_E4M3 without scales)",
            "config.json belongs to it",
        ],
        lambda p: p.experts(lambda t: t.to(torch.float8_e4m3fn)),
    ),
    Case(
        "experts FP8 with scales",
        TINY,
        [
            "scales do not fit together",
            f"{EXPERT}_scale_inv (no weight)",
            "config.json belongs to it",
        ],
        lambda p: p.weights(lambda t: t.update({EXPERT + "_scale_inv": torch.ones(1, 1)})),
    ),
    Case(
        "experts AWQ by config",
        TINY,
        ["uint4 in the packing of awq, version gemv", "use the model's BF16 checkpoint", "mode=plan"],
        lambda p: p.config(quantization_config={"quant_method": "awq", "version": "gemv"}),
    ),
    Case(
        "experts F16",
        TINY,
        ["format that is not read from checkpoints", "found F16", "kt_ray.tools convert"],
        lambda p: p.experts(lambda t: t.half()),
    ),
    Case(
        "fewer experts than config",
        TINY,
        [
            "lacks experts",
            "experts.10.down_proj",
            "16 experts with",
            "config.json belongs to it",
        ],
        lambda p: p.config(n_routed_experts=16),
    ),
    Case(
        "more experts than config",
        TINY,
        [
            "more experts than its configuration",
            "experts.4.down_proj",
            "4 experts with",
            "config.json belongs to it",
        ],
        lambda p: p.config(n_routed_experts=4),
    ),
    Case(
        "more layers than weights",
        TINY,
        ["disagree about the layers", "without: [3, 4]", "config.json belongs to it"],
        lambda p: p.config(num_hidden_layers=5),
    ),
    Case(
        "attention weight missing",
        TINY,
        [
            "lacks weights of the model",
            "missing: model.layers.2.self_attn.o_proj.weight",
            "download the checkpoint again",
        ],
        lambda p: p.weights(lambda t: t.pop("model.layers.2.self_attn.o_proj.weight")),
    ),
    Case(
        "another vocabulary in config.json",
        TINY,
        [
            "disagree about a shape",
            "lm_head.weight",
            "found [400, 48]",
            "required [464, 48]",
            "config.json belongs to it",
        ],
        lambda p: p.config(vocab_size=VOCAB + 64),
    ),
    Case(
        "attention FP8",
        TINY,
        ["scales do not fit together", "o_proj.weight (F8_E4M3 without scales)", "config.json belongs to it"],
        lambda p: p.tensor("model.layers.2.self_attn.o_proj.weight", lambda t: t.to(torch.float8_e4m3fn)),
    ),
    Case(
        "unknown attention",
        TINY + " model.attn_implementation=flashy",
        [
            "model.attn_implementation=flashy",
            "sdpa or eager",
            "set model.attn_implementation to one of these",
        ],
    ),
    Case(
        "unknown dtype",
        TINY + " model.dtype=float8",
        ["model.dtype=float8", "auto or bfloat16 or float32", "set model.dtype="],
    ),
]
