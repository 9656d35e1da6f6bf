"""Passes of several trainings as one, and with train_server.shared=layers their rows beside each other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kt_ray.batch import WHOLE, MicroBatch, PassSpec, Wave
from kt_ray.data.batches import to_share
from kt_ray.runs.joined_waves import Room, each_alone, joined, one_wave
from kt_ray.train.cluster_protocol import ActorLost
from kt_ray.train.reports import PassReport
from kt_ray.train_server.backend import Datum, PassResult
from tests.helpers.devices import CARD, CUDA
from tests.helpers.exhaustive import exhaustive
from tests.helpers.train_backend import ADAM, LAYOUTS, backend_on, passes_of, several

COPIES = ("rule=multi_node", "rule.device=cpu", "rule.replicas=2", "rule.attention_hosts=all")


def wave(*positions: int) -> Wave:
    """Of one replica: groups of one micro-batch each."""
    made = [np.zeros((1, n), dtype=np.int64) for n in positions]
    return (tuple((MicroBatch(ids, ids, np.array([ids.size]), np.zeros(1)),) for ids in made),)


def test_no_more_is_joined_than_the_plan_has_memory_for() -> None:
    waves = [[wave(5, 1), wave(2, 0)], [wave(4, 4)], [wave(3, 3)]]

    def numbers(room: Room) -> list[list[int]]:
        return [list(chosen) for chosen in joined(waves, room, each_alone)]

    assert numbers(Room(100, 100)) == [[0, 1, 2], [0]]
    assert numbers(Room(8, 100)) == [[0, 2], [0, 1]]
    assert numbers(Room(100, 14)) == [[0, 1], [0, 2]]
    assert numbers(Room(0, 0)) == [[0], [0], [1], [2]]  # where lanes have one LoRA


def test_a_training_alone_is_as_with_shared_experts() -> None:
    """Its micro-batches are neither sorted nor put together: it has the bits of mode=train."""
    narrow, wide = wave(4)[0][0][0], wave(6)[0][0][0]
    own: Wave = (((narrow, wide), (narrow,)),)
    mix = partial(to_share, most=100, alike=False)
    assert one_wave({"a": own}, "a", mix) is own
    (((mixed,), _),) = one_wave({"a": own, "b": own}, "a", mix)
    assert [(part.training, part.tokens) for part in mixed.parts] == [
        *((True, 6), ("b", 6)),
        *((True, 4), ("b", 4)),
    ]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *(
            ("two", "float32"),
            exhaustive(("two", "bfloat16")),
            ("replicas", "bfloat16"),
            ("copies", "float32"),
        ),
        pytest.param(CARD, "bfloat16", marks=CUDA),
    ],
)
def test_joined_passes_have_the_bits_of_each_alone(
    model: Path, exact: Path, tmp_path: Path, layout: str, dtype: str
) -> None:
    layouts = {**LAYOUTS, "copies": (*COPIES, "rule.experts.copies=2")}
    how = (*layouts[layout], f"model.dtype={dtype}", "trainer.micro_batch_size=1", "data.max_length=128")
    with backend_on(exact if dtype == "float32" else model, tmp_path, *how) as backend:
        spec = passes_of(backend)
        seen: dict[bool, list[Any]] = {}
        counts = {}
        for joins in (False, True):
            found = seen[joins] = []
            for seed, work in enumerate(several()):
                backend.create(work.model, seed, WHOLE)
            del spec[:]
            for _ in range(2):  # values that a step has moved, too
                if joins:
                    found += backend.join(several())
                else:
                    found += [
                        backend.run(work.model, work.data, work.loss, backward=True) for work in several()
                    ]
                counts[joins] = len(spec)
                found += [backend.step(work.model, ADAM) for work in several()]
            for work in several():
                backend._take_up(work.model)
                found.append(backend._cluster.parameters())
                backend.forget(work.model)
    assert counts[True] < counts[False]
    for alone, together in zip(seen[False], seen[True], strict=True):
        if isinstance(alone, PassResult):
            assert together.loss == alone.loss
            for one, other in zip(alone.logprobs, together.logprobs, strict=True):
                np.testing.assert_array_equal(one, other)
        elif "grad_norm" in alone:
            assert together == alone and alone["grad_norm"] > 0
        else:
            assert all(torch.equal(together[name], value) for name, value in alone.items())


def test_a_joined_pass_that_fails_leaves_all_gradients_that_wait(model: Path, tmp_path: Path) -> None:
    works = several()[:2]
    lacking = [Datum(datum.tokens, datum.targets) for datum in works[1].data]  # no advantages
    with backend_on(model, tmp_path, *LAYOUTS["two"], "trainer.batch_size=16") as backend:
        norms = []
        for disturbed in (False, True):
            for seed, work in enumerate(works):
                backend.create(work.model, seed, WHOLE)
            backend.create("other", 3, WHOLE)
            backend.join(works)
            if disturbed:
                backend._take_up("other")
                with pytest.raises(ValueError, match="needs loss_inputs"):
                    backend.join([works[0], replace(works[1], data=lacking)])
            backend.join(works[::-1])
            norms.append([backend.step(work.model, ADAM) for work in works])
            for name in (*(work.model for work in works), "other"):
                backend.forget(name)
        assert norms[0] == norms[1]


def test_a_death_amid_shared_micro_batches_leaves_each_what_it_had(
    exact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, samplers and gradients that wait: of each training what was acknowledged, nothing twice."""
    smooth = replace(ADAM, learning_rate=0.1, eps=1.0)  # a step nearly as long as the gradient
    works = [replace(work, data=work.data[:4]) for work in several()]
    how = ("train_server.shared=layers", "trainer.batch_size=8", "trainer.recoveries=1")
    with backend_on(exact, tmp_path, *LAYOUTS["two"], *how) as backend:
        monkeypatch.setattr(backend._cluster, "recover", lambda: None)
        run_pass = backend._cluster.run_pass
        spec: list[PassSpec] = []

        def dying(one: PassSpec) -> PassReport:
            """The second pass of a call is done, and its report lost."""
            spec.append(one)
            report = run_pass(one)
            if len(spec) == 2:
                raise ActorLost("expert actor 0 died", observed="killed")
            return report

        seen: dict[bool, list[Any]] = {}
        for dies in (False, True):
            found = seen[dies] = []
            for seed, work in enumerate(works):
                backend.create(work.model, seed, WHOLE)
            found += [result.loss for result in backend.join(works)]
            found += [backend.step(work.model, smooth)["grad_norm"] for work in works]
            backend.keep("b", "sampler")
            found += [result.loss for result in backend.join(works[:2])]  # gradients that wait
            monkeypatch.setattr(backend._cluster, "run_pass", dying if dies else run_pass)
            found += [result.loss for result in backend.join(works[::-1])]
            found += [backend.step(work.model, smooth)["grad_norm"] for work in works]
            found += backend.score("sampler", [works[0].data[0].tokens], 0)[0].logprobs.tolist()
            for work in works:
                found.append(backend.run(work.model, work.data, work.loss, backward=False).loss)
                backend.forget(work.model)
            backend.drop("sampler")
    assert any(micro.parts for groups in spec[0].wave for group in groups for micro in group)
    assert seen[True] == pytest.approx(seen[False], rel=1e-4)


@pytest.mark.parametrize(("layout", "rows"), [("two", "auto"), ("replicas", 4)])
def test_rows_of_several_trainings_share_micro_batches(
    exact: Path, tmp_path: Path, layout: str, rows: Any
) -> None:
    """Each training's losses, log-probabilities and gradients are what it has alone, to rounding."""
    smooth = replace(ADAM, learning_rate=1.0, eps=1.0)  # a step nearly as long as the gradient
    sizes = ("trainer.batch_size=48", f"trainer.micro_batch_size={rows}")
    how = (*LAYOUTS[layout], "train_server.shared=layers", *sizes)
    with backend_on(exact, tmp_path, *how) as backend:
        spec = passes_of(backend)
        seen: dict[bool, list[Any]] = {}
        for joins in (False, True):
            found = seen[joins] = []
            for seed, work in enumerate(several()):
                backend.create(work.model, seed, WHOLE)
            for _ in range(2):  # B is zero before the first step
                del spec[:]
                if joins:
                    found += backend.join(several())
                else:
                    for work in several():
                        found.append(backend.run(work.model, work.data, work.loss, backward=True))
                found += [backend.step(work.model, smooth)["grad_norm"] for work in several()]
            of_pass = [micro for one in spec for groups in one.wave for group in groups for micro in group]
            mixed = [micro for micro in of_pass if len({part.training for part in micro.parts}) > 1]
            # full ones, too, if their rows are short
            assert any(rows == "auto" or len(micro.lengths) > rows for micro in mixed) == joins
            for work in several():
                backend._take_up(work.model)
                found.append(backend._cluster.parameters())
                backend.forget(work.model)
    for alone, together in zip(seen[False], seen[True], strict=True):
        if isinstance(alone, PassResult):
            assert together.loss == pytest.approx(alone.loss, rel=1e-5)
            for one, other in zip(alone.logprobs, together.logprobs, strict=True):
                np.testing.assert_allclose(other, one, rtol=1e-5, atol=2e-5)
        elif isinstance(alone, float):
            assert together == pytest.approx(alone, rel=1e-4)
        else:
            for name, value in alone.items():
                assert float((together[name] - value).norm()) <= 1e-4 * float(value.norm()), name
