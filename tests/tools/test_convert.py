"""convert: what is written is read again, in every format and layout, and back to BF16."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.checkpoint import CheckpointIndex, ExpertLayout, load_experts
from kt_ray.checkpoint.expert_groups import expert_groups
from kt_ray.errors import UserError
from kt_ray.native import ExpertFormula, ExpertMatrix
from kt_ray.tools.__main__ import main
from kt_ray.tools.convert import Options, convert
from kt_ray.tools.merge import merge
from tests.helpers.tiny_families import tiny_family
from tests.helpers.tiny_moe import (
    E,
    H,
    encoded,
    expert_modules,
    fused,
    granite,
    lora,
    per_expert,
    save,
    save_adapter,
)

BOUNDS = {"fp8": 0.03, "int8": 0.01, "int4": 0.11, "mxfp4": 0.14}
MIXTRAL: dict[str, Any] = {"moe": "block_sparse_moe", "leaves": ("w1", "w3", "w2")}
SOURCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "per expert": (per_expert(), {}),
    "mixtral": (per_expert(**MIXTRAL), {"model_type": "mixtral"}),
    "fused": (fused(), {"model_type": "qwen3_5_moe_text"}),
    "transposed": (fused(transposed=True), {"model_type": "qwen3_vl_moe_text"}),
    "fp8": (encoded(per_expert(), "fp8"), {}),
    "int4": (encoded(per_expert(), "int4", group=32), {}),
}


def experts(path: Path) -> dict[tuple[str, int, str], torch.Tensor]:
    groups = expert_groups(CheckpointIndex.open(path))
    return {
        (prefix, e, p): group.read(e, p)
        for prefix, group in groups.items()
        for e in range(E)
        for p in ("gate", "up", "down")
    }


def check(source: Path, out: Path, bound: float) -> None:
    before, after = experts(source), experts(out)
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert float((after[key] - value).norm() / value.norm()) < bound, key


@pytest.mark.parametrize("to", BOUNDS)
@pytest.mark.parametrize("layout", SOURCES)
def test_formats(tmp_path: Path, layout: str, to: str) -> None:
    tensors, config = SOURCES[layout]
    source = save(tmp_path / "source", tensors, config)
    report = convert(source, tmp_path / "out", Options(to), shard_bytes=60_000)
    out = CheckpointIndex.open(tmp_path / "out")
    check(source, out.path, BOUNDS[to])
    assert {m.format for n, m in out.matrices.items() if ".experts." in n} == {to}
    assert all(f".experts.{e}." in " ".join(out.matrices) for e in range(E)) and len(out.files) > 1
    assert json.loads((out.path / "convert_report.json").read_text()) == report
    assert [row["layer"] for row in report["layers"]] == list(expert_groups(out))
    for row in report["layers"]:
        assert all(0 <= row[p] < BOUNDS[to] for p in ("gate", "up", "down"))
    source_index = CheckpointIndex.open(source)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"):
        assert torch.equal(out.read(name), source_index.read(name))
    quantization = out.config["quantization_config"]
    ignored = quantization.get("ignore", quantization.get("modules_to_not_convert"))
    assert "model.layers.1.self_attn.q_proj" in ignored and "model.embed_tokens" not in ignored
    assert not any("experts" in name for name in ignored)

    convert(out.path, tmp_path / "back", Options("bf16"))
    back = CheckpointIndex.open(tmp_path / "back")
    assert not back.matrices and "quantization_config" not in back.config
    check(out.path, back.path, 0.004)


@pytest.mark.parametrize("to", [*BOUNDS, "bf16"])
@pytest.mark.parametrize("layout", [*SOURCES, "gpt_oss", "granite", "without gate", "fused without gate"])
def test_training_reads_the_result(tmp_path: Path, layout: str, to: str) -> None:
    """The loader of expert actors finds the same values in it."""
    single = {k: v for k, v in per_expert().items() if "gate_proj" not in k}
    prefix = "model.layers.{}.mlp.experts"
    other = {
        "gpt_oss": (
            fused(transposed=True, interleaved=True, biases=True),
            {"model_type": "gpt_oss"},
        ),
        "granite": (granite(), {"model_type": "granitemoe"}),
        "without gate": (single, {"model_type": "nemotron_h"}),
        "fused without gate": (
            {k: v for k, v in single.items() if ".experts." not in k}
            | {
                f"{prefix.format(layer)}.{leaf}": torch.stack(
                    [single[f"{prefix.format(layer)}.{e}.{leaf}.weight"] for e in range(E)]
                )
                for layer in range(2)
                for leaf in ("up_proj", "down_proj")
            },
            {"model_type": "nemotron_h"},
        ),
    }
    tensors, config = {**SOURCES, **other}[layout]
    convert(save(tmp_path / "source", tensors, config), tmp_path / "out", Options(to))
    index = CheckpointIndex.open(tmp_path / "out")
    layout_found = ExpertLayout.detect(index)
    formula = None if layout_found.gated else ExpertFormula("relu2")
    assert layout_found.distinct_formats == (to,) and layout_found.biased == (layout == "gpt_oss")
    for group in expert_groups(index).values():
        weights = load_experts(index, layout_found, group.layer, [2, 0], formula=formula)
        for projection in group.projections:
            loaded = getattr(weights, projection)
            loaded = loaded.dequantize() if isinstance(loaded, ExpertMatrix) else loaded.float()
            for place, expert in enumerate((2, 0)):
                assert torch.equal(loaded[place], group.read(expert, projection)), projection


def test_reported_error_is_the_error(tmp_path: Path) -> None:
    source = save(tmp_path / "source", per_expert())
    report = convert(source, tmp_path / "out", Options("int4"))
    before, after = experts(source), experts(tmp_path / "out")
    keys = [k for k in before if k[0] == "model.layers.1.mlp.experts" and k[2] == "up"]
    wrong = torch.stack([(after[k] - before[k]).square().sum() for k in keys]).sum()
    expected = float((wrong / torch.stack([before[k].square().sum() for k in keys]).sum()).sqrt())
    assert report["layers"][1]["up"] == pytest.approx(expected, rel=1e-5)


def test_the_report_is_of_this_conversion(tmp_path: Path) -> None:
    """A source that was itself converted holds a report, which is not taken over."""
    source = save(tmp_path / "source", per_expert(), {"text_config": {"dtype": "float32"}})
    convert(source, tmp_path / "int8", Options("int8"))
    report = convert(tmp_path / "int8", tmp_path / "int4", Options("int4"))
    held = json.loads((tmp_path / "int4" / "convert_report.json").read_text())
    assert held == report and held["to"] == "int4"
    # what is not quantised keeps its type, and config.json says so
    assert json.loads((tmp_path / "int4" / "config.json").read_text())["text_config"]["dtype"] == "float32"


def test_gpt_oss_keeps_its_own_form(tmp_path: Path) -> None:
    config = {"model_type": "gpt_oss"}
    source = save(tmp_path / "source", fused(transposed=True, interleaved=True, biases=True), config)
    convert(source, tmp_path / "out", Options("mxfp4"))
    out = CheckpointIndex.open(tmp_path / "out")
    key = "model.layers.0.mlp.experts.gate_up_proj"
    assert {f"{key}_blocks", f"{key}_scales", f"{key}_bias"} <= set(out.tensors)
    assert out.config["quantization_config"]["quant_method"] == "mxfp4"
    check(source, out.path, BOUNDS["mxfp4"])
    convert(out.path, tmp_path / "back", Options("bf16"))
    back, first = CheckpointIndex.open(tmp_path / "back"), CheckpointIndex.open(source)
    assert back.names == first.names
    assert all(back.shape(name) == first.shape(name) for name in first.names)
    check(out.path, back.path, 0.004)
    # one by one with biases, and together again
    convert(source, tmp_path / "int8", Options("int8"))
    single = CheckpointIndex.open(tmp_path / "int8")
    both = first.read(f"{key}_bias")
    prefix = "model.layers.0.mlp.experts.1"
    assert torch.equal(single.read(f"{prefix}.gate_proj.bias"), both[1, 0::2])
    assert torch.equal(single.read(f"{prefix}.up_proj.bias"), both[1, 1::2])
    convert(single.path, tmp_path / "again", Options("mxfp4"))
    assert torch.equal(CheckpointIndex.open(tmp_path / "again").read(f"{key}_bias"), both)


@pytest.mark.parametrize("to", ["fp8", "int4"])
def test_step_has_its_stacks_again(tmp_path: Path, to: str) -> None:
    """In BF16 and FP8, as transformers and servers name them: gate and up apart, below "moe"."""
    single = per_expert()
    tensors = {key: value for key, value in single.items() if ".experts." not in key}
    for layer, leaf in itertools.product(range(2), ("gate_proj", "up_proj", "down_proj")):
        each = [single[f"model.layers.{layer}.mlp.experts.{e}.{leaf}.weight"] for e in range(E)]
        tensors[f"model.layers.{layer}.moe.{leaf}.weight"] = torch.stack(each)
    source = save(tmp_path / "source", tensors, {"model_type": "step3p5"})
    convert(source, tmp_path / "small", Options(to))
    small = CheckpointIndex.open(tmp_path / "small")
    assert ("model.layers.1.moe.gate_proj.weight" in small.matrices) == (to == "fp8")
    check(source, small.path, BOUNDS[to])
    convert(small.path, tmp_path / "back", Options("bf16"))
    back = CheckpointIndex.open(tmp_path / "back")
    assert {name: back.shape(name) for name in back.names} == {n: tuple(t.shape) for n, t in tensors.items()}
    check(small.path, back.path, 0.004)


def test_all_linear_and_quantised_weights_outside_the_experts(tmp_path: Path) -> None:
    source = save(tmp_path / "source", per_expert())
    name = "model.layers.0.self_attn.q_proj.weight"
    report = convert(source, tmp_path / "fp8", Options("fp8", all_linear=True))
    assert set(report["others"]) == {name, name.replace("0", "1")}
    fp8 = CheckpointIndex.open(tmp_path / "fp8")
    assert fp8.matrices[name].format == "fp8" and "model.layers.0.mlp.gate.weight" in fp8.tensors
    # outside the experts: kept by fp8, dequantised by another format
    convert(fp8.path, tmp_path / "same", Options("fp8"))
    same = CheckpointIndex.open(tmp_path / "same")
    for key in fp8.matrices[name].keys:
        assert torch.equal(same.read(key).view(torch.uint8), fp8.read(key).view(torch.uint8))
    convert(fp8.path, tmp_path / "int8", Options("int8"))
    int8 = CheckpointIndex.open(tmp_path / "int8")
    assert torch.equal(int8.read(name), fp8.value(name, torch.bfloat16))
    assert "model.layers.0.self_attn.q_proj" in int8.config["quantization_config"]["ignore"]


def test_multi_token_prediction_goes_along(tmp_path: Path) -> None:
    source = save(tmp_path / "source", per_expert(layers=3))  # config.json: two layers
    report = convert(source, tmp_path / "out", Options("int8"))
    assert [row["layer"].split(".")[2] for row in report["layers"]] == ["0", "1", "2"]


@pytest.mark.parametrize("to", ["int8", "mxfp4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3_5_moe_text", "gpt_oss", "deepseek_v4"])
def test_transformers_reads_what_is_brought_back(tmp_path: Path, family: str, to: str) -> None:
    """The model of the result has the source's values, every parameter in its own place."""
    from transformers import AutoModelForCausalLM

    source = tiny_family(tmp_path, family, expert_size=32, hidden_size=64)
    convert(source, tmp_path / "small", Options(to))
    convert(tmp_path / "small", tmp_path / "back", Options("bf16"))
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (source, tmp_path / "back")
    )
    assert before.keys() == after.keys()
    for name, value in before.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            assert float((after[name] - value).norm() / value.norm()) < BOUNDS[to] + 0.004, name
        else:
            assert torch.equal(after[name], value), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "int4", "--group", "48"], "groups of 48, required a multiple of 32 that divides"),
        (["--to", "fp8", "--group", "64"], "no choice of group"),
        (["--to", "bf16", "--all-linear"], "dequantises every weight"),
    ],
)
def test_bad_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    source = save(tmp_path / "source", per_expert())
    assert main(["convert", str(source), str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "To fix:" in error and not (tmp_path / "out").exists()


def test_bad_checkpoints(tmp_path: Path) -> None:
    tensors = per_expert()
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    source = save(tmp_path / "lacks", tensors)
    with pytest.raises(UserError, match=r"missing: model.layers.1.mlp.experts.2.up_proj"):
        convert(source, tmp_path / "out", Options("int8"))
    dense = {k: v for k, v in tensors.items() if ".experts." not in k}
    with pytest.raises(UserError, match="no routed experts"):
        convert(save(tmp_path / "dense", dense), tmp_path / "out", Options("int8"))
    with pytest.raises(UserError, match="the checkpoint itself"):
        convert(source, source, Options("int8"))


@pytest.mark.parametrize("module", ["self_attn.q_proj", "mlp.experts.0.up_proj"])
def test_formats_of_others_are_named(tmp_path: Path, module: str) -> None:
    """As AQLM has them: config.json of the result would not say so."""
    tensors: dict[str, Any] = per_expert()
    tensors["model.layers.0.mlp.gate.tid2eid"] = "I32", torch.ones(11, 2, dtype=torch.int32)  # DeepSeek-V4
    aqlm = {"quantization_config": {"quant_method": "aqlm"}}
    source = save(tmp_path / "source", tensors, aqlm)
    adapter = save_adapter(tmp_path / "a", lora(expert_modules()))
    convert(source, tmp_path / "converted", Options("int8"))
    del tensors[f"model.layers.1.{module}.weight"]
    tensors[f"model.layers.1.{module}.codes"] = "I16", torch.ones(H, H // 8, dtype=torch.int16)
    source = save(tmp_path / "unknown", tensors, aqlm)
    for command in (
        lambda out: convert(source, out, Options("int8")),
        lambda out: merge(source, adapter, out, bf16=True),
    ):
        with pytest.raises(UserError, match=rf"format cannot be read.*{module}\.codes.*bfloat16 release"):
            command(tmp_path / "out")


def test_buffers_of_integers_are_copied(tmp_path: Path) -> None:
    """Of a model that is not quantised: masks and positions."""
    mask, positions = "model.layers.0.self_attn.bias", "visual.embeddings.position_ids"
    buffers = {
        mask: ("U8", torch.ones(1, 1, 4, 4, dtype=torch.uint8)),
        positions: ("I32", torch.arange(6, dtype=torch.int32)[None]),
    }
    source = save(tmp_path / "source", per_expert() | buffers)
    adapter = save_adapter(tmp_path / "a", lora(expert_modules()))
    convert(source, tmp_path / "int8", Options("int8"))
    merge(source, adapter, tmp_path / "merged", bf16=True)
    for out in (tmp_path / "int8", tmp_path / "merged"):
        index = CheckpointIndex.open(out)
        assert all(torch.equal(index.read(key), value) for key, (_, value) in buffers.items())
    (source / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UserError, match=rf"unknown format: {mask}, {positions}"):
        convert(source, tmp_path / "other", Options("int8"))


@pytest.mark.parametrize("packed", ["int8 in words", "int4 in bytes"])
def test_packings_that_look_like_others(tmp_path: Path, packed: str) -> None:
    """INT8 four to a word reads as INT4 of twice the columns, INT4 two to a byte as INT8 of half of them."""
    tensors: dict[str, Any] = {}
    for key, value in per_expert().items():
        if ".experts." not in key:
            tensors[key] = value
            continue
        base, (rows, columns) = key.removesuffix(".weight"), value.shape
        scales = torch.ones(rows, 1, dtype=torch.bfloat16)
        if packed == "int8 in words":
            tensors[f"{base}.weight_packed"] = "I32", torch.ones(rows, columns // 4, dtype=torch.int32)
            tensors[f"{base}.weight_scale"] = scales
        else:
            tensors[key] = "I8", torch.ones(rows, columns // 2, dtype=torch.int8)
            tensors[f"{base}.weight_scale_inv"] = scales
    source, out = save(tmp_path / "source", tensors), tmp_path / "out"
    with pytest.raises(UserError, match=f"hidden size of the experts.* required {H}"):
        convert(source, out, Options("bf16"))
    with pytest.raises(UserError, match="hidden size of the experts"):
        merge(source, save_adapter(tmp_path / "adapter", lora(expert_modules())), out, bf16=True)
    assert not out.exists()


@pytest.mark.parametrize("command", ["convert", "merge"])
def test_unfinished_downloads(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Zeros in place of weights would be written as weights."""
    source = save(tmp_path / "source", per_expert())
    file = source / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 4] + bytes(len(whole) - len(whole) // 4))
    adapter = save_adapter(tmp_path / "adapter", lora(expert_modules()))
    more = ["--to", "int4"] if command == "convert" else []
    sources = [str(source)] if command == "convert" else [str(source), str(adapter)]
    assert main([command, *sources, str(tmp_path / "out"), *more]) == 2
    assert "shard holds zeros instead of weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_experts_of_several_shapes(tmp_path: Path) -> None:
    tensors = per_expert()
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    with pytest.raises(UserError, match="mixed shapes"):
        convert(save(tmp_path / "source", tensors), tmp_path / "out", Options("int8"))


def test_experts_on_a_projected_width(tmp_path: Path) -> None:
    source = save(tmp_path / "source", per_expert(), {"hidden_size": 4 * H, "moe_latent_size": H})
    convert(source, tmp_path / "out", Options("int8"))
    check(source, tmp_path / "out", BOUNDS["int8"])


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(tmp_path / "source", per_expert())
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "int8", "--group", "32"]) == 0
    assert "relative error of int8" in capsys.readouterr().out
    assert main(["convert", str(source), str(tmp_path / "two"), "--to", "int8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["to"] == "int8"


@pytest.mark.parametrize("size", ["inf", "nan", "0", "-1", "1e999"])
def test_shards_have_a_size(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["convert", "a", "b", "--to", "int8"], ["random", "b", "--model", "deepseek_v3"]):
        with pytest.raises(SystemExit) as caught:
            main([*command, f"--shard-gb={size}"])
        assert caught.value.code == 2 and "--shard-gb: must be a number above 0" in capsys.readouterr().err


def test_tensors_without_values_go_along(tmp_path: Path) -> None:
    more = {"model.layers.0.self_attn.sinks": torch.zeros(0), "model.layers.0.scale": torch.tensor(1.5)}
    source = save(tmp_path / "source", per_expert() | more)
    convert(source, tmp_path / "out", Options(to="int8"))
    out = CheckpointIndex.open(tmp_path / "out")
    assert all(torch.equal(out.read(name), value) for name, value in more.items())


@pytest.mark.parametrize("to", ["bf16", "fp8", "int8"])
def test_deepseek_v4s_word_for_its_experts_follows_them(tmp_path: Path, to: str) -> None:
    """Readers believe it before quantization_config."""
    base = save(tmp_path / "base", encoded(per_expert(), "fp4"), {"expert_dtype": "fp4"})
    convert(base, tmp_path / "out", Options(to=to))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("expert_dtype") == ("fp8" if to == "fp8" else None)
