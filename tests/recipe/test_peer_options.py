"""Options as people type them who know other programs: every answer is right, and none does harm."""

from __future__ import annotations

import re
import shlex

import pytest

from kt_ray import cli
from kt_ray.config.fields import fields
from kt_ray.config.mapping import REMOVED
from kt_ray.errors import BAD_INPUT
from kt_ray.recipe.field_table import field_table, names_elsewhere
from tests.helpers.composing import compose

# (as typed, what to write in its place). "" = nothing, with a reason that holds the third.
TYPED: list[tuple[str, str, str]] = [
    # Hugging Face
    ("learning_rate=1e-4", "optim.lr=0.0001", ""),
    ("num_train_epochs=3", "trainer.epochs=3", ""),
    ("per_device_train_batch_size=2", "trainer.micro_batch_size=2", "batch_size = this"),
    ("gradient_accumulation_steps=8", "", "a factor of the rows of a step"),
    ("save_steps=4", "trainer.save_every=4", ""),
    ("save_strategy=epoch", "trainer.save_every=1epoch", ""),
    ("save_total_limit=3", "trainer.keep_checkpoints=3", ""),
    ("eval_steps=10", "trainer.eval_every=10", ""),
    ("logging_steps=1", "trainer.log_every=1", ""),
    ("warmup_ratio=0.03", "optim.warmup=0.03", ""),
    ("lr_scheduler_type=cosine", "optim.schedule=cosine", ""),
    ("bf16=true", "model.dtype=bfloat16", ""),
    ("fp16=true", "", "float16 is not supported"),
    ("gradient_checkpointing=true", "", "the plan (mode=plan) decides what is recomputed"),
    ("optim=adamw_torch", "optim=adamw", ""),
    ("report_to=wandb", "tracking=wandb", ""),
    ("output_dir=out/first", "run.root=out run.name=first", ""),
    ("resume_from_checkpoint=true", "trainer.resume=latest", ""),
    ("neftune_noise_alpha=5", "trainer.neftune_noise_alpha=5", ""),
    # PEFT and TRL
    ("lora.r=8", "lora.rank=8", ""),
    ("lora.from=runs/a/adapter", "lora.adapter=runs/a/adapter", ""),
    ("r=8", "lora.rank=8", ""),
    ("lora_alpha=16", "lora.alpha=16", ""),
    ("target_modules=all-linear", "lora.target_modules=auto lora.experts=true", ""),
    ("target_modules=q_proj,v_proj", "", "a list is taken as it is"),
    ("use_dora=true", "lora.experts=false lora.dora=true", ""),
    ("rank_pattern={q_proj: 4}", "'lora.rank_pattern={q_proj:4}'", ""),
    (r"alpha_pattern={layers\\.\(0|1\)\\..*: 4}", r"'lora.alpha_pattern={layers\\.\(0|1\)\\..*:4}'", ""),
    ("dataset_name=trl-lib/Capybara", "data.path=hf://trl-lib/Capybara", ""),
    ("dataset_name=rows/mine.jsonl", "data.path=rows/mine.jsonl", ""),
    ("max_seq_length=2048", "data.max_length=2048", ""),
    ("beta=0.2", "preference.beta=0.2", ""),
    # LLaMA-Factory
    ("model_name_or_path=/models/moe", "model.path=/models/moe", ""),
    ("dataset=mine.jsonl", "data.path=mine.jsonl", ""),
    ("template=llama3", "data.template=llama3", ""),
    ("cutoff_len=2048", "data.max_length=2048", ""),
    ("stage=dpo", "trainer.stage=dpo", ""),
    ("finetuning_type=full", "", "kt_ray trains LoRA"),
    ("val_size=0.1", "data.eval_fraction=0.1", ""),
    ("deepspeed=ds_z3.json", "", "attention on the GPUs, experts in host memory"),
    ("kt_num_gpu_experts=4", "rule.experts.gpu_resident=4", ""),
    # Axolotl
    ("base_model=./moe", "model.path=./moe", ""),
    ("base_model=Qwen/Qwen3-30B-A3B", "model=Qwen/Qwen3-30B-A3B", "from the hub"),
    ("model_name_or_path=my-lab/moe@v2", "model=my-lab/moe@v2", "from the hub"),
    ("adapter=runs/a", "", "generate.adapter here, or lora.adapter in training"),
    ("lora_target_linear=true", "lora.target_modules=auto lora.experts=true", ""),
    ("lora_target_linear=false", "", "a list is taken as it is"),
    ("sequence_len=4096", "data.max_length=4096", ""),
    ("sample_packing=true", "data.packing=true", ""),
    ("num_epochs=2", "trainer.epochs=2", ""),
    ("optimizer=adamw_8bit", "", "adamw_torch"),
    ("saves_per_epoch=2", "", "epoch → 1epoch"),
    ("val_set_size=500", "data.eval_fraction=500", ""),
    ("adapter=qlora", "", "kt_ray trains LoRA"),
    ("rl=dpo", "trainer.stage=dpo", ""),
    ("rl=orpo", "trainer.stage=orpo", ""),
    ("rl=simpo", "trainer.stage=dpo preference.loss=simpo", ""),
    ("wandb_project=moe", "tracking.project=moe", ""),
    # Unsloth
    ("load_in_4bit=true", "", "rule.experts.backend=AMXINT8"),
    ("use_gradient_checkpointing=unsloth", "", "the plan (mode=plan) decides what is recomputed"),
    ("random_state=3407", "seed=3407", ""),
    ("model_name=unsloth/Qwen3-30B-A3B", "model=unsloth/Qwen3-30B-A3B", ""),
    ("model-name=./moe", "model.path=./moe", ""),
    # slips of the hand
    ("mod=plan", "mode=plan", ""),
    ("lr=1e-4", "optim.lr=0.0001", ""),
    ("trainer.learning_rate=1e-4", "optim.lr=0.0001", ""),
    ("learing_rate=1e-4", "optim.lr=0.0001", ""),
    ("model_path=/models/moe", "model.path=/models/moe", ""),
    ("datapath=mine.jsonl", "data.path=mine.jsonl", ""),
    ("run_name=first", "run.name=first", ""),
    ("--lora_r=8", "lora.rank=8", ""),
]


def _answer(typed: str, capfd: pytest.CaptureFixture[str]) -> str:
    assert cli.main([typed]) == BAD_INPUT
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err.strip()


@pytest.mark.parametrize(("typed", "written", "reason"), TYPED, ids=[typed for typed, _, _ in TYPED])
def test_every_answer_is_right(
    typed: str, written: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(TYPED) >= 40
    error = _answer(typed, capfd)
    assert reason in error, error
    proposed = re.search(r"To fix: write (.*)$", error)
    assert (proposed[1] if proposed else "") == written, error
    if not written.startswith(("model.path", "data.path")):
        needed = {"model=": "data=demo", "preference.": "trainer.stage=dpo"}
        others = [option for key, option in needed.items() if written.startswith(key)]
        compose([*others, *shlex.split(written)])  # what is proposed works


def test_all_of_a_command_line_are_answered_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    typed = [
        "learning_rate=1e-4",
        "lora_r=8",
        "bf16=true",
        "fp16=true",
        "trainer.max_steps=3",
        "hub_token=abc",
    ]
    assert cli.main(typed) == BAD_INPUT
    error = capfd.readouterr().err
    assert "write optim.lr=0.0001 lora.rank=8 model.dtype=bfloat16; leave out fp16" in error
    assert "trainer.max_steps" not in error and "abc" not in error


def test_a_models_name_among_others_is_no_label(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model_name=unsloth/moe", "learning_rate=1e-4", "data=demo"]) == BAD_INPUT
    assert "write model=unsloth/moe optim.lr=0.0001" in capfd.readouterr().err


@pytest.mark.parametrize("mode", ["chat", "predict"])
@pytest.mark.parametrize("typed", ["adapter=runs/a", "adapter=mine", "adapter_path=runs/a"])
def test_an_adapter_that_is_asked(mode: str, typed: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([f"mode={mode}", typed]) == BAD_INPUT
    written = f"generate.adapter={typed.partition('=')[2]}"
    assert capfd.readouterr().err.strip().endswith(f"To fix: write {written}")
    compose([f"mode={mode}", written])


def test_an_adapter_that_is_served_has_a_name(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mode=serve", "adapter=runs/a"]) == BAD_INPUT
    assert capfd.readouterr().err.strip().endswith("To fix: write 'serve.adapters={NAME:runs/a}'")
    compose(["mode=serve", "serve.adapters={mine: runs/a}"])


def test_an_adapter_with_no_mode_may_be_asked_or_trained(capfd: pytest.CaptureFixture[str]) -> None:
    error = _answer("adapter=runs/a", capfd)
    assert "resume=runs/a mode=chat" in error and error.endswith("to train it further, lora.adapter=runs/a")


def test_a_name_from_elsewhere_in_a_recipe_is_explained() -> None:
    from kt_ray.recipe.llamafactory import read_field

    (refusal,) = (r for r in read_field("sequence_len", 4096).refused if r.field.startswith("sequence_len"))
    assert refusal.reason == "is not known; did you mean cutoff_len?"


def test_names_from_elsewhere_mean_fields_or_options_and_are_none_themselves() -> None:
    names = names_elsewhere()
    assert set(names.values()) <= {*field_table(), *fields()}
    assert not set(names) & {*field_table(), *fields(), *REMOVED}
