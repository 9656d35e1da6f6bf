"""A run whose experts come from a GGUF file, against runs on the same values in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kt_ray import cli
from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from kt_ray.native import select_isa
from tests.helpers.gguf_files import stack, values, write_gguf
from tests.helpers.hf_reference import Row, build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, one_pass, relative, waves_of
from tests.train.test_placement import SHORT

KINDS = {"gate": "Q4_K", "up": "Q8_0", "down": "Q6_K"}  # blocks of 256 and of 32, mixed
SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 3}


def gguf_of(path: Path, target: Path) -> Path:
    """The experts of a checkpoint in KINDS; the checkpoint's own become their values, in bfloat16."""
    (file,) = path.glob("*.safetensors")
    with safe_open(file, "pt") as reader:
        names, metadata = list(reader.keys()), reader.metadata()
        tensors = {name: reader.get_tensor(name) for name in names}
    layers = sorted({int(name.split(".")[2]) for name in names if ".experts.0." in name})
    quantised = {}
    for layer in layers:
        for part, kind in KINDS.items():
            own = [f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight" for e in range(8)]
            made = stack(kind, torch.stack([tensors[name] for name in own]))
            quantised[f"blk.{layer}.ffn_{part}_exps.weight"] = made
            for name, value in zip(own, values(made), strict=True):
                tensors[name] = value.bfloat16()
    save_file(tensors, file, metadata=metadata)
    return write_gguf(target, "qwen3moe", quantised, split=4)


def gradients(
    path: Path, rows: list[Row], rule: str, parameters: dict[str, Tensor], experts_path: Path | None
) -> tuple[float, dict[str, Tensor]]:
    file = [] if experts_path is None else [f"model.experts_path={experts_path}"]
    config = config_for(path, f"rule={rule}", "trainer.micro_batch_size=2", *file)
    with local_cluster(path, config) as cluster:
        if not parameters:  # B starts at zero, and then A has no gradient
            generator = torch.Generator().manual_seed(1)
            for name, shape in cluster.parameter_shapes().items():
                parameters[name] = 0.05 * torch.randn(tuple(shape), generator=generator)
        cluster.set_parameters(parameters)
        result = cluster.run_pass(one_pass(cluster, waves_of(rows, config, cluster.plan)))
        return result.loss, cluster.gradients()


# Where the engine's products are bfloat16, it rounds what it decodes: the run on these values in bfloat16 has
# the same products. Elsewhere it takes them as they are, and they differ by that rounding, 2**-9 of each.
ROUNDED = select_isa()[0] in ("avx512_bf16", "amx")
LOSS_BOUND, GRADIENT_BOUND = (1e-6, 1e-5) if ROUNDED else (2.0**-12, 2.0**-5)


def test_gradients_are_those_of_the_decoded_values(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "qwen3_moe", **SIZES)
    original = build_checkpoint(tmp_path / "original", "qwen3_moe", **SIZES)
    file = gguf_of(path, tmp_path / "m.gguf")
    rows = random_rows(4)
    parameters: dict[str, Tensor] = {}
    for rule in ("cpu_1worker_1socket", "cpu_2workers_2sockets"):
        loss, expected = gradients(path, rows, rule, parameters, None)
        # The directory's own experts are others now: they must not be read.
        observed_loss, observed = gradients(original, rows, rule, parameters, file)
        assert abs(observed_loss - loss) <= LOSS_BOUND * abs(loss)
        errors = relative(observed, expected)
        assert max(errors.values()) <= GRADIENT_BOUND, max(errors.items(), key=lambda item: item[1])
        assert any(".experts." in name and name.endswith("lora_A.weight") for name in errors)
    unquantised_loss, unquantised = gradients(original, rows, rule, parameters, None)
    assert abs(unquantised_loss - loss) > max(1e-4, 2 * LOSS_BOUND) * abs(loss)
    assert max(relative(unquantised, expected).values()) > 4 * GRADIENT_BOUND


def test_a_run_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checked before an actor starts, planned at the file's size, and recognised on resume."""
    monkeypatch.chdir(tmp_path)
    path = build_checkpoint(tmp_path, "qwen3_moe", vocab_size=320, **SIZES)
    train_tokenizer(persona_path(), 320).save_pretrained(path)
    file = gguf_of(path, tmp_path / "m.gguf")
    here = [f"model.path={path}", "model.dtype=float32", "rule=cpu_1worker_1socket", "run.name=one"]
    common = [*SHORT, *here]
    gguf = f"model.experts_path={file}"
    assert cli.main([*common, gguf, "rule.experts.backend=llamafile", "trainer.max_steps=2"]) == 0
    plan = json.loads(Path("runs/one/plan.json").read_text())
    assert any("q4_k and q6_k and q8_0" in note for note in plan["notes"])
    resumed = [*common, "rule.experts.backend=llamafile", "trainer.max_steps=3", "trainer.resume=latest"]
    assert cli.main([*resumed, gguf]) == 0

    other = tmp_path / "other"
    other.mkdir()
    again = build_checkpoint(other, "qwen3_moe", vocab_size=320, seed=1, **SIZES)
    capsys.readouterr()
    assert cli.main([*resumed, f"model.experts_path={gguf_of(again, other / 'm.gguf')}"]) != 0
    assert "another model" in "".join(capsys.readouterr())
    cut = Path(file)
    cut.write_bytes(cut.read_bytes()[:-5000])
    assert cli.main([*common, gguf, "run.name=two"]) != 0
    assert "GGUF file is truncated" in "".join(capsys.readouterr())
