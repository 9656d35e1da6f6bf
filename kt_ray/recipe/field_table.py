"""Every field of a LLaMA-Factory training YAML that is known here, and what becomes of it.

A field is mapped (to options of kt_ray), ignored (with the reason) or fixed (only some values are accepted,
usually "off"; the reason is part of the error). A field in no row is refused by name. Names and meanings come
from LLaMA-Factory's argument classes, transformers' TrainingArguments and the KTransformers fine-tuning
configuration, as published. docs/recipes.md is made from this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

OFF = (False, None, 0, "", "none", "None")
Values = tuple[Any, ...]


@dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
        name: in the YAML.
        section: heading under which the documentation lists it.
        kind: "mapped", "ignored" or "fixed".
        keys: options that it becomes (mapped).
        text: how it is mapped, why it is ignored, or why other values are refused.
        values: what a fixed field may be.
    """

    name: str
    section: str
    kind: str
    keys: tuple[str, ...] = ()
    text: str = ""
    values: Values = OFF

    def accepts(self, value: Any) -> bool:
        """Whether a fixed field may have `value`."""
        return value is None or any(
            value == v and isinstance(value, bool) is isinstance(v, bool) for v in self.values
        )


def _mapped(section: str, *rows: tuple[str, str, str]) -> Iterator[Field]:
    for name, keys, text in rows:
        yield Field(name, section, "mapped", tuple(keys.split()), text)


def _ignored(section: str, reason: str, names: str) -> Iterator[Field]:
    for name in names.split():
        yield Field(name, section, "ignored", (), reason)


def _fixed(section: str, reason: str, names: str, values: Values = OFF) -> Iterator[Field]:
    for name in names.split():
        yield Field(name, section, "fixed", (), reason, values)


def _model() -> Iterator[Field]:
    yield from _mapped(
        "model",
        (
            "model_name_or_path",
            "model model.path",
            "a directory; a hub name of a model whose dimensions are known selects it by model=…, which is "
            "enough for mode=plan (to train, add model.path)",
        ),
        ("bf16", "model.dtype", "true = bfloat16; absent = the checkpoint's own type"),
        ("pure_bf16", "model.dtype", "as bf16; the adapter's master weights stay float32"),
        ("flash_attn", "model.attn_implementation", "auto, sdpa, fa2 → sdpa; disabled → eager"),
        ("moe_aux_loss_coef", "trainer.aux_loss", "over the whole step"),
    )
    text = "kt_ray executes no code from checkpoints or data sets"
    yield from _ignored("model", text, "trust_remote_code")
    yield from _ignored(
        "model", "the hub's token is read from HF_TOKEN", "hf_hub_token ms_hub_token om_hub_token"
    )
    yield from _ignored("model", "nothing is downloaded but data sets, to the hub's own cache", "cache_dir")
    yield from _ignored(
        "model",
        "the plan (mode=plan) decides what is recomputed and where memory goes",
        "low_cpu_mem_usage disable_gradient_checkpointing gradient_checkpointing "
        "gradient_checkpointing_kwargs use_reentrant_gc use_unsloth_gc offload_folder",
    )
    text = "kernels of another engine; the mathematics is the same"
    yield from _ignored("model", text, "use_unsloth enable_liger_kernel use_v1_kernels tf32 torch_compile "
                        "torch_compile_backend torch_compile_mode")  # fmt: skip
    text = "concerns inference only"
    yield from _ignored("model", text, "infer_backend infer_dtype use_kv_cache vllm_maxlen vllm_gpu_util "
                        "vllm_enforce_eager vllm_max_lora_rank vllm_config")  # fmt: skip
    yield from _ignored("model", "output of LLaMA-Factory", "print_param_status")
    yield from _fixed("model", "computing in float16 is not supported: set bf16", "fp16 fp16_full_eval")
    yield from _fixed("model", "the vocabulary stays the checkpoint's", "resize_vocab add_tokens "
                      "add_special_tokens new_special_tokens_config split_special_tokens")  # fmt: skip
    yield from _fixed("model", "answers are found by character offsets, which fast tokenizers have",
                      "use_fast_tokenizer", (True,))  # fmt: skip
    yield from _fixed("model", "a checkpoint directory has one version", "model_revision", ("main",))
    yield from _fixed("model", "positions are the checkpoint's own", "rope_scaling")
    yield from _fixed("model", "attention is the model's own", "shift_attn mixture_of_depths")
    yield from _fixed("model", "types are the model's own; adapters have float32 masters",
                      "upcast_layernorm upcast_lmhead_output")  # fmt: skip
    yield from _fixed("model", "training starts from the checkpoint with new adapters",
                      "train_from_scratch adapter_name_or_path adapter_folder")  # fmt: skip
    yield from _fixed(
        "model",
        "weights outside the experts are not quantised here; experts are, with rule.experts.backend=AMXINT8",
        "quantization_bit quantization_device_map fp8 fp8_backend fp8_enable_fsdp_float8_all_gather",
    )
    yield from _ignored("model", "has a meaning with quantization_bit only",
                        "quantization_method quantization_type double_quantization")  # fmt: skip


def _method() -> Iterator[Field]:
    yield from _mapped(
        "method",
        ("stage", "trainer.stage", "sft, pt, dpo, kto; dpo with pref_loss: orpo is orpo"),
        ("lora_rank", "lora.rank", "default 8"),
        ("lora_alpha", "lora.alpha", "default 2 · lora_rank"),
        ("lora_dropout", "lora.dropout", ""),
        (
            "lora_target",
            "lora.target_modules lora.experts",
            "all → auto and the routed experts (routers stay frozen); a list is taken as it is, and trains "
            "the routed experts where it names gate_proj, up_proj and down_proj (or w1, w2, w3)",
        ),
        ("use_rslora", "lora.rslora", ""),
        ("loraplus_lr_ratio", "optim.lora_plus_ratio", ""),
        ("pissa_init", "lora.init", "with pissa_iter; needs lora_target without the experts"),
        ("pissa_iter", "lora.init", "16 (default) → pissa_niter_16, -1 → pissa"),
    )
    yield from _fixed("method", "kt_ray trains LoRA", "finetuning_type", ("lora",))
    yield from _fixed("method", "this command trains", "do_train", (True,))
    yield from _fixed("method", "use mode=predict and mode=eval", "do_predict predict_with_generate")
    yield from _fixed("method", "not among the adapters of kt_ray", "use_dora additional_target "
                      "create_new_adapter use_llama_pro use_mca rank_pattern alpha_pattern")  # fmt: skip
    yield from _fixed("method", "not among the optimizers of kt_ray (adamw, deepspeed_cpu_adam, muon)",
                      "use_galore use_apollo use_badam use_adam_mini")  # fmt: skip
    yield from _fixed("method", "not among the losses of kt_ray", "use_dft_loss use_asft_loss use_eaft_loss")
    yield from _ignored("method", "embeddings have no adapters here", "loraplus_lr_embedding")
    yield from _ignored("method", "the adapter is always written for the unchanged base", "pissa_convert")
    yield from _ignored("method", "only text is trained", "freeze_vision_tower "
                        "freeze_multi_modal_projector freeze_language_model image_max_pixels "
                        "image_min_pixels video_max_pixels video_min_pixels")  # fmt: skip


def _preference() -> Iterator[Field]:
    yield from _mapped(
        "preference",
        ("pref_loss", "preference.loss", "sigmoid, hinge, ipo; orpo → trainer.stage=orpo"),
        ("pref_beta", "preference.beta", "default 0.1"),
        ("dpo_label_smoothing", "preference.label_smoothing", ""),
        ("kto_chosen_weight", "preference.desirable_weight", ""),
        ("kto_rejected_weight", "preference.undesirable_weight", ""),
    )
    yield from _fixed("preference", "not among the losses of kt_ray", "pref_ftx pref_bco_weight ld_alpha")
    text = "the reference is the model without adapters"
    yield from _fixed("preference", text, "ref_model ref_model_adapters ref_model_quantization_bit")
    yield from _ignored(
        "preference", "has a meaning with pref_loss: simpo only, which is refused", "simpo_gamma"
    )


def _data() -> Iterator[Field]:
    yield from _mapped(
        "data",
        ("dataset", "data.path data.sources data.format data.columns", "by dataset_info.json, see below"),
        ("dataset_dir", "data.path", "default data; ONLINE = names of the hub"),
        (
            "eval_dataset",
            "data.eval_path data.eval_split",
            "must have the format and columns of the (first) training set",
        ),
        ("template", "data.template model.chat_template", "see the table below"),
        ("default_system", "data.system", ""),
        ("cutoff_len", "data.max_length", "default 2048"),
        ("mask_history", "data.train_on", "true → last"),
        ("max_samples", "data.limit", "of each data set, as limit of each of data.sources"),
        ("mix_strategy", "data.sources", "weights; interleave_* need the rows of every set counted"),
        ("interleave_probs", "data.sources", "weights, with mix_strategy"),
        (
            "packing",
            "data.packing",
            "default: only for stage pt. Packed rows never see each other, as with neat_packing",
        ),
        ("neat_packing", "data.packing", ""),
        ("val_size", "data.eval_fraction", "a share; a number of rows is refused: set data.eval_fraction"),
        ("disable_shuffling", "data.shuffle", ""),
        ("group_by_length", "data.group_by_length", ""),
    )
    yield from _fixed("data", "answers are trained, not prompts", "train_on_prompt")
    yield from _fixed("data", "tokens saved by LLaMA-Factory are not read", "tokenized_path")
    yield from _fixed("data", "tools are written as the chat template does", "tool_format")
    yield from _fixed("data", "thoughts are trained where the answers hold them", "enable_thinking", (True,))
    yield from _fixed("data", "only text is trained", "media_dir")
    yield from _fixed("data", "held-out rows are one set", "eval_on_each_dataset")
    yield from _fixed("data", "padding is never trained", "ignore_pad_token_for_loss", (True,))
    text = "files are read whole; tokens are cached by content"
    yield from _ignored("data", text, "overwrite_cache preprocessing_batch_size preprocessing_num_workers "
                        "streaming buffer_size dataloader_num_workers dataloader_pin_memory "
                        "dataloader_prefetch_factor dataloader_persistent_workers data_shared_file_system "
                        "remove_unused_columns")  # fmt: skip
    yield from _fixed("data", "the last batch of an epoch is trained", "dataloader_drop_last")


def _train() -> Iterator[Field]:
    yield from _mapped(
        "training",
        (
            "per_device_train_batch_size",
            "trainer.micro_batch_size trainer.batch_size",
            "default 8; batch_size = this × gradient_accumulation_steps × data-parallel workers",
        ),
        ("gradient_accumulation_steps", "trainer.batch_size", "default 1"),
        ("learning_rate", "optim.lr", "default 5e-5"),
        ("num_train_epochs", "trainer.epochs", "default 3"),
        ("max_steps", "trainer.max_steps", "-1 = from the epochs"),
        (
            "lr_scheduler_type",
            "optim.schedule",
            "linear (default), cosine, constant (without warm-up), constant_with_warmup, inverse_sqrt, "
            "cosine_with_min_lr, warmup_stable_decay",
        ),
        (
            "lr_scheduler_kwargs",
            "optim.min_lr_ratio optim.decay optim.decay_shape",
            "min_lr, min_lr_rate, min_lr_ratio, num_decay_steps (without it two thirds of the steps after "
            "the warm-up), decay_type",
        ),
        ("warmup_ratio", "optim.warmup", ""),
        ("warmup_steps", "optim.warmup", "above 0, it goes before warmup_ratio"),
        ("optim", "optim", "adamw_torch, adamw_torch_fused, adamw_hf → adamw"),
        ("use_muon", "optim", "true → muon"),
        ("weight_decay", "optim.weight_decay", ""),
        ("adam_beta1", "optim.betas", ""),
        ("adam_beta2", "optim.betas", ""),
        ("adam_epsilon", "optim.eps", ""),
        ("max_grad_norm", "optim.max_grad_norm", "default 1"),
        ("seed", "seed", "default 42"),
        ("use_cpu", "rule.device", "true → cpu"),
    )
    yield from _fixed("training", "not supported", "neftune_noise_alpha label_smoothing_factor "
                      "auto_find_batch_size optim_args optim_target_modules ignore_data_skip")  # fmt: skip
    text = "one seed serves data, adapters and dropout"
    yield from _fixed("training", text, "data_seed")
    text = "placement is kt_ray's own: attention on the GPUs, experts in host memory (mode=plan shows it)"
    yield from _ignored("training", text, "deepspeed fsdp fsdp_config ddp_timeout ddp_find_unused_parameters "
                        "ddp_backend ddp_bucket_cap_mb ddp_broadcast_buffers local_rank accelerator_config "
                        "parallelism_config")  # fmt: skip
    text = "a step is a pure function of its rows and seeds; losses are means over its trained tokens"
    yield from _ignored("training", text, "full_determinism average_tokens_across_devices "
                        "torch_empty_cache_steps skip_memory_metrics")  # fmt: skip
    yield from _mapped(
        "training",
        ("ray_num_workers", "trainer.batch_size", "data-parallel workers, where recipe.devices is not given"),
    )
    text = "kt_ray asks Ray for what the plan needs"
    yield from _ignored("training", text, "resources_per_worker placement_strategy ray_run_name "
                        "ray_storage_path ray_storage_filesystem ray_init_kwargs master_addr "
                        "master_port")  # fmt: skip


def _output() -> Iterator[Field]:
    yield from _mapped(
        "output",
        ("output_dir", "run.root run.name", "its last part names the run"),
        ("overwrite_output_dir", "run.overwrite", "only what a run of kt_ray wrote there is deleted"),
        ("resume_from_checkpoint", "trainer.resume", "true → latest; a directory is one of kt_ray"),
        ("save_steps", "trainer.save_every", "default 500"),
        ("save_strategy", "trainer.save_every", "steps, no; epoch is refused: set trainer.save_every"),
        ("save_total_limit", "trainer.keep_checkpoints", "absent = all"),
        ("logging_steps", "trainer.log_every", ""),
        ("plot_loss", "tracking.plot", ""),
        ("report_to", "tracking", "wandb → wandb; none and others → jsonl (metrics.jsonl, loss.png)"),
    )
    text = "output of LLaMA-Factory; kt_ray writes metrics.jsonl, train.log and loss.png"
    yield from _ignored("output", text, "logging_dir logging_first_step logging_strategy "
                        "logging_nan_inf_filter log_level log_level_replica log_on_each_node "
                        "disable_tqdm run_name project "
                        "include_num_input_tokens_seen include_tokens_per_second "
                        "include_effective_tokens_per_second trackio_space_id")  # fmt: skip
    text = "swanlab is not a tracker of kt_ray"
    yield from _ignored("output", text, "use_swanlab swanlab_project swanlab_workspace swanlab_run_name "
                        "swanlab_mode swanlab_api_key swanlab_logdir swanlab_lark_webhook_url "
                        "swanlab_lark_secret")  # fmt: skip
    text = "checkpoints always hold what a resume needs; the adapter is safetensors"
    yield from _ignored("output", text, "save_only_model save_safetensors save_on_each_node")
    yield from _fixed("output", "upload the adapter with huggingface-cli", "push_to_hub export_dir")
    yield from _ignored("output", "has a meaning with push_to_hub only", "hub_model_id hub_token "
                        "hub_strategy hub_private_repo hub_always_push")  # fmt: skip


def _evaluation() -> Iterator[Field]:
    yield from _mapped(
        "evaluation",
        ("eval_strategy", "trainer.eval_every", "steps, no; epoch is refused: set trainer.eval_every"),
        ("evaluation_strategy", "trainer.eval_every", "the older name of eval_strategy"),
        ("eval_steps", "trainer.eval_every", "default logging_steps"),
        ("do_eval", "trainer.eval_every", "needs eval_strategy: steps; evaluation is also at start and end"),
        ("load_best_model_at_end", "trainer.save_best", ""),
        ("early_stopping_steps", "trainer.early_stopping", "evaluations without a lower held-out loss"),
    )
    text = "the best checkpoint is the one with the lowest held-out loss"
    yield from _fixed("evaluation", text, "metric_for_best_model", ("loss", "eval_loss"))
    yield from _fixed("evaluation", text, "greater_is_better")
    yield from _ignored("evaluation", "held-out rows go in micro-batches of trainer.micro_batch_size",
                        "per_device_eval_batch_size eval_accumulation_steps")  # fmt: skip
    yield from _ignored("evaluation", "held-out loss is measured at the start, too", "eval_on_start")
    yield from _ignored("evaluation", "training measures the held-out loss only", "compute_accuracy "
                        "eval_num_beams prediction_loss_only")  # fmt: skip
    yield from _fixed("evaluation", "evaluation begins with the run", "eval_delay")


def _ktransformers() -> Iterator[Field]:
    yield from _mapped(
        "ktransformers",
        (
            "kt_optimize_rule",
            "rule.experts.backend rule.stages rule.layers",
            "the file's expert backend and layers per device; of a file that is not there, what its name "
            "says (…-sft-amx-multi-gpu-4.yaml: AMXBF16 on 4 stages)",
        ),
        ("kt_config", "rule", "the fields below, in a mapping; also from recipe.accelerate=FILE"),
        (
            "kt_backend",
            "rule.experts.backend lora.experts",
            "AMXBF16, AMXINT8, AMXINT4, auto and AMXFP8 (the checkpoint's own format); …_SkipLoRA also "
            "leaves the experts without adapters",
        ),
        (
            "kt_expert_weight_format",
            "rule.experts.backend",
            "bf16, fp8, int8, where kt_backend is auto or absent",
        ),
        ("kt_threadpool_count", "rule.experts.sockets", "with kt_tp_enabled: expert actors"),
        ("kt_tp_enabled", "rule.experts.sockets", "true: kt_threadpool_count expert actors; false: 1"),
        ("kt_num_gpu_experts", "rule.experts.gpu_resident", ""),
        ("kt_cpu_activation", "rule.experts.activations", "retain or recompute"),
        ("kt_activation_policy", "rule.experts.activations", "its entry cpu"),
        ("activation_policy", "rule.experts.activations", "its entry cpu"),
        ("kt_freeze_experts", "lora.experts", "true → false"),
        ("kt_lora_rank", "lora.rank", "must agree with lora_rank"),
        ("kt_lora_alpha", "lora.alpha", "must agree with lora_alpha"),
    )
    yield from _ignored("ktransformers", "kt_ray is always on", "use_kt enabled")
    text = "every expert actor takes the physical cores of its socket; rule.experts.threads=N limits them"
    yield from _ignored("ktransformers", text, "cpu_infer kt_num_threads")
    text = "waves and rows follow from the batch and the memory there is"
    yield from _ignored("ktransformers", text, "chunk_size kt_max_cache_depth kt_model_max_length")
    yield from _ignored("ktransformers", "concerns inference only",
                        "kt_maxlen kt_use_cuda_graph kt_force_think")  # fmt: skip
    text = "experts stream from the checkpoint and are quantised on the way"
    yield from _ignored("ktransformers", text, "kt_weight_path kt_weight_lifecycle kt_non_expert_weight_path "
                        "kt_skip_expert_loading")  # fmt: skip
    yield from _ignored("ktransformers", "the plan decides where memory goes",
                        "kt_share_backward_bb kt_share_cache_pool")  # fmt: skip
    yield from _ignored("ktransformers", "adapters are written per expert, as PEFT names them",
                        "kt_force_fused_expert_lora")  # fmt: skip
    yield from _fixed("ktransformers", "attention is the model's own", "kt_mode mode", ("normal",))
    yield from _fixed("ktransformers", "kt_ray trains LoRA", "kt_train_mode", ("lora",))
    yield from _fixed("ktransformers", "kt_ray trains LoRA", "kt_full_weight_grad")
    yield from _fixed("ktransformers", "the routed experts are the checkpoint's own", "kt_use_lora_experts "
                      "kt_expert_checkpoint_path")  # fmt: skip
    yield from _ignored("ktransformers", "has a meaning with kt_use_lora_experts only",
                        "kt_lora_expert_num kt_lora_expert_intermediate_size")  # fmt: skip


# Fields that stand inside kt_config; there they may lack the prefix kt_.
KT_FIELDS = tuple(f.name for f in _ktransformers() if f.name.startswith("kt_") and f.name != "kt_config")

FIELDS: dict[str, Field] = {
    f.name: f
    for part in (_model, _method, _preference, _data, _train, _output, _evaluation, _ktransformers)
    for f in part()
}
