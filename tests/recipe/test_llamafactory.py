"""A LLaMA-Factory YAML as overrides: fields, defaults, what is refused and ignored."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from kt_ray.recipe import with_recipe
from kt_ray.recipe.field_table import field_table
from tests.helpers.composing import compose
from tests.helpers.recipes import HERE, recipe, refused, values

EXAMPLES = sorted(HERE.glob("*_lora_*.yaml"))


def composed(path: Path, *more: str) -> Config:
    return compose(with_recipe([f"recipe={path}", "mode=plan", *more], io.StringIO()))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_compose(path: Path) -> None:
    config = composed(path)
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert config.trainer.stage == given["stage"]
    assert config.lora.rank == given["lora_rank"] and config.lora.experts
    assert config.lora.alpha == given.get("lora_alpha", 2 * given["lora_rank"])
    assert config.data.max_length == given["cutoff_len"]
    assert config.optim.lr == pytest.approx(given["learning_rate"])
    assert config.trainer.batch_size == given["gradient_accumulation_steps"]
    assert config.trainer.micro_batch_size == 1
    assert config.trainer.epochs == given["num_train_epochs"]
    assert config.model.path == f"hf://{given['model_name_or_path']}"
    assert Path(config.run.root, config.run.name or "") == Path(given["output_dir"]).absolute()


def test_an_adapter_brings_its_own_settings(tmp_path: Path) -> None:
    """As in LLaMA-Factory, the recipe's are not looked at. Its reference is another, which is said."""
    fields = {"lora_rank": 64, "lora_alpha": 3, "use_rslora": True, "lora_target": "q_proj,v_proj"}
    path = recipe(tmp_path, **fields, stage="dpo", adapter_name_or_path="saves/x")
    said = io.StringIO()
    lora = compose(with_recipe([f"recipe={path}", "mode=plan", "data.path=x.jsonl"], said)).lora
    assert (lora.rank, lora.alpha, lora.rslora, lora.target_modules) == (8, 16.0, False, "auto")
    assert lora.adapter == str(Path("saves/x").absolute()) and not lora.experts
    assert "the reference is model and adapter; there it is the model alone" in said.getvalue()
    new = "also where that adapter has none, which there stay without"  # no adapter is looked into
    assert new not in said.getvalue()
    path = recipe(tmp_path, adapter_name_or_path="saves/x")
    assert "lora.experts=true" in with_recipe([f"recipe={path}"], said) and new in said.getvalue()


def test_every_field_of_the_examples_is_in_the_table() -> None:
    for path in EXAMPLES:
        assert set(yaml.safe_load(path.read_text(encoding="utf-8"))) <= set(field_table())


def test_absent_fields_are_llamafactorys_defaults(tmp_path: Path) -> None:
    got = values(tmp_path)
    assert got["lora.rank"] == 8 and got["lora.alpha"] == 16
    assert got["optim.lr"] == 5e-5 and got["optim.schedule"] == "linear" and got["optim.warmup"] == 0
    assert got["trainer.epochs"] == 3 and got["trainer.batch_size"] == 8 == got["trainer.micro_batch_size"]
    assert got["data.max_length"] == 2048 and got["data.eval_fraction"] == 0 and got["seed"] == 42
    assert got["trainer.save_every"] == 500 and got["trainer.keep_checkpoints"] == 0
    assert got["trainer.eval_every"] == 0 and not got["data.packing"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"use_rslora": True}, {"lora.rslora": True}),
        ({"loraplus_lr_ratio": 16.0}, {"optim.lora_plus_ratio": 16}),
        (
            {"lora_target": "q_proj,v_proj"},
            {"lora.target_modules": ["q_proj", "v_proj"], "lora.experts": False},
        ),
        ({"lora_target": "q_proj,gate_proj,up_proj,down_proj"}, {"lora.experts": True}),
        ({"pissa_init": True, "lora_target": "q_proj"}, {"lora.init": "pissa_niter_16"}),
        ({"pissa_init": True, "pissa_iter": -1, "lora_target": "q_proj"}, {"lora.init": "pissa"}),
        ({"adapter_name_or_path": ["saves/x"], "lora_rank": 64}, {"lora.adapter": "saves/x"}),
        ({"use_muon": True}, {"optim": "muon"}),
        ({"adam_beta2": 0.95}, {"optim.betas": [0.9, 0.95]}),
        ({"warmup_ratio": 0.1}, {"optim.warmup": 0.1}),
        ({"warmup_ratio": 0.1, "warmup_steps": 20}, {"optim.warmup": 20}),
        (
            {"lr_scheduler_type": "constant", "warmup_ratio": 0.1},
            {"optim.schedule": "constant", "optim.warmup": 0},
        ),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5},
            {"optim.schedule": "constant", "optim.warmup": 5},
        ),
        (
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "learning_rate": 1e-4,
                "lr_scheduler_kwargs": {"min_lr": 1e-5},
            },
            {"optim.schedule": "cosine", "optim.min_lr_ratio": pytest.approx(0.1)},
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "max_steps": 100,
                "warmup_steps": 10,
                "lr_scheduler_kwargs": {
                    "num_stable_steps": 60,
                    "num_decay_steps": 30,
                    "decay_type": "1-sqrt",
                },
            },
            {"optim.schedule": "wsd", "optim.decay": 30, "optim.decay_shape": "1-sqrt"},
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "max_steps": 100,
                "lr_scheduler_kwargs": {"num_decay_steps": 67},
            },
            {"optim.decay": 67},
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "max_steps": 100, "warmup_steps": 11},
            {"optim.schedule": "wsd", "optim.decay": 60, "optim.warmup": 11},
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "warmup_ratio": 0.1},
            {"optim.schedule": "wsd", "optim.decay": pytest.approx(0.6, abs=2e-6)},
        ),
        ({"max_steps": 7}, {"trainer.max_steps": 7}),
        (
            {"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 50},
            {"data.eval_fraction": 0.1, "trainer.eval_every": 50},
        ),
        ({"val_size": 100, "eval_strategy": "steps"}, {"data.eval_fraction": 100}),
        ({"val_size": 0.1, "evaluation_strategy": "steps", "logging_steps": 5}, {"trainer.eval_every": 5}),
        ({"save_strategy": "no"}, {"trainer.save_every": 0}),
        ({"save_strategy": "epoch"}, {"trainer.save_every": "1epoch"}),
        ({"val_size": 0.1, "eval_strategy": "epoch"}, {"trainer.eval_every": "1epoch"}),
        ({"save_total_limit": 3}, {"trainer.keep_checkpoints": 3}),
        ({"resume_from_checkpoint": True, "overwrite_output_dir": True}, {"trainer.resume": "latest"}),
        ({"resume_from_checkpoint": "saves/x/checkpoint-5"}, {"trainer.resume": "saves/x/checkpoint-5"}),
        ({"overwrite_output_dir": True}, {"run.overwrite": True}),
        ({"report_to": ["wandb"]}, {"tracking": "wandb"}),
        ({"report_to": "tensorboard"}, {"tracking": "tensorboard"}),
        ({"report_to": "clearml"}, {"tracking": "jsonl"}),
        ({"report_to": ["wandb", "mlflow"]}, {"tracking.name": ["wandb", "mlflow"]}),
        (
            {"use_swanlab": True, "report_to": "none", "swanlab_project": "mine", "swanlab_workspace": "us"},
            {"tracking": "swanlab", "tracking.project": "mine", "tracking.entity": "us"},
        ),
        ({"neat_packing": True}, {"data.packing": True}),
        ({"mask_history": True}, {"data.train_on": "last"}),
        ({"disable_shuffling": True}, {"data.shuffle": False}),
        ({"flash_attn": "disabled"}, {"model.attn_implementation": "eager"}),
        ({"bf16": True}, {"model.dtype": "bfloat16"}),
        ({"moe_aux_loss_coef": 0.001}, {"trainer.aux_loss": 0.001}),
        ({"neftune_noise_alpha": 5}, {"trainer.neftune_noise_alpha": 5}),
        ({"ray_num_workers": 4, "per_device_train_batch_size": 2}, {"trainer.batch_size": 8}),
        ({"template": "qwen3"}, {"data.template": None}),
        ({"template": None}, {"data.template": None}),
        ({"template": "moonlight"}, {"data.template": "kimi"}),
        (
            {"template": "qwen", "default_system": "Be brief."},
            {"data.template": "qwen", "data.system": "Be brief."},
        ),
        (
            {"stage": "dpo", "dataset": "dpo_en_demo", "pref_loss": "ipo"},
            {"trainer.stage": "dpo", "preference.loss": "ipo"},
        ),
        (
            {"stage": "dpo", "dataset": "dpo_en_demo", "pref_loss": "simpo", "simpo_gamma": 1.0},
            {"trainer.stage": "dpo", "preference.loss": "simpo", "preference.gamma": 1.0},
        ),
        ({"stage": "dpo", "dataset": "dpo_en_demo", "pref_loss": "orpo"}, {"trainer.stage": "orpo"}),
        (
            {"stage": "kto", "dataset": "kto_en_demo", "kto_rejected_weight": 2.0},
            {"trainer.stage": "kto", "preference.undesirable_weight": 2.0},
        ),
        ({"stage": "pt", "dataset": "c4_demo"}, {"trainer.stage": "pt", "data.packing": True}),
        ({"kt_backend": "AMXINT4_SkipLoRA"}, {"rule.experts.backend": "AMXINT4", "lora.experts": False}),
        ({"kt_force_fused_expert_lora": True, "lora_target": "q_proj"}, {"lora.experts": True}),
        ({"kt_force_fused_expert_lora": True, "kt_freeze_experts": True}, {"lora.experts": False}),
        ({"kt_config": {"backend": "AMXINT8"}}, {"rule.experts.backend": "AMXINT8"}),
        ({"kt_config": {"kt_expert_weight_format": "fp8"}}, {"rule.experts.backend": "auto"}),
        ({"kt_config": {"kt_tp_enabled": True, "kt_threadpool_count": 2}}, {"rule.experts.sockets": 2}),
        ({"kt_config": {"kt_num_gpu_experts": 4}}, {"rule.experts.gpu_resident": 4}),
        (
            {"activation_policy": {"cpu": "recompute", "gpu": "recompute"}},
            {"rule.experts.activations": "recompute"},
        ),
        (
            {"kt_optimize_rule": "x/DeepSeek-V3-Chat-sft-amx-multi-gpu-4.yaml"},
            {"rule.stages": 4, "rule.experts.backend": "AMXBF16"},
        ),
        (
            {"kt_optimize_rule": str(HERE / "rules" / "two_gpus.yaml")},
            {"rule.layers": ["0-29", "30-60"], "rule.experts.backend": "AMXINT8"},
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_fields_become_options(tmp_path: Path, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    got = values(tmp_path, **fields)
    assert {key: got.get(key, "not set") for key in expected} == expected
    compose(with_recipe([f"recipe={tmp_path / 'recipe.yaml'}", "mode=plan"], io.StringIO()))


def test_an_optimize_rule_on_a_model_within_one_device(tmp_path: Path) -> None:
    rule = str(HERE / "rules" / "two_gpus.yaml")
    got = values(tmp_path, model_name_or_path="deepseek-ai/DeepSeek-V2-Lite", kt_optimize_rule=rule)
    assert got["rule.stages"] == 1 and "rule.layers" not in got  # its 27 layers are all on cuda:0


def test_patterns_arrive_as_they_were(tmp_path: Path) -> None:
    ranks = {"^model.layers.0.self_attn.q_proj": 4, "experts": 6, r"layers\.(1|2)\..*[qk]_proj$": 2}
    path = recipe(tmp_path, rank_pattern=ranks, alpha_pattern={"o_proj": 1.5})
    lora = compose(with_recipe([f"recipe={path}", "mode=plan"], io.StringIO())).lora
    assert lora.alpha_pattern == {"o_proj": 1.5} and lora.rank_pattern is not None
    assert [re.sub("^" + re.escape(r"\A"), "^", key) for key in lora.rank_pattern] == list(ranks)
    assert list(lora.rank_pattern.values()) == list(ranks.values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_mca": True}, "use_mca=true: not among the adapters"),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 10},
            "lr_scheduler_kwargs.num_decay_steps=null: leaves the length of the decay open",
        ),
        *(
            (
                {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": lengths} | more,
                "lr_scheduler_kwargs={num_decay_steps: ",
            )
            for lengths, more in (
                ({"num_decay_steps": 30}, {"max_steps": 100}),
                ({"num_decay_steps": 30}, {}),
                ({"num_decay_steps": "many"}, {"max_steps": 100}),
                ({"num_stable_steps": 60, "num_decay_steps": 30}, {"max_steps": 100}),
                ({"num_stable_steps": 60, "num_decay_steps": 30}, {}),
            )
        ),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern={q_proj: 8}: is no mapping of patterns to numbers"),
        ({"rank_pattern": {"[^a].*": 8}}, "rank_pattern={[^a].*: 8}: has a pattern that no key may be"),
        ({"fp16": True}, "fp16=true: computing in float16"),
        ({"quantization_bit": 4}, "quantization_bit=4: weights outside the experts"),
        ({"finetuning_type": "full"}, "finetuning_type=full: kt_ray trains LoRA"),
        ({"stage": "ppo"}, "stage=ppo: is none of sft, pt, dpo, kto"),
        ({"learning_rat": 1}, "learning_rat=1: is not known; did you mean learning_rate?"),
        ({"optim": "adamw_8bit"}, "optim=adamw_8bit: is none of"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type=polynomial"),
        ({"warmup_ratio": 1.0}, "warmup_ratio=1.0: is no share of the steps"),
        ({"warmup_ratio": 20}, "warmup_ratio=20: is no share of the steps"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "lr_scheduler_kwargs.num_cycles=2"),
        ({"template": "vicuna"}, "template=vicuna: has no counterpart"),
        ({"lora_target": "gate_proj"}, "lora_target=gate_proj: names only part"),
        ({"lora_target": False}, "lora_target=false: names no module"),
        (
            {"freeze_language_model": True},
            "freeze_language_model=true: the language model is what is trained",
        ),
        ({"train_on_prompt": True}, "train_on_prompt=true: answers are trained"),
        ({"eval_strategy": "epoch"}, "eval_strategy=epoch: evaluates, but"),
        ({"eval_strategy": "steps"}, "eval_strategy=steps: evaluates, but"),
        ({"do_eval": True}, "do_eval=true: needs eval_strategy"),
        ({"adapter_name_or_path": "saves/x,saves/y"}, "adapter_name_or_path=saves/x,saves/y"),
        ({"pref_ftx": 0.5}, "pref_ftx=0.5"),
        ({"kt_mode": "long_context"}, "kt_mode=long_context"),
        ({"kt_train_mode": "full"}, "kt_train_mode=full"),
        ({"kt_backend": "CUDA"}, "kt_backend=CUDA: is no backend"),
        ({"kt_config": {"kt_lora_rank": 16}, "lora_rank": 8}, "kt_lora_rank=16: differs from lora_rank=8"),
        ({"kt_optimize_rule": "rules/mine.yaml"}, "kt_optimize_rule=rules/mine.yaml: is not there"),
        (
            {"model_name_or_path": "Llama-3-8B"},
            "model_name_or_path=Llama-3-8B: is no directory",
        ),
        ({"learning_rate": "fast"}, "learning_rate=fast: is no number"),
        ({"bf16": "yes"}, "bf16=yes: is neither true nor false"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_mapped_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    assert any(line.startswith(message) for line in refused(tmp_path, **fields)), refused(tmp_path, **fields)


def test_fields_that_are_off_are_not_refused(tmp_path: Path) -> None:
    off = {
        "use_mca": False,
        "quantization_bit": None,
        "pref_ftx": 0.0,
        "fp16": False,
    }
    assert refused(tmp_path, **off) == []


def test_one_error_lists_every_field_and_options_lift_it(tmp_path: Path) -> None:
    path = recipe(tmp_path, template="vicuna", use_mca=True, do_eval=True)
    with pytest.raises(UserError) as error:
        with_recipe([f"recipe={path}"], io.StringIO())
    line = error.value.line()
    assert "3 fields of the recipe cannot be mapped" in line
    assert all(name in line for name in ("template=vicuna", "use_mca=true", "do_eval=true", str(path)))
    with pytest.raises(UserError, match=r"^1 field of the recipe cannot be mapped: use_mca=true"):
        with_recipe([f"recipe={path}", "data.template=null", "trainer.eval_every=0"], io.StringIO())


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"mask_history": True}, "there the last answer alone"),
        ({"template": "empty"}, "from BOS to EOS"),
        ({"template": "olmo"}, "turns end in a line break"),
    ],
)
def test_what_differs_is_said(tmp_path: Path, fields: dict[str, Any], note: str) -> None:
    out = io.StringIO()
    with_recipe([f"recipe={recipe(tmp_path, **fields)}"], out)
    assert note in out.getvalue()


def test_secrets_are_not_printed(tmp_path: Path) -> None:
    out = io.StringIO()
    with_recipe([f"recipe={recipe(tmp_path, hf_hub_token='hf_geheim')}"], out)
    assert "geheim" not in out.getvalue() and "hf_hub_token=***" in out.getvalue()


def test_an_accelerate_file_gives_devices_and_kt_config(tmp_path: Path) -> None:
    path, launcher = recipe(tmp_path, per_device_train_batch_size=1), HERE / "accelerate_kt_int8.yaml"
    out = io.StringIO()
    keys = with_recipe([f"recipe={path}", f"recipe.accelerate={launcher}"], out)
    assert "trainer.batch_size=4" in keys and "rule.experts.backend=AMXINT8" in keys
    assert "rule.experts.sockets=2" in keys and "num_processes=4" in out.getvalue()
    keys = with_recipe([f"recipe={path}", f"recipe.accelerate={launcher}", "recipe.devices=2"], io.StringIO())
    assert "trainer.batch_size=2" in keys


def test_every_mapped_field_says_what_it_becomes() -> None:
    for field in field_table().values():
        assert bool(field.keys) is (field.kind == "mapped"), field
        assert field.kind == "mapped" or re.search(r"\w", field.text), field
