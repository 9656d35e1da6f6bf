"""Every family of docs/families.md that trains: what a run writes is read by everyone who is said to read it.

A tiny checkpoint, saved whole by transformers, other towers included, is prepared and run with a large change
on rows of unequal length; the adapter is read back by kt_ray, loaded by PEFT into its README's class, merged,
exported in every form, and every key of it passes SGLang's and vLLM's naming rules.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kt_ray.actors.cluster import ActorCluster
from kt_ray.adapter.adapter_file import Lora
from kt_ray.adapter.from_peft import AdapterReader
from kt_ray.adapter.peft_config import (
    TESTED,
    TEXT_ALONE,
    AdapterInfo,
    converts_keys,
    load_limits,
    module_of,
)
from kt_ray.batch import TokenLoss
from kt_ray.checkpoint.names import layer_of, one_expert
from kt_ray.config.lora_patterns import expert_lora
from kt_ray.config.schema import Config
from kt_ray.generate.generator import Generator
from kt_ray.generate.requests import Request, Sampling
from kt_ray.model.family import read_family
from kt_ray.runs.prepare import PreparedModel, prepare_model
from kt_ray.runs.saving import write_adapter
from kt_ray.tools.export import export
from kt_ray.tools.inspect import inspect
from kt_ray.tools.merge import merge
from tests.helpers.exhaustive import exhaustive, spread
from tests.helpers.families import save_whole, tiny_config, write_config
from tests.helpers.generation import answers, one_rounding, random_prompts
from tests.helpers.hf_reference import Row, random_rows
from tests.helpers.runs import by_row, config_for, local_cluster, one_pass, waves_of
from tests.model.test_families import documented

FAMILIES = ["kimi_k25", *sorted(name for name, (status, _) in documented().items() if status == "trains")]
ROWS = random_rows(4, lengths=(43, 30, 5, 5))  # one micro-batch: padded, unless that moves the model
# With few index heads scores tie, and which of them is chosen depends on the row's width; compressed keys are
# made of whole windows.
MOVED_BY_PADDING = {
    *("axk2", "deepseek_v32", "deepseek_v4", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4"),
    "mistral_large4",
}
PROMPTS = random_prompts((5, 9, 3))
# Gated delta rules: in chunks in a pass, token by token in an answer. Step-3.7's queries and keys are
# normed to twice the length of others' here, and its scores are as sharp.
GAPS = {"qwen3_next": 1e-4, "qwen3_5_moe": 1e-4, "qwen3_5_moe_text": 1e-4, "step3p7": 5e-5}
SCALE = 2.0  # lora.alpha / lora.rank of config_for


@dataclass
class Trained:
    """A base, its adapter, and what kt_ray computes with it."""

    family: str
    base: Path
    adapter: Path
    prepared: PreparedModel
    values: dict[str, Tensor]
    logits: list[Tensor]
    gaps: np.ndarray  # see sampler_gaps
    rounded: np.ndarray  # in bfloat16


@pytest.fixture(params=spread(FAMILIES, 10))
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trained]:
    yield train(request.param, tmp_path)


def train(family: str, tmp_path: Path, *overrides: str) -> Trained:
    base = write_config(tmp_path / "base", family)
    save_whole(base)
    if family == "kimi_k25":
        name_as_released(base)
    config = config_for(base, "rule=cpu_1worker_1socket", "trainer.micro_batch_size=4", *overrides)
    prepared = prepare_model(config, training=True)
    with local_cluster(base, config) as cluster:
        shapes = cluster.parameter_shapes()
        generator = torch.Generator().manual_seed(5)
        values = {n: torch.randn(*shape, generator=generator) * 0.1 for n, shape in sorted(shapes.items())}
        cluster.set_parameters(values)
        (moves,) = {f["padding_moves"] for f in cluster.info() if "padding_moves" in f}
        assert bool(moves) == (family in MOVED_BY_PADDING)
        waves = waves_of(ROWS, config, cluster.plan, unpadded=bool(moves))
        report = cluster.run_pass(one_pass(cluster, waves, "eval", logits=True))
        found = by_row(report.workers[-1].logits, waves[0])
        adapter = write_adapter(prepared, tmp_path / "adapter", cluster)
        compared = not overrides and family not in {*MOVED_BY_PADDING, "minimax"}
        gaps = sampler_gaps(cluster, config) if compared else np.zeros(1)
    rounded = bfloat16_gaps(base, values) if compared else np.zeros(1)
    own = [found[row.sample] for row in ROWS]
    return Trained(family, base, adapter, prepared, values, own, gaps, rounded)


def sampler_gaps(cluster: ActorCluster, config: Config) -> np.ndarray:
    """Differences of sampled tokens' log-probabilities, as drawn and in a pass of the trainer."""
    sampling = Sampling(max_new_tokens=6, temperature=1.0, seed=5, logprobs=0)
    with Generator(cluster, prefill_tokens=12) as generator:
        asked = [generator.submit(Request(prompt, sampling, True)) for prompt in PROMPTS]
        drawn = [answer.result(120) for answer in asked]
    whole = [[*prompt, *answer.tokens] for prompt, answer in zip(PROMPTS, drawn, strict=True)]
    waves = waves_of([Row(ids, ids, i) for i, ids in enumerate(whole)], config, cluster.plan, unpadded=True)
    spec = replace(one_pass(cluster, waves, "eval", number=9), objective=TokenLoss("cross_entropy"))
    passed = cluster.run_pass(spec).workers[cluster.coordinators[0]].token_logps
    gaps = []
    for group, found in zip(waves[0], passed, strict=True):
        for micro, logps in zip(group, found, strict=True):
            for row, n, logp in zip(micro.sample_ids, micro.lengths, logps, strict=True):
                own = [token.logprob for token in drawn[row].logprobs]
                gaps.append(np.abs(logp[n - 1 - len(own) : n - 1] - own))
    return np.concatenate(gaps)


def bfloat16_gaps(base: Path, values: dict[str, Tensor], *overrides: str) -> np.ndarray:
    """Not with torch's fused attention, which rounds the same tokens otherwise in a longer row."""
    options = ("model.dtype=bfloat16", "model.attn_implementation=eager", *overrides)
    config = config_for(base, "rule=cpu_1worker_1socket", "trainer.micro_batch_size=4", *options)
    with local_cluster(base, config) as cluster:
        cluster.set_parameters(values)
        return sampler_gaps(cluster, config)


def name_as_released(base: Path) -> None:
    """transformers saves Kimi-K2.5's layers as "blocks", which only its vision tower has."""
    tensors = load_file(base / "model.safetensors")
    renamed = {
        k.replace(".blocks.", ".layers.") if "language_model" in k else k: v for k, v in tensors.items()
    }
    save_file(renamed, base / "model.safetensors", {"format": "pt"})


def logits(model: Any, rows: Sequence[Row] = ROWS) -> list[Tensor]:
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0] for row in rows]


def distance(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


def named_class(adapter: Path) -> Any:
    """The auto class that the adapter's README names."""
    match = re.search(r"= (AutoModel\w+)\.from_pretrained", (adapter / "README.md").read_text())
    assert match is not None
    return getattr(transformers, match[1])


def in_peft(kind: Any, base: Path, adapter: Path) -> Any:
    model = kind.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns of keys that it leaves out
        # Not of these: docs/adapter.md says why.
        warnings.filterwarnings("ignore", message="The following .*_pattern keys did not match")
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        return PeftModel.from_pretrained(model, adapter).eval()


def read_back(adapter: Path, trained: Trained) -> None:
    lora, dims = trained.prepared.config.lora, trained.prepared.plan.dims
    reader = AdapterReader(str(adapter), str(trained.base))
    found = {name: torch.empty_like(value) for name, value in trained.values.items()}
    experts = {name: value for name, value in found.items() if one_expert(module_of(name))}
    reader.read_into(experts.items(), expert_lora(lora, dims.moe_layers, dims.num_experts))
    reader.read_into(((name, v) for name, v in found.items() if name not in experts), lora)
    for name, value in found.items():
        torch.testing.assert_close(value, trained.values[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", spread(sorted(MOVED_BY_PADDING), 2))
def test_sparse_attention_draws_as_it_trains(family: str, tmp_path: Path) -> None:
    """Every position is chosen: among scores that tie, the choice depends on a row's width."""
    base = write_config(tmp_path / "base", family, index_topk=64)
    save_whole(base)
    config = config_for(base, "rule=cpu_1worker_1socket", "trainer.micro_batch_size=4")
    with local_cluster(base, config) as cluster:
        assert sampler_gaps(cluster, config).max() < 1e-5
    assert one_rounding(bfloat16_gaps(base, {}))


@pytest.mark.parametrize("family", ["kimi_linear", "nemotron_h", "qwen4_exp"])
def test_a_stage_without_keys_draws_as_it_trains(family: str, tmp_path: Path) -> None:
    """Of linear layers alone: all of Kimi-Linear's here, the first two of the others' four."""
    base = write_config(tmp_path / "base", family)
    save_whole(base)
    config = config_for(base, "rule.stages=2", "trainer.micro_batch_size=4")
    with local_cluster(base, config) as cluster:
        assert sampler_gaps(cluster, config).max() < 1e-5


def test_what_is_written_is_read(trained: Trained, tmp_path: Path) -> None:
    assert trained.gaps.max() < GAPS.get(trained.family, 1e-5) and one_rounding(trained.rounded)
    read_back(trained.adapter, trained)  # as predict, eval, chat and serve do
    again = prepare_model(config_for(trained.base, f"lora.adapter={trained.adapter}"), training=True)
    assert again.start is not None and again.config.lora.scale == SCALE  # and as training that goes on does
    (said,) = [line for line in again.notes if line.startswith("LoRA starts from")]
    assert "all routed experts" in said and "new:" not in said
    report = inspect(trained.adapter)
    assert report["zero_b"] == 0 and report["model_type"] is not None
    kind = named_class(trained.adapter)
    tuned = in_peft(kind, trained.base, trained.adapter)
    loaded = [p for name, p in tuned.named_parameters() if ".lora_" in name]
    assert sum(int((p != 0).sum()) for p in loaded) == sum(v.numel() for v in trained.values.values())
    assert distance(logits(tuned), trained.logits) < 2e-5
    with tuned.disable_adapter():
        assert distance(logits(tuned), trained.logits) > 0.05

    merge(trained.base, trained.adapter, tmp_path / "merged")
    merged = kind.from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager")
    assert distance(logits(merged.eval()), trained.logits) < 5e-5

    family = read_family(trained.base)
    for form in ("peft-fused", "peft-per-expert"):
        export(trained.adapter, tmp_path / form, form)
        read_back(tmp_path / form, trained)
        if form == "peft-fused" or converts_keys(family.text_type):
            assert distance(logits(in_peft(kind, trained.base, tmp_path / form)), trained.logits) < 2e-5
    export(trained.adapter, tmp_path / "kt", "sglang-kt")
    check_servers(trained, tmp_path)


# Families whose configuration PEFT rewrites, whose keys it merges, and whose it does not; shared experts have
# last names that routed experts have, too.
PATTERNS = {
    "deepseek_v3": "{experts: 2, o_proj: 6, layers.2.mlp.shared_experts.down_proj: 3}",
    "qwen2_moe": "{experts: 3, shared_expert.gate_proj: 2, q_proj: 7}",
    "granitemoe": "{q_proj: 1, experts: 6}",
    "minimax_m2": "{1.self_attn.q_proj: 2}",
}


@pytest.mark.parametrize(
    ("family", "rslora"),
    [
        *((family, i % 2 == 0) for i, family in enumerate(PATTERNS)),
        *(exhaustive((family, i % 2 == 1)) for i, family in enumerate(PATTERNS)),
    ],
)
def test_modules_with_ranks_of_their_own(family: str, rslora: bool, tmp_path: Path) -> None:
    alphas = "lora.alpha_pattern={.*self_attn.k.*: 5, experts: 3}"
    flag = f"lora.rslora={str(rslora).lower()}"
    trained = train(family, tmp_path, f"lora.rank_pattern={PATTERNS[family]}", alphas, flag)
    ranks = {min(value.shape) for value in trained.values.values()}
    assert len(ranks) >= 2
    read_back(trained.adapter, trained)
    tuned = in_peft(named_class(trained.adapter), trained.base, trained.adapter)
    assert distance(logits(tuned), trained.logits) < 2e-5
    unset = ["lora.rank=8", "lora.alpha=16"]  # the keys' defaults
    config = config_for(trained.base, f"lora.adapter={trained.adapter}", *unset)
    again = prepare_model(config, training=True)
    with local_cluster(trained.base, again.config) as cluster:
        assert cluster.parameter_shapes() == {n: tuple(t.shape) for n, t in trained.values.items()}
    merge(trained.base, trained.adapter, tmp_path / "merged")
    merged = named_class(trained.adapter).from_pretrained(
        tmp_path / "merged", dtype=torch.float32, attn_implementation="eager"
    )
    assert distance(logits(merged.eval()), trained.logits) < 5e-5
    export(trained.adapter, tmp_path / "fused", "peft-fused")
    read_back(tmp_path / "fused", trained)
    server = inspect(trained.adapter)["takes"]["vLLM"]
    assert server.startswith("no: ") and any(
        "vLLM and SGLang: not as it is" in n for n in trained.prepared.notes
    )


SOME = [*PATTERNS, "mixtral", "gpt_oss", "qwen3_5_moe_text"]


@pytest.mark.parametrize(
    ("family", "others"),
    [*((family, "auto") for family in SOME), *spread([(family, "none") for family in SOME])],
)
def test_adapters_of_some_layers(family: str, others: str, tmp_path: Path) -> None:
    """lora.layers: PEFT makes no adapters for the other layers' experts, which every form leaves out."""
    trained = train(family, tmp_path, "lora.layers=[1]", f"lora.target_modules={others}")
    assert {layer_of(name) for name in trained.values} == {1} and any("experts." in n for n in trained.values)
    read_back(trained.adapter, trained)
    kind = named_class(trained.adapter)
    tuned = in_peft(kind, trained.base, trained.adapter)
    assert all((p != 0).any() for name, p in tuned.named_parameters() if ".lora_" in name)
    assert distance(logits(tuned), trained.logits) < 2e-5
    merge(trained.base, trained.adapter, tmp_path / "merged")
    merged = kind.from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager")
    assert distance(logits(merged.eval()), trained.logits) < 5e-5
    for form in ("peft-fused", "peft-per-expert"):
        export(trained.adapter, tmp_path / form, form)
        read_back(tmp_path / form, trained)
        if form == "peft-fused" or converts_keys(read_family(trained.base).text_type):
            tuned = in_peft(kind, trained.base, tmp_path / form)
            assert all((p != 0).any() for name, p in tuned.named_parameters() if ".lora_" in name)
            assert distance(logits(tuned), trained.logits) < 2e-5
    config = config_for(trained.base, f"lora.adapter={trained.adapter}")
    again = prepare_model(config, training=True)
    with local_cluster(trained.base, again.config) as cluster:
        assert cluster.parameter_shapes() == {n: tuple(t.shape) for n, t in trained.values.items()}
    assert again.plan.backward.lowest == 1
    found = AdapterReader(str(trained.adapter), str(trained.base)).config
    assert found.layers == [1] and found.experts


# SGLang 0.5.23, srt/lora/utils.py and lora.py: every key belongs to a layer by its number; routed experts are
# found one by one, w1, w3 and w2 under their later names; target_modules are leaf names.
_SGLANG_LAYER = re.compile(r"layers\.(\d+)\.")
_SGLANG_EXPERT = re.compile(r"\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.lora_[AB]\.weight$")
# vLLM, lora/utils.py parse_fine_tuned_lora_name: "base_model.model." + module + ".lora_A.weight".
_VLLM = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_[AB]\.weight$")


def check_servers(trained: Trained, tmp_path: Path) -> None:
    """Keys of the form that servers are told to take: the adapter's own, or the export that it names."""
    family = read_family(trained.base)
    whole = "" if family.whole is None else family.model_type
    info = AdapterInfo("", family.text_type, 4, 8.0, whole_type=whole)
    inside = any("language_model." in name for name in trained.values)
    assert inside or not whole or family.text_type.removesuffix("_text") in TEXT_ALONE
    limits = load_limits(trained.values, info)
    directory = tmp_path / "peft-per-expert" if any("export" in line for line in limits) else trained.adapter
    config = json.loads((directory / "adapter_config.json").read_text())
    layers = trained.prepared.plan.dims.num_layers
    lora = Lora.open(directory, family.text_type)
    assert lora.experts and not lora.fused
    with safe_open(directory / "adapter_model.safetensors", "pt") as file:
        keys = list(file.keys())
    for key in keys:
        number = _SGLANG_LAYER.search(key)
        assert number is not None and int(number[1]) < layers, key
        assert _VLLM.match(key), key
        if ".experts." in key:
            assert _SGLANG_EXPERT.search(key), key
    assert isinstance(config["r"], int) and config["lora_alpha"] / config["r"] == SCALE
    readme = (trained.adapter / "README.md").read_text()
    for line in limits:
        assert line in readme and f"adapter: {line}" in trained.prepared.notes


def test_what_is_said_to_be_tested_is() -> None:
    assert {read_text_type(name) for name in FAMILIES} == TESTED


def read_text_type(model_type: str) -> str:
    return str(transformers.AutoConfig.for_model(**tiny_config(model_type)).get_text_config().model_type)


def test_a_family_that_is_not_tested_is_not_claimed(tmp_path: Path) -> None:
    names = ["model.layers.0.mlp.experts.0.up_proj.lora_A.weight"]
    (line, *_) = load_limits(names, AdapterInfo("base", "brand_new_moe", 4, 8.0))
    assert line.startswith("PEFT: not tested with brand_new_moe")


def test_a_release_that_transformers_does_not_load_is_told() -> None:
    (line, *_) = load_limits([], AdapterInfo("base", "longcat_flash", 4, 8.0, zero_experts=2))
    assert line.startswith("PEFT: not on the release, which transformers does not load")


# -- generation: a cache of its own


@pytest.mark.parametrize("stages", [1, 2])
def test_minimax_text_01_generates(tmp_path: Path, stages: int) -> None:
    """Lightning attention first, as released, so that layer 0 has no keys; rows of unequal length."""
    kinds = ["linear_attention", "full_attention"] * 2
    base = write_config(tmp_path / "base", "minimax", layer_types=kinds)
    save_whole(base, buffers=False)  # lightning attention stores its decays
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(8):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    config = config_for(base, f"rule.stages={stages}")
    with local_cluster(base, config) as cluster:
        got = answers(cluster, PROMPTS, Sampling(max_new_tokens=8), prefill_tokens=12)
        assert sampler_gaps(cluster, config).max() < 1e-5
    assert bfloat16_gaps(base, {}).max() < 0.1  # its states are kept in bfloat16
    assert got == expected
