"""Training that starts from an adapter, against PEFT, and after deaths: bits of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kt_ray.actors.cluster import ActorCluster
from kt_ray.actors.local_cluster import LocalCluster
from kt_ray.actors.specs import actor_specs
from kt_ray.adapter.from_peft import AdapterReader
from kt_ray.batch import IGNORE, Objective
from kt_ray.config.schema import Config
from kt_ray.data.row_types import Row
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.errors import UserError
from kt_ray.model.preference_losses import dpo_losses
from kt_ray.runs.start_adapter import open_start, start_of
from tests.helpers.devices import DEVICES, by_name, layers_on
from tests.helpers.exhaustive import exhaustive
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.mortal import Death, MortalCluster
from tests.helpers.random_adapter import random_adapter
from tests.helpers.runs import config_for, one_pass, plan_for, relative, waves_of
from tests.train.test_preference_runs import LAYOUTS, pairs, trainer_for
from tests.train.test_recovery import EXPERTS, WORKERS, Run, passes

# The rank is the adapter's (tests' settings name another).
COMMON = ("lora.rank=8", "lora.alpha=16")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")


@contextlib.contextmanager
def started(
    path: Path, config: Config, cluster_class: type[LocalCluster] = LocalCluster
) -> Iterator[LocalCluster]:
    """A started cluster whose LoRA begins as lora.adapter says."""
    config, reader = open_start(config, str(path))
    plan = plan_for(path, config)
    specs = actor_specs(plan, config, str(path), start=start_of(config, reader, None))
    cluster = cluster_class(plan, specs)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.shutdown()


def base(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def of_peft(path: Path, to: Path, seed: int) -> Path:
    """An adapter that PEFT made on Hugging Face's model: attention, and experts as fused parameters."""
    config = PeftLoraConfig(
        r=3,
        lora_alpha=12,
        target_modules=list(ATTENTION),
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = get_peft_model(base(path), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(to)
    return to


def values(adapter: Path, path: Path, cluster: ActorCluster) -> dict[str, Tensor]:
    """An adapter's matrices as the cluster names them."""
    found = {name: torch.empty(shape) for name, shape in cluster.parameter_shapes().items()}
    reader = AdapterReader(str(adapter), str(path))
    reader.read_into(found.items(), reader.config)
    return found


def gradients(
    model: PeftModel, adapter: Path, path: Path, to: Path, cluster: ActorCluster
) -> dict[str, Tensor]:
    """PEFT's gradients, under the names of the cluster: as the adapter whose matrices they are."""
    shutil.copytree(adapter, to)
    tensors = load_file(adapter / "adapter_model.safetensors")
    of_name = {n.replace(".default.", "."): p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert of_name.keys() == tensors.keys()
    save_file(
        {n: torch.zeros_like(t) if of_name[n] is None else of_name[n] for n, t in tensors.items()},
        to / "adapter_model.safetensors",
    )
    return values(to, path, cluster)


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float) -> None:
    """In PEFT, gate and up of an expert share A: its gradient is the sum of both."""
    found, wanted = dict(found), dict(wanted)
    for gate in [n for n in found if ".experts." in n and n.endswith("gate_proj.lora_A.weight")]:
        up = gate.replace("gate_proj", "up_proj")
        assert torch.equal(wanted[gate], wanted.pop(up))
        found[gate] = found[gate] + found.pop(up)
    errors = relative(found, wanted)
    assert sum("experts." in name for name in errors) == 2 * 8 * 5  # layers, experts, matrices
    assert max(errors.values()) <= bound, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("device", DEVICES)
def test_one_step_is_that_of_peft(path: Path, tmp_path: Path, device: str) -> None:
    """PeftModel.from_pretrained(is_trainable=True): loss and every LoRA gradient, experts included."""
    adapter = of_peft(path, tmp_path / "adapter", 1)
    model = PeftModel.from_pretrained(base(path), adapter, is_trainable=True)
    rows = random_rows(4)
    losses = []
    for row in rows:
        logits = model(torch.tensor([row.ids]), use_cache=False).logits[0, :-1]
        labels = torch.tensor(row.labels[1:])
        losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    tokens = sum(int((torch.tensor(row.labels[1:]) != IGNORE).sum()) for row in rows)
    loss = torch.stack(losses).sum() / tokens
    loss.backward()
    tolerance = 1e-5 if device == "cpu" else 1e-4
    workers = layers_on(device, dims_from_dir(str(path)).num_layers, 2)
    config = config_for(path, *workers, "rule.experts.sockets=2", f"lora.adapter={adapter}", *COMMON)
    with started(path, config) as cluster:
        parameters = cluster.parameters()
        assert all(torch.equal(parameters[n], v) for n, v in values(adapter, path, cluster).items())
        report = cluster.run_pass(one_pass(cluster, waves_of(rows, config, cluster.plan)))
        found = cluster.gradients()
        wanted = gradients(model, adapter, path, tmp_path / "gradients", cluster)
    assert report.loss == pytest.approx(float(loss.detach()), rel=tolerance / 10)
    assert_same_gradients(found, wanted, tolerance)


@pytest.mark.parametrize("layout", by_name(LAYOUTS))
def test_the_reference_of_dpo_is_the_adapter_it_starts_from(path: Path, tmp_path: Path, layout: str) -> None:
    """...while another is trained: against PEFT with both adapters on one model."""
    start, policy = of_peft(path, tmp_path / "start", 1), of_peft(path, tmp_path / "policy", 2)
    model = PeftModel.from_pretrained(base(path), policy, is_trainable=True)
    model.load_adapter(start, "reference")

    def answers(rows: list[Row]) -> Tensor:
        sums = []
        for row in rows:
            ids = torch.from_numpy(row.input_ids)
            logps = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            picked = logps.gather(1, ids[1:, None])[:, 0]
            sums.append(picked[torch.from_numpy(row.labels[1:] != IGNORE)].sum())
        return torch.stack(sums)

    units = pairs()
    rows = [row for pair in units for row in (pair.chosen, pair.rejected)]
    model.set_adapter("reference")
    with torch.no_grad():
        reference = answers(rows)
    model.set_adapter("default")
    with torch.no_grad(), model.disable_adapter():
        assert (reference - answers(rows)).abs().min() > 1e-3, "the adapter must matter"
    loss = dpo_losses(answers(rows) - reference, torch.zeros(()), Objective("dpo", 0)).mean()
    loss.backward()
    config = config_for(path, *LAYOUTS[layout], "trainer.stage=dpo", f"lora.adapter={start}", *COMMON)
    with started(path, config) as cluster:
        cluster.set_parameters(values(policy, path, cluster))
        trainer = trainer_for(cluster, config, units)
        assert trainer._preference is not None
        waves, objective = trainer._preference.prepared(0, trainer.batches.train(0))
        reports = [
            trainer._passes.run(0, "train", wave, objective.units, objective=objective)[1] for wave in waves
        ]
        found = cluster.gradients()
        wanted = gradients(model, policy, path, tmp_path / "gradients", cluster)
    assert sum(r.loss for r in reports) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_same_gradients(found, wanted, 1e-4)


@pytest.mark.parametrize("stage", ["dpo", exhaustive("kto")])
def test_a_preference_run_begins_at_its_reference(path: Path, tmp_path: Path, stage: str) -> None:
    """The first loss is that of equal policies; a death in any pass of a step changes no bit."""
    adapter = of_peft(path, tmp_path / "adapter", 1)
    units = [r for p in pairs() for r in (p.chosen, p.rejected)] if stage == "kto" else pairs()
    config = config_for(
        path, "rule=cpu_2workers_2sockets", f"trainer.stage={stage}", f"lora.adapter={adapter}", *COMMON
    )

    def run(deaths: list[Death]) -> tuple[list[float], dict[str, Tensor]]:
        with started(path, config, MortalCluster) as cluster:
            assert isinstance(cluster, MortalCluster)
            cluster.deaths = deaths
            trainer = trainer_for(cluster, config, units)
            losses = trainer.run().losses
            assert cluster.happened == len(deaths)
            return losses, cluster.parameters()

    calm, expected = run([])
    assert calm[0] == pytest.approx(np.log(2) if stage == "dpo" else 0.5, abs=1e-6)
    assert calm[-1] < calm[0] and len(calm) == 4
    # The reference's pass is one of the first two of a step.
    for death in (
        Death(WORKERS[1], "run_pass", 3, 1),
        Death(EXPERTS[1], "run_pass", 3, 1),
        Death(WORKERS[0], "run_pass", 4, 1),
    ):
        losses, parameters = run([death])
        assert losses == calm
        assert all(torch.equal(parameters[n], v) for n, v in expected.items())


class FromAdapter(Run):
    """A run of tests/train/test_recovery.py that starts from an adapter."""

    def __init__(self, model: Path, adapter: Path, root: Path, deaths: list[Death], *settings: str) -> None:
        settings = ("rule=cpu_2workers_2sockets", f"lora.adapter={adapter}", *COMMON, *settings)
        super().__init__(model, root, deaths, *settings)
        self.config, reader = open_start(self.config, str(model))
        plan = self.cluster.plan = plan_for(model, self.config)
        start = start_of(self.config, reader, None)
        self.cluster.specs = actor_specs(plan, self.config, str(model), start=start)


@pytest.fixture(scope="module")
def adapter(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("adapter") / "a"
    return random_adapter(path, to, ATTENTION, rank=3, alpha=6.0, experts=True)


def test_a_recovery_without_a_checkpoint_begins_with_the_adapter(
    path: Path, adapter: Path, tmp_path: Path
) -> None:
    calm = FromAdapter(path, adapter, tmp_path / "calm", []).go()
    deaths = [Death(EXPERTS[0], "run_pass", passes(4), 5), Death(WORKERS[0], "run_pass", passes(5) + 3, 2)]
    run = FromAdapter(path, adapter, tmp_path / "run", deaths, "trainer.save_every=0").go()
    assert run.cluster.happened == 2 and any("start of the run" in line for line in run.lines)
    assert run.summary is not None and calm.summary is not None
    assert run.summary.losses == calm.summary.losses
    assert all(torch.equal(run.parameters[n], v) for n, v in calm.parameters.items())


def test_an_adapter_that_is_gone_or_changed(path: Path, adapter: Path, tmp_path: Path) -> None:
    """A checkpoint has what came of it; without one the run ends and says why."""

    def without(change: str, deaths: list[Death], *settings: str) -> FromAdapter:
        copy = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        shutil.copytree(adapter, copy)
        run = FromAdapter(path, copy, tmp_path / f"run{copy.name}", deaths, *settings)
        begin = run.cluster.start

        def start() -> list[dict[str, object]]:
            facts = begin()
            if change == "gone":
                shutil.rmtree(copy)
            else:
                file = copy / "adapter_model.safetensors"
                save_file({n: 2 * t for n, t in load_file(file).items()}, file)
            return facts

        run.cluster.start = start  # type: ignore[method-assign]
        return run

    death = [Death(EXPERTS[0], "run_pass", passes(4), 5)]
    saved = without("gone", death, "trainer.save_every=1").go()
    assert saved.cluster.happened == 1 and saved.summary is not None
    with pytest.raises(UserError, match=r"starts from is gone or has changed.*copy.*no such file"):
        without("gone", death, "trainer.save_every=0").go()
    with pytest.raises(UserError, match=r"starts from is gone or has changed.*found digest"):
        without("changed", death, "trainer.save_every=0").go()


def test_modules_that_it_lacks_begin_as_without_it(path: Path, tmp_path: Path) -> None:
    adapter = random_adapter(path, tmp_path / "a", ("q_proj", "v_proj"), rank=3, alpha=6.0, experts=False)
    config = config_for(
        path, f"lora.adapter={adapter}", "lora.target_modules=[q_proj,k_proj,v_proj]", *COMMON
    )
    plain = config_for(path, "lora.rank=3", "lora.alpha=6", "lora.target_modules=[q_proj,k_proj,v_proj]")
    with started(path, config) as cluster:
        found = cluster.parameters()
    with started(path, plain) as cluster:
        fresh = cluster.parameters()
    own = {
        n.removeprefix("base_model.model."): t
        for n, t in load_file(adapter / "adapter_model.safetensors").items()
    }
    assert found.keys() == fresh.keys() and own.keys() < found.keys()
    assert any("experts" in name for name in found)
    assert all(torch.equal(value, own.get(name, fresh[name])) for name, value in found.items())


def test_modules_keep_their_ranks_and_alphas(path: Path, adapter: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(adapter, copy)
    file, settings = copy / "adapter_model.safetensors", copy / "adapter_config.json"
    tensors = load_file(file)
    for name in [n for n in tensors if ".v_proj.lora_" in n]:
        tensors[name] = (tensors[name][:2] if "lora_A" in name else tensors[name][:, :2]).contiguous()
    save_file(tensors, file)
    patterns = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 5}}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | patterns))
    run = FromAdapter(path, copy, tmp_path / "run", []).go()
    for name, value in run.parameters.items():
        before = tensors[f"base_model.model.{name}"]
        assert value.shape == before.shape and not torch.equal(value, before)
    config, _ = open_start(config_for(path, f"lora.adapter={copy}", *COMMON), str(path))
    assert (config.lora.rank_pattern, config.lora.alpha_pattern) == tuple(patterns.values())
