"""mode=plan end to end: what a user sees, and the exit code."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kt_ray.config.files import option_names
from kt_ray.errors import UserError
from kt_ray.hardware.describe import hardware_for
from kt_ray.hardware.rate_files import rates_for
from kt_ray.hardware.rates import Figure
from kt_ray.modes.plan import model_dims, other_rules, run
from kt_ray.placement.generation_memory import within_server
from kt_ray.placement.plan import make_plan
from kt_ray.placement.remedies import remedies, shortage
from kt_ray.placement.render import billions, memory_table, worker_row
from kt_ray.timing.prediction import predict
from tests.helpers.composing import compose
from tests.placement.configs import SMALL, make_config


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same output on machines with GPUs and without."""
    monkeypatch.setattr("kt_ray.hardware.describe._gpus", lambda: ())


def output(capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, str]:
    code = run(compose(["mode=plan", *overrides]))
    return code, capsys.readouterr().out


def test_deepseek_v3_on_four_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = output(capsys, "experiment=deepseek_v3_amx_4gpu")
    assert code == 0
    for wanted in (
        *(
            "671.03 B parameters",
            "nominal",
            "8,192 tokens",
            "cuda:3",
            "socket 1",
            "layers",
            "experts per layer",
        ),
        *("weights", "LoRA", "optimizer", "kept activations", "staging", "sum", "capacity", "fits"),
        *(
            "experts fp8_block, the rest bfloat16",
            "note: quantised weights outside the experts are dequantised to bfloat16 when they are loaded",
            "note: rule.experts.activations=auto: retain, which fits",
        ),
    ):
        assert wanted in text, wanted


def test_a_step_of_unnamed_rows_is_a_real_one(capsys: pytest.CaptureFixture[str]) -> None:
    where = ("model=olmoe", "plan.hardware=1x4090_1x7950x", "rule=cpu_1worker_1socket")
    _, text = output(capsys, *where)
    assert "8 rows x 1024 tokens = 8,192 tokens at most (no rows are named: " in text
    assert "run        length unknown" in text
    _, text = output(capsys, *where, "trainer.stage=dpo")
    assert "8 pairs x 2 x 1024 tokens = 16,384 tokens at most" in text
    assert " s per step of 16,384 tokens" in text
    assert "no rows are named" not in output(capsys, "model=mini")[1]


def test_the_time_of_raw_text_is_a_guess(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text("word " * 20_000)
    text = output(capsys, "model=mini", f"data.path={tmp_path / 'book.txt'}", "data.max_length=256")[1]
    assert "run        about " in text and "of 131 rows: 17 steps; raw text is cut into rows" in text
    assert "run        at most " in output(capsys, "model=mini")[1]


def test_a_train_server(capsys: pytest.CaptureFixture[str]) -> None:
    where = ("model=olmoe", "plan.hardware=2x3090_1x7763", "plan.mode=train_server")
    how = ("lora.rank=32", "rule.replicas=1", "rule.stages=2", "serve.max_batch=16")
    code, text = output(capsys, *where, *how)
    assert code == 0
    for wanted in (
        "server    4 trainings in memory of at most 32, whose passes are not joined",  # experts on the GPUs
        "more rows in a pass",
        "8 samplers; 16 answers at a time in each replica",
        "16 answers of 256 tokens at a time",
        "prompts of 768, each another one",
        "disk       up to 5.0 GB for each training, 158.9 GB for 32 (train_server.trainings)",
        "predicted  ",
    ):
        assert wanted in text, wanted
    assert "run        " not in text and "no rows are named" not in text
    served = within_server(compose(["mode=train_server", "model.path=/there", *how]))  # the server's own plan
    planned = within_server(compose(["mode=plan", *where, *how]))
    dims, hardware = model_dims(planned.model), hardware_for(planned)
    plans = [make_plan(dims, config, hardware) for config in (planned, served)]
    assert plans[0].budgets == plans[1].budgets
    assert (
        "whose passes are joined in their experts"
        in output(capsys, *where, *how, "rule.experts.stream=off")[1]
    )
    layers = (*where, *how, "train_server.shared=layers")
    for more, joined, why in (
        (("rule.experts.stream=off",), "joined in their layers", ""),
        ((), "not joined", "not joined where GPUs compute experts"),
        (
            ("rule.experts.stream=off", "trainer.micro_batch_size=1"),
            "joined in their experts",
            "a micro-batch holds one row (trainer.micro_batch_size=1)",
        ),
    ):
        text = output(capsys, *layers, *more)[1]
        assert f"whose passes are {joined};" in text
        assert why in text and ("train_server.shared=layers changes nothing: " in text) == bool(why)
    config = compose(["mode=plan", *where, *how, "model=qwen3_30b_a3b", "train_server.adapters=16"])
    config, dims = within_server(config), model_dims(config.model)
    found = {remedy.overrides for remedy in remedies(dims, config, hardware, {})}
    assert not make_plan(dims, config, hardware).fits and "train_server.adapters=8" in found


@pytest.mark.parametrize("wrong", ["plan.mode=serve", "lora.dropout=0.1"])
def test_what_a_train_server_refuses_is_not_planned(wrong: str) -> None:
    with pytest.raises(UserError, match=wrong.partition("=")[0]):
        compose(["mode=plan", "model=qwen3_30b_a3b", "plan.mode=train_server", wrong])


def test_plan_mode_is_for_plans() -> None:
    with pytest.raises(UserError, match=r"plan\.mode"):
        compose(["mode=train", "plan.mode=train_server"])


def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = output(capsys, "experiment=deepseek_v3_amx_4gpu", "rule=amx_1gpu")
    assert code == 1
    assert "does not fit rule amx_1gpu (nominal)" in text and "cuda:0 lacks" in text
    assert "fits with  rule=multi_node" in text  # on each host its half of the experts


def test_plan_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = output(capsys, "model=qwen3_30b_a3b", "plan.hardware=laptop_16gb")
    assert code == 1 and "file laptop_16gb.yaml: 1 socket x 8 cores, 16 GiB" in text
    code, text = output(capsys, "model=qwen3_30b_a3b", "plan.hardware=1x4090_1x7950x")
    assert code == 0 and "cuda:0" in text


def test_a_pattern_that_means_nothing_is_refused_before_any_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UserError, match=r"lora\.rank_pattern has a pattern that means no module.*nonsense"):
        run(compose(["mode=plan", "model=qwen3_30b_a3b", "lora.rank_pattern={nonsense:4}"]))
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("targets", "strange"),
    [("[q_a_proj,qproj,up_proj]", "qproj"), (r"'.*\.qproj'", r".*\.qproj"), ("auto", "")],
)
def test_targets_that_the_model_lacks_are_told(
    capsys: pytest.CaptureFixture[str], targets: str, strange: str
) -> None:
    assert run(compose(["mode=plan", "model=demo", f"lora.target_modules={targets}"])) == 0
    note = f"note: lora.target_modules name nothing outside routed experts: {strange}\n"
    out = capsys.readouterr().out
    assert note in out if strange else "lora.target_modules name" not in out


def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = output(capsys)
    assert code == 0 and "model     demo (deepseek_v3)" in text and "experts (bf16)" in text


MODELS = {
    "deepseek_v2_lite": "15.71 B",
    "deepseek_v3": "671.03 B",
    "deepseek_v4_flash": "284.33 B",
    "glm4_5_air": "106.85 B",
    "gpt_oss_120b": "116.83 B",
    "gpt_oss_20b": "20.91 B",
    "kimi_k2": "1026.41 B",
    "longcat_flash": "560.66 B",
    "minimax_m2": "228.69 B",
    "mixtral_8x7b": "46.70 B",
    "olmoe": "6.92 B",
    "phi_3_5_moe": "41.87 B",
    "qwen3_235b_a22b": "235.09 B",
    "qwen3_30b_a3b": "30.53 B",
    "qwen3_5_35b_a3b": "34.66 B",
    "qwen3_next_80b_a3b": "79.67 B",
}


def test_every_model_option_is_listed() -> None:
    assert set(option_names("model")) == {*MODELS, "custom", "demo", "demo_random", "mini"}


@pytest.mark.parametrize("model", sorted(MODELS))
def test_model_options(model: str) -> None:
    dims = model_dims(compose(["mode=plan", f"model={model}"]).model)
    assert (dims.name, billions(dims.total_params)) == (model, MODELS[model])
    assert dims.refusal is None and not any("estimates" in note for note in dims.notes)
    assert any("only its text part" in note for note in dims.notes) == (model == "qwen3_5_35b_a3b")


def test_untrainable_plan_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = {**SMALL["mixtral"], "quantization_config": {"quant_method": "awq", "version": "gemv"}}
    (tmp_path / "config.json").write_text(json.dumps(packed))
    code, text = output(capsys, f"model.path={tmp_path}")
    assert code == 0 and "plan only: routed experts stored as uint4 in the packing of awq" in text
    assert "note: a BF16 checkpoint of this model fits" in text


def test_experts_from_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL["mixtral"]))
    given = (f"model.path={tmp_path}", "rule.experts.backend=llamafile")
    absent = f"model.experts_path={tmp_path / 'q.gguf'}"
    for backend in ("llamafile", "auto"):
        _, text = output(capsys, given[0], f"rule.experts.backend={backend}", absent)
        assert "routed experts from q.gguf: it is not there; planned at 8.5 bits" in text
        assert "experts (q8_0)" in text
    for part, size in (("1", 3000), ("2", 2000)):
        (tmp_path / f"q[1]-0000{part}-of-00002.gguf").write_bytes(bytes(size))
    split = make_config(
        model={"path": str(tmp_path), "experts_path": str(tmp_path / "q[1]-00001-of-00002.gguf")}
    ).model
    dims = model_dims(split)
    assert dims.experts_file_bytes == 5000 and any("its size counts whole" in note for note in dims.notes)


@pytest.mark.parametrize("model", ["deepseek_v2_lite", "qwen3_235b_a22b", "kimi_k2", "gpt_oss_120b"])
def test_every_model_has_a_plan_under_every_rule(model: str) -> None:
    config = compose(["mode=plan", f"model={model}"])
    dims = model_dims(config.model)
    for rule in other_rules().values():
        changed = dataclasses.replace(config, rule=rule)
        plan = make_plan(dims, changed, hardware_for(changed))
        assert plan.fits == (shortage(plan) == "")
        assert all(worker_row(plan, worker) for worker in plan.workers) and memory_table(plan)


def test_other_rules_equal_hydras_composition() -> None:
    rules = other_rules()
    assert sorted(rules) == option_names("rule")
    for name, rule in rules.items():
        assert rule == compose(["mode=plan", f"rule={name}"]).rule


def test_model_dims(tmp_path: Path) -> None:
    inline = make_config(model={"config": SMALL["mixtral"]}).model
    assert model_dims(inline).model_type == "mixtral"
    (tmp_path / "config.json").write_text(json.dumps(SMALL["qwen3_moe"]))
    from_path = make_config(model={"config": SMALL["mixtral"], "path": str(tmp_path)}).model
    assert model_dims(from_path).model_type == "qwen3_moe"  # the checkpoint's own config wins
    empty = make_config(model={"config": SMALL["mixtral"], "path": str(tmp_path / "later")}).model
    assert model_dims(empty).model_type == "mixtral"
    built = make_config(model={"build": "mini", "tokenizer": "/some/where"}).model
    assert any("tokenizer" in note for note in model_dims(built).notes)
    with pytest.raises(UserError, match="no model to plan for"):
        model_dims(make_config().model)


@pytest.mark.parametrize("build", ["demo", "demo_base"])
def test_built_models_have_the_planned_size(tmp_path: Path, build: str) -> None:
    from safetensors import safe_open

    from kt_ray.demo import ensure_demo_model

    directory = Path(ensure_demo_model(build, 0, cache_dir=str(tmp_path)))
    dims = model_dims(make_config(model={"build": build}).model)
    count = 0
    for shard in directory.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if "e_score_correction_bias" not in name:  # a buffer, not a parameter
                    size = 1
                    for n in file.get_slice(name).get_shape():
                        size *= n
                    count += size
    assert count == dims.total_params


def test_needs_no_torch_and_no_ray() -> None:
    code = (
        "import sys\n"
        "from kt_ray.config.compose import compose\n"
        "from kt_ray.modes.plan import run\n"
        "given = ['model=olmoe', 'rule=amx_4gpu', 'plan.hardware=4x4090_2xSPR']\n"
        "assert run(compose(['mode=plan', *given])) == 0\n"
        "heavy = {'torch', 'ray', 'transformers', 'peft'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_time_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Every term with its rate's source, tokens/s, the limit, the run's length, what would help."""
    _, text = output(
        capsys,
        "model=mixtral_8x7b",
        "plan.hardware=2x4090_2x8488c",
        "trainer.batch_size=16",
        "data.max_length=512",
    )
    for wanted in (
        *("attention, forward", "attention, recomputed", "attention, backward", "experts, forward"),
        *("experts, backward", "head and loss", "pcie, busiest link", "step's end", "data sheet of RTX 4090"),
        *(
            "tokens/s",
            "s per step of 8,192 tokens",
            "limited by",
            "loading",
            "faster with",
            "data.max_length",
        ),
        *("Plans compared", "1 stage x 2 replicas, 2 groups, waves of", "note: chosen by simulated steps"),
        "rates      described: file 2x4090_2x8488c.yaml",
    ):
        assert wanted in text, wanted
    assert re.search(r"faster with  \S+=\S+ .*\(\d+\.\d+ times the tokens/s", text)


def test_hours_are_those_of_the_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"instruction": str(i), "output": "x"}) + "\n" for i in range(100)))
    given = (
        "model=demo",
        "data=jsonl",
        f"data.path={rows}",
        "trainer.max_steps=null",
        "trainer.batch_size=8",
    )
    _, text = output(capsys, *given, "trainer.epochs=2", "data.eval_fraction=0.1")
    assert "for 2 epochs of 90 rows: 24 steps" in text
    _, text = output(capsys, *given, "trainer.max_steps=7")
    assert "for 7 steps (trainer.max_steps)" in text
    _, text = output(capsys, *given[:2], f"data.path={tmp_path}/absent.jsonl", "trainer.max_steps=null")
    assert "run        length unknown: the data file does not exist" in text
    with pytest.raises(UserError, match=r"no row would be left.*eval_fraction=500.*100 rows"):
        output(capsys, *given, "data.eval_fraction=500")


def test_faster_links_are_predicted_faster() -> None:
    """More network, more tokens/s, until something else limits."""
    given = ("model=deepseek_v3", "plan.hardware=2x4090_2x8488c", "rule.nodes=2", "data.max_length=128")
    config = compose(["mode=plan", *given])
    hardware = hardware_for(config)
    plan = make_plan(model_dims(config.model), config, hardware)
    rates = rates_for(config, hardware)
    found = []
    for speed in (1e8, 3e8, 1e9, 1e11, 1e13):
        network = dataclasses.replace(rates.transport, network_bytes=Figure(speed, "test"))
        found.append(predict(plan, config, dataclasses.replace(rates, transport=network)).tokens_per_s)
    assert found[0] < found[1] < found[2] < found[3] and found[4] == pytest.approx(found[3], rel=1e-2)


def test_a_prediction_goes_into_plan_json() -> None:
    config = compose(["mode=plan", "model=demo", "plan.rates=nominal"])
    hardware = hardware_for(config)
    plan = make_plan(model_dims(config.model), config, hardware)
    values = json.loads(json.dumps(predict(plan, config, rates_for(config, hardware)).to_dict()))
    assert values["tokens_per_s"] == pytest.approx(values["tokens_per_step"] / values["seconds_per_step"])
    assert sum(values["longest_chain"].values()) == pytest.approx(values["seconds_per_step"])
    assert not values["measured"] and all(term["source"] for term in values["terms"])
