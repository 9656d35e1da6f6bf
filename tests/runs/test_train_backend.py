"""The train server's backend, in this process: the bits of mode=train, samplers, state on disk."""

from __future__ import annotations

import contextlib
import errno
import shutil
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kt_ray.actors.cluster import ActorCluster
from kt_ray.batch import WHOLE, LoraPart, PassSpec, TokenLoss
from kt_ray.cpu_products import multiplies_bfloat16
from kt_ray.data.batches import step_waves
from kt_ray.errors import UserError
from kt_ray.generate.requests import Request, Sampling
from kt_ray.runs import train_backend
from kt_ray.runs.train_backend import ClusterBackend
from kt_ray.serve.api_errors import ApiError
from kt_ray.train.cluster_protocol import ActorLost
from kt_ray.train.reports import PassReport
from kt_ray.train.trainer import StepBatches, Trainer
from kt_ray.train_server.backend import Datum, NoRoomYet
from kt_ray.train_server.futures import Promises
from kt_ray.train_server.work_queue import Work, WorkQueue
from tests.helpers.devices import by_name
from tests.helpers.generation import one_rounding
from tests.helpers.train_backend import ADAM, ENTROPY, LAYOUTS, backend_on, data_of, rows, several


@pytest.mark.parametrize("layout", by_name(LAYOUTS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_of_mode_train(model: Path, tmp_path: Path, layout: str, dtype: str) -> None:
    steps = [rows(seed) for seed in range(3)]
    how = (*LAYOUTS[layout], f"model.dtype={dtype}", "trainer.micro_batch_size=2", "seed=7")
    adam = ("optim.lr=0.01", "optim.schedule=constant", "optim.warmup=0", "optim.betas=[0.9,0.95]")
    with backend_on(
        model, tmp_path, *how, *adam, "optim.max_grad_norm=0", "optim.weight_decay=0", "optim.eps=1e-8"
    ) as backend:
        cluster, config = backend._cluster, backend._generation.config
        batches = StepBatches(
            total_steps=3,
            steps_per_epoch=3,
            train=lambda step: step_waves(
                steps[step],
                cluster.plan.micro_batch_rows,
                cluster.plan.replicas,
                cluster.plan.groups,
                cluster.plan.wave,
                budget=cluster.plan.micro_batch_tokens,
            ),
        )
        trainer = Trainer(config, cluster, batches)
        for step in range(3):
            trainer.step(step)
        expected, losses, norms = cluster.parameters(), trainer.summary.losses, trainer.summary.grad_norms
        backend._passes._numbers = iter(range(100, 200))  # type: ignore[assignment]  # passes go on
        backend.create("mine", config.seed, WHOLE)
        for step in range(3):
            result = backend.run("mine", data_of(steps[step]), ENTROPY, backward=True)
            assert result.loss == pytest.approx(losses[step], rel=1e-6)  # its weights are float32
            assert backend.step("mine", ADAM)["grad_norm"] == norms[step]
        values = cluster.parameters()
    assert all(torch.equal(values[name], value) for name, value in expected.items())


def test_rows_keep_their_places_whatever_their_lengths(exact: Path, tmp_path: Path) -> None:
    given = data_of(rows(1, 9))
    with backend_on(exact, tmp_path, *LAYOUTS["replicas"], "rule.wave=1") as backend:
        backend.create("mine", 1, WHOLE)
        together = backend.run("mine", given, ENTROPY, backward=False)
        for datum, found in zip(given, together.logprobs, strict=True):
            alone = backend.run("mine", [datum], ENTROPY, backward=False).logprobs[0]
            np.testing.assert_allclose(found, alone, atol=1e-5)
            assert len(found) == len(datum.tokens)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 1e-3)])
def test_sampler_and_trainer_agree(model: Path, exact: Path, tmp_path: Path, dtype: str, most: float) -> None:
    prompt = np.arange(10, 22)
    model = exact if dtype == "float32" else model
    with backend_on(model, tmp_path, *LAYOUTS["two"], f"model.dtype={dtype}") as backend:
        backend.create("mine", 1, WHOLE)
        backend.run("mine", data_of(rows(2)), ENTROPY, backward=True)
        backend.step("mine", ADAM)
        backend.keep("mine", "sampler")
        sampling = Sampling(max_new_tokens=20, temperature=1.0, seed=5, logprobs=0)
        with backend.sampling() as session:
            answers = [
                session.submit_all([Request(tuple(prompt.tolist()), sampling, adapter)])[0].result(60)
                for adapter in ("sampler", False)
            ]
        for answer, sampler in zip(answers, ("sampler", False), strict=True):
            tokens = np.array([*prompt, *answer.tokens])
            sampled = np.array([token.logprob for token in answer.logprobs])
            (scores,) = backend.score(sampler, [tokens], 3)
            errors = np.abs(scores.logprobs[len(prompt) - 1 :] - sampled)
            # widened products of one token, and torch's in tiles, are added up in another order
            alike = multiplies_bfloat16() and not torch.cpu._is_amx_tile_supported()
            assert errors.max() <= most or (dtype == "bfloat16" and not alike and one_rounding(errors))
            best = scores.top_logprobs[:, 0]
            assert (best[:, None] >= scores.top_logprobs).all() and (best >= scores.logprobs - 1e-6).all()
        own = backend.run("mine", [Datum(tokens[:-1], tokens[1:])], ENTROPY, backward=False)
        (kept,) = backend.score("sampler", [tokens], 0)
        np.testing.assert_array_equal(own.logprobs[0], kept.logprobs)


def test_state_and_adapter_come_back(model: Path, tmp_path: Path, flushed: set[int]) -> None:
    given = data_of(rows(3))
    with backend_on(model, tmp_path, *LAYOUTS["two"]) as backend:
        backend.create("mine", 1, WHOLE)
        backend.run("mine", given, ENTROPY, backward=True)
        backend.step("mine", ADAM)
        backend.save_state("mine", tmp_path / "state")
        assert {file.stat().st_ino for file in (tmp_path / "state").iterdir()} <= flushed
        backend.save_adapter("mine", tmp_path / "adapter")
        backend.keep("mine", "kept")
        backend.create("other", 2, WHOLE)
        backend.load_state("other", tmp_path / "state", optimizer=True)
        backend.load_sampler("loaded", lambda: tmp_path / "adapter")
        prompts = [datum.tokens for datum in given]
        kept, loaded = (backend.score(name, prompts, 0) for name in ("kept", "loaded"))
        for one, other in zip(kept, loaded, strict=True):
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
        ends = []
        for name in ("mine", "other"):
            backend.run(name, given, ENTROPY, backward=True)
            backend.step(name, ADAM)
            ends.append(backend.run(name, given, ENTROPY, backward=False))
        assert ends[0].loss == ends[1].loss
        aside = backend.put_aside("kept")  # its training has gone on
        backend.drop("kept")
        backend._undo(changes=True)  # what follows a death, too
        backend.load_sampler("back", lambda: aside)
        for one, other in zip(kept, backend.score("back", prompts, 0), strict=True):
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
        with pytest.raises(UserError, match="the sampler's weights are gone"):
            backend.score("kept", prompts, 0)
        backend.forget("mine")
        assert backend.run("other", given, ENTROPY, backward=False).loss == ends[1].loss


def come_and_go(backend: ClusterBackend) -> None:
    backend.create("other", 2, WHOLE)
    backend.forget("other")


def test_a_sampler_that_cannot_go_to_disk_takes_no_other_with_it(
    exact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a training has left, or gone to disk: what the actors hold is nobody's, and whole."""
    prompts = [datum.tokens for datum in data_of(rows(3))]
    full = Mock(side_effect=UserError("the disk is full"))
    monkeypatch.setattr(train_backend, "write_adapter", full)
    with backend_on(exact, tmp_path, "train_server.adapters=1") as backend:
        backend.create("mine", 1, WHOLE)
        backend.keep("mine", "old")
        backend.keep("mine", "new")
        backend.step("mine", ADAM)
        backend._write_snapshot("mine")  # a rebuild would no longer find them
        for leave in (backend._make_room, partial(come_and_go, backend)):
            leave()
            with pytest.raises(UserError, match="the disk is full"):
                backend.put_aside("new")
            assert len(backend.score("old", prompts, 0)) == len(prompts)


PARTS = {
    "rank": LoraPart(2),
    "attention": LoraPart(2, mlp=False),
    "experts": LoraPart(None, attn=False),
}


def part_of(values: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values[name][tuple(map(slice, like[name].shape))] for name in like}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_part_of_the_lora_trains_as_if_there_were_no_more(exact: Path, tmp_path: Path, part: Any) -> None:
    """Compared with a server of that rank and those modules, and of the same scale."""
    decay, given = replace(ADAM, weight_decay=0.1, eps=1e-3), [data_of(rows(seed)) for seed in range(2)]
    rank = part.rank or 4
    seen, prompt = [], [given[0][0].tokens]
    less = [f"lora.rank={rank}", f"lora.alpha={2 * rank}", f"lora.experts={str(part.mlp).lower()}"]
    if not (part.attn and part.mlp):
        less.append(f"lora.target_modules=.*{'self_attn' if part.attn else 'mlp'}.*")
    with backend_on(exact, tmp_path / "small", *LAYOUTS["two"], *less) as backend:
        backend.create("mine", 1, WHOLE)
        for data in given:
            backend.run("mine", data, ENTROPY, backward=True)
            seen.append(backend.step("mine", decay)["grad_norm"])
        expected = backend._cluster.parameters()
    with backend_on(exact, tmp_path, *LAYOUTS["two"]) as backend:
        backend.create("mine", 1, part)
        norms = []
        for data in given:
            backend.run("mine", data, ENTROPY, backward=True)
            norms.append(backend.step("mine", decay)["grad_norm"])
        values = backend._cluster.parameters()
        inside = part_of(values, expected)
        for name, value in expected.items():
            torch.testing.assert_close(inside[name], value, rtol=1e-5, atol=1e-6)
        assert norms == pytest.approx(seen, rel=1e-5)
        trained = sum(int(value.count_nonzero()) for value in inside.values())
        assert sum(int(value.count_nonzero()) for value in values.values()) == trained > 0

        backend.keep("mine", "kept")
        backend.save_adapter("mine", tmp_path / "adapter")
        backend.load_sampler("loaded", lambda: tmp_path / "adapter")
        kept, loaded = (backend.score(name, prompt, 0)[0].logprobs for name in ("kept", "loaded"))
        np.testing.assert_array_equal(kept, loaded)
        backend._undo(changes=True)  # what follows a death, too
        backend._take_up("mine")
        again = backend._cluster.parameters()
        assert all(torch.equal(again[name], value) for name, value in values.items())
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.") for name in stored} == expected.keys()
    base = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns of keys that it leaves out
        warnings.filterwarnings("ignore", message="The following .*_pattern keys did not match")
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        peft = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert sum(int(p.count_nonzero()) for name, p in peft.named_parameters() if ".lora_" in name) == trained
    tokens = torch.tensor(np.array(prompt))
    with torch.no_grad():
        logprobs = peft(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    np.testing.assert_allclose(kept, logprobs, atol=1e-4)


def test_parts_that_this_lora_does_not_have(model: Path, tmp_path: Path) -> None:
    attention = ("lora.experts=false", "lora.target_modules=.*self_attn.*")
    error = pytest.raises(UserError, match="nothing would be trained")
    with backend_on(model, tmp_path, *attention) as backend, error:
        backend.create("mine", 1, LoraPart(attn=False))
    with backend_on(model, tmp_path, "lora.rank_pattern={o_proj: 2}") as backend:
        backend.create("mine", 1, LoraPart(4))
        with pytest.raises(UserError, match="modules have ranks of their own"):
            backend.create("other", 1, LoraPart(3))


def test_trainings_that_wait_on_disk_come_back_to_the_bit(model: Path, tmp_path: Path) -> None:
    """Five over two places; gradients wait meanwhile, a sampler stays, and a death comes."""
    names = "abcde"
    given = {name: data_of(rows(seed, 2)) for seed, name in enumerate(names)}
    seen = []
    for adapters in (5, 2):
        with backend_on(model, tmp_path / str(adapters), f"train_server.adapters={adapters}") as backend:
            found: list[Any] = []
            for seed, name in enumerate(names):
                backend.create(name, seed, WHOLE)
            for turn in range(2):
                for name in names:
                    found.append(backend.run(name, given[name], ENTROPY, backward=True).loss)
                    held = [handle.actor._aside for handle in backend._cluster.handles]  # type: ignore[attr-defined]
                    assert max(map(len, held)) < adapters  # one is present
                if turn:
                    backend._undo(changes=True)  # what follows a death, too
                for name in names:
                    found.append(backend.step(name, ADAM)["grad_norm"])
                backend.keep("a", f"sampler {turn}")
            backend.forget("c")
            for name in "bde":
                found.append(backend.run(name, given[name], ENTROPY, backward=False).loss)
            backend._undo(changes=True)
            found.append(backend.score("sampler 1", [given["a"][0].tokens], 0)[0].logprobs.tolist())
            found.append(backend.run("a", given["a"], ENTROPY, backward=False).loss)
            seen.append(found)
    assert seen[0] == seen[1]


def test_who_goes_to_disk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with backend_on(model, tmp_path, "train_server.adapters=2") as backend:
        backend.create("a", 1, WHOLE)
        backend.create("b", 2, WHOLE)
        backend.busy = lambda: {"a"}
        backend.create("c", 3, WHOLE)  # not the one with work that waits
        assert {name: own.on_disk for name, own in backend._trainings.items()} == {
            "a": False,
            "b": True,
            "c": False,
        }
        assert not list(backend._directory.glob("*"))  # nothing to write: b is as it began
        backend.run("a", data_of(rows(1)), ENTROPY, backward=True)
        backend.step("a", ADAM)
        backend.busy = lambda: {"c"}
        monkeypatch.setattr("kt_ray.runs.disk_room.free_bytes", lambda path: 0)
        backend.create("d", 4, WHOLE)  # for which c goes, that need not be written
        assert backend._trainings["c"].on_disk and not backend._trainings["a"].on_disk
        backend.run("d", data_of(rows(1)), ENTROPY, backward=True)
        backend.step("d", ADAM)
        losses = [backend.run(name, data_of(rows(1)), ENTROPY, backward=False).loss for name in "ad"]
        with pytest.raises(UserError, match="no room for an idle training"):
            backend.create("e", 5, WHOLE)
        with pytest.raises(NoRoomYet, match="no room for an idle training"):  # it may wait
            backend.step("b", ADAM)
        assert losses == [backend.run(name, data_of(rows(1)), ENTROPY, backward=False).loss for name in "ad"]
        monkeypatch.undo()
        backend.busy = lambda: {"d"}
        backend.create("e", 5, WHOLE)
        assert backend._trainings["a"].on_disk and len(list(backend._directory.glob("*"))) == 1
        assert backend.run("a", data_of(rows(1)), ENTROPY, backward=False).loss == losses[0]
        # One whose file is gone is lost, and its next requests disturb nobody.
        backend.busy = lambda: set(backend._trainings) - {"a"}
        backend.create("f", 6, WHOLE)
        (directory,) = backend._directory.glob("*")
        shutil.rmtree(directory)
        for _ in range(2):
            with pytest.raises(UserError, match="this training is lost"):
                backend.run("a", data_of(rows(1)), ENTROPY, backward=True)
            monkeypatch.setattr(backend._cluster, "restart", lambda: pytest.fail("restarted"))


def test_gradients_that_are_not_finite_change_nothing(model: Path, tmp_path: Path) -> None:
    given = data_of(rows(4))
    broken = Datum(
        given[0].tokens, given[0].targets, {"weights": np.full_like(given[0].inputs["weights"], 1e38)}
    )
    with backend_on(model, tmp_path) as backend:
        backend.create("mine", 1, WHOLE)
        before = backend._cluster.parameters()
        backend.run("mine", [broken], ENTROPY, backward=True)
        with pytest.raises(UserError, match="not finite"):
            backend.step("mine", ADAM)
        after = backend._cluster.parameters()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert not backend._trainings["mine"].journal  # a death need not repeat it
        backend.run("mine", given, ENTROPY, backward=True)
        backend.keep("mine", "sampler")
        backend.discard("mine")
        assert len(backend._trainings["mine"].journal) == 1
        backend.run("mine", given, ENTROPY, backward=True)
        assert np.isfinite(backend.step("mine", ADAM)["grad_norm"])


def test_a_loss_that_is_not_finite_is_told_in_a_clients_words(model: Path, tmp_path: Path) -> None:
    good, bad = (
        Datum(
            datum.tokens, datum.targets, {"logprobs": np.full(n, old, np.float32), "advantages": np.ones(n)}
        )
        for datum, old in zip(data_of(rows(4))[:2], (-3.0, -1000.0), strict=True)
        for n in (len(datum.tokens),)
    )
    with backend_on(model, tmp_path) as backend:
        backend.create("mine", 1, WHOLE)
        with pytest.raises(UserError) as raised:
            backend.run("mine", [good, bad], TokenLoss("importance_sampling"), backward=True)
        line = raised.value.line()
        assert "the loss of a pass is not finite" in line and "rows " in line and "trainer." not in line
        backend.run("mine", [good], TokenLoss("importance_sampling"), backward=True)
        assert np.isfinite(backend.step("mine", ADAM)["grad_norm"])


def test_a_pass_that_fails_leaves_gradients_that_wait(model: Path, tmp_path: Path) -> None:
    given = data_of(rows(5))
    lacking = [Datum(datum.tokens, datum.targets) for datum in given]  # no advantages
    with backend_on(model, tmp_path, *LAYOUTS["two"]) as backend:
        norms = []
        for name in ("undisturbed", "disturbed"):
            backend.create(name, 1, WHOLE)
            backend.run(name, given, ENTROPY, backward=True)
            if name == "disturbed":
                with pytest.raises(ValueError, match="needs loss_inputs"):
                    backend.run(name, lacking, TokenLoss("ppo"), backward=True)
                backend.create("thrown away", 2, WHOLE)
                backend.run("thrown away", given, ENTROPY, backward=True)
                backend.discard("thrown away")
                assert backend.step("thrown away", ADAM)["grad_norm"] == 0.0
            backend.run(name, given[:2], ENTROPY, backward=True)
            norms.append(backend.step(name, ADAM)["grad_norm"])
        assert norms[0] == norms[1]


@contextlib.contextmanager
def broken_generation(cluster: ActorCluster) -> Iterator[None]:
    """Sessions begin, and end with an error."""

    def fail(spec: Any, opened: Any) -> Any:
        cluster._broken = True
        opened()
        raise RuntimeError("a cache was too small")

    cluster.generate = fail  # type: ignore[method-assign]
    yield
    del cluster.generate


def test_samples_and_scores_leave_gradients_that_wait(model: Path, tmp_path: Path) -> None:
    """Also a session that an error ended, and a score whose step follows at once."""
    given = data_of(rows(6))
    request = Request(tuple(range(10, 16)), Sampling(max_new_tokens=4), "sampler")
    with backend_on(model, tmp_path, *LAYOUTS["two"]) as backend:
        seen = []
        for name in ("undisturbed", "disturbed"):
            backend.create(name, 1, WHOLE)
            backend.run(name, given, ENTROPY, backward=True)
            backend.step(name, ADAM)
            backend.keep(name, "sampler")
            backend.run(name, given, ENTROPY, backward=True)
            if name == "disturbed":
                error = pytest.raises((RuntimeError, UserError), match="a cache was too small")
                with broken_generation(backend._cluster), error, backend.sampling() as session:
                    session.submit_all([request])[0].result(60)
                with backend.sampling() as session:
                    session.submit_all([request])[0].result(60)
                backend.score("sampler", [given[0].tokens], 0)
            norm = backend.step(name, ADAM)["grad_norm"]
            (kept,) = backend.score("sampler", [given[0].tokens], 0)
            loss = backend.run(name, given, ENTROPY, backward=False).loss
            seen.append((norm, loss, kept.logprobs.tolist()))
            backend.drop("sampler")
        assert seen[0] == seen[1] and seen[0][0] > 0


def test_what_a_rebuild_cannot_find_leaves_the_rest_whole(model: Path, tmp_path: Path) -> None:
    """A death, after which a client's checkpoint is gone: trainings and other samplers are as before."""
    given = data_of(rows(7))
    with backend_on(model, tmp_path, *LAYOUTS["two"]) as backend:
        for seed, name in enumerate(("one", "two")):
            backend.create(name, seed, WHOLE)
            backend.run(name, given, ENTROPY, backward=True)
            backend.step(name, ADAM)
        backend.keep("one", "kept")
        others: set[str] = set()

        def find(name: str) -> Path:
            if name in others:
                raise ApiError(400, "written again")
            return tmp_path / name

        for name in ("stays", "goes", "changes"):
            backend.save_adapter("two", tmp_path / name)
            backend.load_sampler(name, partial(find, name))
        prompts = [given[0].tokens]
        seen = {name: backend.score(name, prompts, 0)[0].logprobs for name in ("kept", "stays")}
        losses = {name: backend.run(name, given, ENTROPY, backward=False).loss for name in ("one", "two")}
        shutil.rmtree(tmp_path / "goes")
        others.add("changes")
        backend._undo(changes=True)  # what follows a death, too
        for name in ("goes", "changes"):
            with pytest.raises(UserError, match="their file is no longer there"):
                backend.score(name, prompts, 0)
        for name, logprobs in seen.items():
            np.testing.assert_array_equal(backend.score(name, prompts, 0)[0].logprobs, logprobs)
        for name, loss in losses.items():
            assert backend.run(name, given, ENTROPY, backward=False).loss == loss
        with pytest.raises(RuntimeError, match="has no training 'nobody' put aside"):
            backend._cluster.switch_training("nobody", None)


def test_a_death_while_a_prompt_is_scored(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler comes back before the prompt is scored again, or is said to be gone."""
    given = data_of(rows(7))
    with backend_on(model, tmp_path, *LAYOUTS["two"], "trainer.recoveries=2") as backend:
        backend.create("one", 0, WHOLE)
        backend.keep("one", "kept")
        backend.save_adapter("one", tmp_path / "adapter")
        backend.load_sampler("loaded", lambda: tmp_path / "adapter")
        prompts, run_pass = [given[0].tokens], backend._cluster.run_pass
        monkeypatch.setattr(backend._cluster, "recover", lambda: None)

        def dying(spec: PassSpec) -> PassReport:
            monkeypatch.setattr(backend._cluster, "run_pass", run_pass)
            raise ActorLost("expert actor 0 died", observed="killed")

        (seen,) = backend.score("loaded", prompts, 0)
        monkeypatch.setattr(backend._cluster, "run_pass", dying)
        np.testing.assert_array_equal(backend.score("loaded", prompts, 0)[0].logprobs, seen.logprobs)
        backend.run("one", given, ENTROPY, backward=True)
        backend.step("one", ADAM)
        backend._write_snapshot("one")
        monkeypatch.setattr(backend._cluster, "run_pass", dying)
        with pytest.raises(UserError, match="older than the training's last snapshot"):
            backend.score("kept", prompts, 0)


def save_another(backend: ClusterBackend, given: Sequence[Datum], directory: Path) -> None:
    """The state of the training "other", beside "mine", a step each."""
    for seed, name in enumerate(("mine", "other")):
        backend.create(name, seed, WHOLE)
        backend.run(name, given, ENTROPY, backward=True)
        backend.step(name, ADAM)
    backend.save_state("other", directory)


def test_a_load_that_fails_halfway_changes_nothing(model: Path, tmp_path: Path) -> None:
    given = data_of(rows(8))
    with backend_on(model, tmp_path, *LAYOUTS["two"]) as backend:
        save_another(backend, given, tmp_path / "state")
        for shard in (tmp_path / "state").glob("experts-1*"):
            shard.unlink()
        before = backend.run("mine", given, ENTROPY, backward=False).loss
        with pytest.raises(UserError):
            backend.load_state("mine", tmp_path / "state", optimizer=False)
        assert backend.run("mine", given, ENTROPY, backward=False).loss == before


def test_a_load_without_a_snapshot_is_undone(model: Path, tmp_path: Path) -> None:
    """Else it would rest on the client's directory, who may delete it."""
    given = data_of(rows(8))
    with backend_on(model, tmp_path, *LAYOUTS["two"]) as backend:
        save_another(backend, given, tmp_path / "state")
        before = backend.run("mine", given, ENTROPY, backward=False).loss
        backend.run("mine", given, ENTROPY, backward=True)
        (tmp_path / "snapshots").write_text("in the way")
        with pytest.raises(OSError, match="snapshots"):
            backend.load_state("mine", tmp_path / "state", optimizer=True)
        (tmp_path / "snapshots").unlink()
        shutil.rmtree(tmp_path / "state")
        backend._undo(changes=True)  # what follows a death, too
        assert backend.run("mine", given, ENTROPY, backward=False).loss == before
        assert backend.step("mine", ADAM)["grad_norm"] > 0


def test_a_training_that_cannot_be_made_again_is_lost_alone(model: Path, tmp_path: Path) -> None:
    given = data_of(rows(8))
    with backend_on(model, tmp_path, *LAYOUTS["two"]) as backend:
        for seed, name in enumerate("abc"):
            backend.create(name, seed, WHOLE)
            backend.run(name, given, ENTROPY, backward=True)
            backend.step(name, ADAM)
            backend.run(name, given, ENTROPY, backward=True)
        backend._snapshot("b")
        backend.keep("b", "sampler")
        losses = {name: backend.run(name, given, ENTROPY, backward=False).loss for name in "ac"}
        next(backend._directory.glob("*/experts-1*")).unlink()
        for _ in range(2):
            backend._undo(changes=True)  # what follows a death, too
            for call in (
                lambda: backend.run("b", given, ENTROPY, backward=True),
                lambda: backend.step("b", ADAM),
                lambda: backend.save_state("b", tmp_path / "state"),
            ):
                with pytest.raises(UserError, match=r"this training is lost.*checkpoint lacks"):
                    call()
            with pytest.raises(UserError, match="the sampler's weights are gone"):
                backend.score("sampler", [given[0].tokens], 0)
            for name, loss in losses.items():
                assert backend.run(name, given, ENTROPY, backward=False).loss == loss
        assert not backend.held("b") and backend.step("a", ADAM) and backend.step("c", ADAM)
        backend.forget("b")
        backend.create("b", 1, WHOLE)
        assert backend.run("b", given, ENTROPY, backward=True).loss > 0


def test_a_step_counts_although_its_snapshot_cannot_be_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = data_of(rows(9))
    monkeypatch.setattr(train_backend, "SNAPSHOT_STEPS", 1)
    with backend_on(model, tmp_path) as backend:
        backend.create("mine", 1, WHOLE)
        (tmp_path / "snapshots").write_text("in the way")
        for _ in range(4):
            backend.run("mine", given, ENTROPY, backward=True)
            assert backend.step("mine", ADAM)["grad_norm"] > 0
        assert "no snapshot of a training" in caplog.text
        with monkeypatch.context() as patch, pytest.raises(UserError, match=r"set train_server\.directory"):
            full = OSError(errno.ENOSPC, "no space left")
            patch.setattr("kt_ray.checkpoint.training.write_safetensors", Mock(side_effect=full))
            backend.save_state("mine", tmp_path / "state")
        loss = backend.run("mine", given, ENTROPY, backward=False).loss
        (tmp_path / "snapshots").unlink()
        backend._undo(changes=True)  # what follows a death, too
        assert backend.run("mine", given, ENTROPY, backward=False).loss == loss


def test_a_prompt_of_one_token_has_nothing_to_score(model: Path, tmp_path: Path) -> None:
    long = np.arange(10, 20)
    with backend_on(model, tmp_path) as backend:
        (alone,) = backend.score(False, [long], 2)
        short, beside = backend.score(False, [long[:1], long], 2)
        assert short.logprobs.shape == (0,) and short.top_ids.shape == (0, 2)
        np.testing.assert_array_equal(beside.logprobs, alone.logprobs)
        assert backend.score(False, [long[:1]], 0)[0].logprobs.shape == (0,)


def test_a_training_on_disk_does_not_join(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So there is no room for it without harm to those that do."""
    works = several()
    with backend_on(model, tmp_path, *LAYOUTS["two"], "train_server.adapters=2") as backend:
        norms = []
        for disturbed in (False, True):
            queue = WorkQueue(Promises())
            for seed, work in enumerate(works):
                backend.create(work.model, seed, WHOLE)
                queue.add_model(work.model)
                queue.submit(work.model, 0, Work(None, part=work))
            for work in works[1:]:
                backend.run(work.model, work.data, work.loss, backward=True)
                backend.step(work.model, ADAM)
            taken = [queue.take("b"), *queue.take_parts("b", backend.held)]
            parts = [work.part for work in taken if work is not None and work.part is not None]
            assert [part.model for part in parts] == ["b", "c"]
            assert len(backend.join(parts)) == 2
            if disturbed:
                with monkeypatch.context() as patch:
                    patch.setattr("kt_ray.runs.disk_room.free_bytes", lambda path: 0)
                    with pytest.raises(UserError, match="no room for an idle training"):
                        backend.run(works[0].model, works[0].data, works[0].loss, backward=True)
            norms.append([backend.step(work.model, ADAM) for work in works[1:]])
            for work in works:
                backend.forget(work.model)
        assert norms[0] == norms[1]
