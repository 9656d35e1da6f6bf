"""Sampling against transformers' own `generate`, and what it promises beyond."""

from __future__ import annotations

import pytest
import torch

from kt_ray.errors import UserError
from kt_ray.generate.requests import Request, Sampling
from kt_ray.generate.sampling import RowSampler, sample


def sampler(prompt: tuple[int, ...] = (1, 2), **settings: object) -> RowSampler:
    return RowSampler(0, Request(prompt, Sampling(**settings)))  # type: ignore[arg-type]


def test_greedy_takes_the_most_probable() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    assert [t.token for t in sample([sampler(), sampler()], logits)] == [1, 0]


def test_a_temperature_of_almost_nothing_is_greedy() -> None:
    logits = torch.tensor([[0.0, 30.0, 10.0]])
    for temperature in (1e-6, 1e-40):
        (token,) = sample([sampler(temperature=temperature, seed=3)], logits)
        assert (token.token, token.finish) == (1, "")
    assert not Sampling(temperature=1e-5).greedy


def test_a_seed_fixes_the_tokens_whatever_the_batch() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))

    def draw(others: int) -> list[int]:
        rows = [sampler(temperature=1.0, seed=7), *(sampler(temperature=1.0, seed=s) for s in range(others))]
        return [sample(rows, step.expand(len(rows), -1))[0].token for step in logits]

    assert draw(0) == draw(3)
    assert draw(0) != [sample([sampler(temperature=1.0, seed=8)], step[None])[0].token for step in logits]


def test_frequencies_follow_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    row = sampler(temperature=0.5, seed=3, max_new_tokens=100_000)
    counts = torch.bincount(torch.tensor([row.next(logits).token for _ in range(4000)]), minlength=3)
    expected = torch.softmax(logits / 0.5, -1)
    assert (counts / 4000 - expected).abs().max() < 0.03


@pytest.mark.parametrize(
    ("settings", "allowed"), [({"top_k": 2}, {2, 3}), ({"top_p": 0.5}, {3}), ({"min_p": 0.3}, {2, 3})]
)
def test_cuts(settings: dict[str, float], allowed: set[int]) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    row = sampler(temperature=1.0, max_new_tokens=1000, **settings)
    assert {row.next(logits).token for _ in range(200)} == allowed


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    row = sampler(prompt=(1,), repetition_penalty=10.0)
    logits = torch.tensor([0.5, 4.0, 3.0])
    assert [row.next(logits).token for _ in range(2)] == [2, 0]


def test_candidates_are_told_in_their_order() -> None:
    logits = torch.tensor([0.5, 4.0, 3.0])
    token = sampler(logprobs=0, candidates=(2, 0)).next(logits)
    own = torch.log_softmax(logits, -1)
    assert token.token == 1 and [t for t, _ in token.top] == [2, 0]
    assert [p for _, p in token.top] == pytest.approx([float(own[2]), float(own[0])])
    with pytest.raises(UserError, match="candidates"):
        Sampling(candidates=(2,))


def test_no_end_before_min_new_tokens() -> None:
    row = sampler(min_new_tokens=2, max_new_tokens=5, eos=(0,))
    logits = torch.tensor([9.0, 1.0, 0.0])
    found = [row.next(logits) for _ in range(3)]
    assert [(t.token, t.finish) for t in found] == [(1, ""), (1, ""), (0, "stop")]


def test_logprobs_are_of_the_model_not_of_the_cut_distribution() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0, -1.0])
    token = sampler(temperature=1.0, top_k=1, logprobs=2).next(logits)
    own = torch.log_softmax(logits, -1)
    assert token.token == 2 and token.logprob == pytest.approx(float(own[2]))
    assert token.top == ((2, pytest.approx(float(own[2]))), (1, pytest.approx(float(own[1]))))


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}])
def test_logits_that_are_not_finite_end_the_row_alone(settings: dict[str, float]) -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0]])
    found = sample([sampler(**settings), sampler()], logits)
    assert [t.finish for t in found] == ["error", ""] and found[1].token == 1


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "top_k", "repetition_penalty", "seed"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=name):
        Sampling(**{name: -1})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="prompt"):
        Request(())
