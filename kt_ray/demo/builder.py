"""Put a small DeepSeek-V3 checkpoint into the cache directory, once.

demo_base is copied from the package; benchmarks/pretrain made it. The others are random:
every tensor is drawn from its own generator, seeded by (seed, name), and the checkpoint is written by
transformers' save_pretrained: per-expert keys in safetensors, BF16, as the family is released.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kt_ray.config.schema import ModelConfig
from kt_ray.demo.recipes import BASE, RECIPES, Recipe, base_path, persona_path
from kt_ray.disk import cache_root, made_once
from kt_ray.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

RESIDUAL = ("o_proj.weight", "down_proj.weight", "down_proj")  # what writes to the residual stream


def resolve_model_dir(model: ModelConfig) -> str:
    """The checkpoint directory that `model` means, building it on first use when `model.build` says so.

    Raises:
        UserError: neither model.path nor model.build is set, or the path is no directory.
    """
    if model.path is not None:
        path = Path(model.path).expanduser()
        if not path.is_dir():
            raise UserError(
                "the model directory does not exist",
                where="model.path",
                observed=path,
                remedy="give model.path a Hugging Face checkpoint directory (config.json, *.safetensors), or "
                "hf://ORG/NAME to download it",
            )
        return str(path)
    if model.build is None:
        raise UserError(
            f"model {model.name!r} names no checkpoint",
            where="model.path",
            required="a directory with config.json and *.safetensors",
            remedy=f"add model.path=<directory of {model.name}>, or model.path=hf://ORG/NAME to download it, "
            "or take model=demo",
        )
    return ensure_demo_model(model.build, seed=model.seed, tokenizer_dir=model.tokenizer)


def ensure_demo_model(
    name: str = "demo",
    seed: int = 0,
    cache_dir: str | Path | None = None,
    tokenizer_dir: str | Path | None = None,
) -> str:
    """The directory of a locally built model; it is built if it is not there yet.

    Two builders may race: both results are the same bytes.

    Args:
        name: "demo_base", or a key of RECIPES.
        seed: decides every weight of a random model; demo_base has only the one it was trained with, 0.
        cache_dir: root of the cache; None = `cache_root()`.
        tokenizer_dir: a tokenizer to use (and copy) instead of the demo tokenizer; sets the vocabulary of a
            random model; demo_base knows only its own.

    Raises:
        UserError: unknown name, no tokenizer in `tokenizer_dir`, a cache that cannot be written, or another
            seed or tokenizer for demo_base.
    """
    root = Path(cache_dir) if cache_dir is not None else cache_root()
    if name == BASE:
        return _ensure_base(root, seed, tokenizer_dir)
    recipe = RECIPES.get(name)
    if recipe is None:
        raise UserError(
            "no such built-in model",
            where="model.build",
            observed=name,
            required=" or ".join((BASE, *RECIPES)),
            remedy="set model.build=demo_base, or give model.path a checkpoint",
        )
    source = Path(tokenizer_dir).expanduser() if tokenizer_dir is not None else None
    inputs = _tokenizer_bytes(source) if source else persona_path().read_bytes()
    target = root / "models" / f"{name}-seed{seed}-{recipe.fingerprint(seed, inputs)}"
    return str(made_once(target, "config.json", lambda scratch: _build(recipe, seed, source, scratch)))


def _ensure_base(root: Path, seed: int, tokenizer_dir: str | Path | None) -> str:
    """The pretrained base in the cache. Its directory is named by its bytes, so that an adapter's base
    never changes under it with another version of the package."""
    for key, given in (("model.seed", seed or None), ("model.tokenizer", tokenizer_dir)):
        if given is not None:
            raise UserError(
                "the demo's base is pretrained: its weights and its tokenizer belong together",
                where=key,
                observed=given,
                remedy=f"leave {key} out, or take random weights: model=demo_random",
            )
    digests = json.loads((base_path() / "pretrain.json").read_text(encoding="utf-8"))["sha256"]
    digest = hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()[:12]
    target = root / "models" / f"{BASE}-{digest}"
    return str(made_once(target, "config.json", lambda scratch: _copy_base(digests, scratch)))


def _copy_base(digests: dict[str, str], out: Path) -> None:
    for source in sorted(base_path().iterdir()):
        data = source.read_bytes()
        if source.name in digests and hashlib.sha256(data).hexdigest() != digests[source.name]:
            raise UserError(
                "the demo's base model is damaged",
                where=str(source),
                observed=f"{len(data)} bytes with another SHA-256",
                required=digests[source.name],
                remedy="install kt_ray again",
            )
        (out / source.name).write_bytes(data)


def _tokenizer_bytes(source: Path) -> bytes:
    """A digest of the tokenizer's files, for the directory name."""
    suffixes = {".json", ".txt", ".model", ".jinja"}
    names = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
    files = (
        sorted(p for p in source.iterdir() if p.suffix in suffixes and p.name.startswith(names))
        if source.is_dir()
        else []
    )
    if not files:
        raise UserError(
            "no tokenizer found",
            where="model.tokenizer",
            observed=source,
            required="a directory with tokenizer.json (or vocab and merges) and tokenizer_config.json",
            remedy="point model.tokenizer at a tokenizer directory, or leave it out for the demo tokenizer",
        )
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


def _build(recipe: Recipe, seed: int, tokenizer_dir: Path | None, out: Path) -> None:
    import torch

    from kt_ray.demo.tokenizer import train_tokenizer

    tokenizer: Any
    if tokenizer_dir is None:
        tokenizer = train_tokenizer(persona_path(), recipe.vocab)
    else:
        from kt_ray.data.tokenizer_files import load_tokenizer

        tokenizer = load_tokenizer(str(tokenizer_dir))
    save_model(new_model(recipe, tokenizer, seed, torch.bfloat16), tokenizer, out)


def new_model(recipe: Recipe, tokenizer: Any, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """A DeepSeek-V3 of the recipe's dimensions and the tokenizer's vocabulary, drawn from `seed`.

    Parameters are of `dtype`; buffers stay float32, as the family releases the correction bias.
    """
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **recipe.config,
        vocab_size=-(-len(tokenizer) // 64) * 64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)
    model.to_empty(device="cpu")
    rotary: Any = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config)  # its frequencies are no part of a checkpoint: still empty
    _fill(model, recipe, seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def save_model(model: PreTrainedModel, tokenizer: Any, out: Path) -> None:
    """Write model (parameters rounded to BF16) and tokenizer into `out`."""
    import torch
    from transformers.utils import logging

    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(out)
    finally:
        if bars:
            logging.enable_progress_bar()
    tokenizer.save_pretrained(out)


def _fill(model: PreTrainedModel, recipe: Recipe, seed: int) -> None:
    """Draw every parameter and the router's correction bias from its own named stream."""
    import torch

    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("norm.weight", "layernorm.weight")):
                tensor.fill_(1.0)
            elif "inv_freq" not in name:
                tensor.copy_(_draw(tensor.shape, _std(name, tensor.shape, recipe), seed, name))


def _std(name: str, shape: torch.Size, recipe: Recipe) -> float:
    if name.endswith("embed_tokens.weight"):
        return recipe.embed_std
    if name.endswith("lm_head.weight"):
        return recipe.head_std
    if name.endswith("e_score_correction_bias"):
        return recipe.bias_std
    fan_in = float(shape[-1]) ** -0.5
    if name.endswith("mlp.gate.weight"):
        return recipe.router_gain * fan_in
    return recipe.linear_gain * fan_in * (recipe.residual_gain if name.endswith(RESIDUAL) else 1.0)


def _draw(shape: torch.Size, std: float, seed: int, name: str) -> torch.Tensor:
    import torch

    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(shape, generator=generator) * std
