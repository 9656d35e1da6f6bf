"""The API as the SDK's own clients use it."""

from __future__ import annotations

import io
import json
import math
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from kt_ray.batch import LoraPart
from kt_ray.errors import TryAgain
from kt_ray.train_server.sample_rounds import MOST_TRIES
from tests.helpers.fake_train_backend import FakeBackend, token_after, wrong
from tests.helpers.train_server import KEY, Running, datum, running, until

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the SDK's connections

PROMPT = types.ModelInput.from_ints([5, 6, 7])


def trained(client: tinker.ServiceClient, **more: Any) -> Any:
    return client.create_lora_training_client("demo/model", rank=8, **{"seed": 3, **more}).result()


def test_a_step_of_training(server: Running) -> None:
    training = trained(server.client())
    info = training.get_info()
    assert (info.model_name, info.is_lora, info.lora_rank) == ("demo/model", True, 8)
    assert info.model_data.tokenizer_id == "demo/tokenizer"
    passed = training.forward_backward([datum([2, 3, 4], weights=[0.0, 1.0, 1.0])], "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=0.5))
    # log-probabilities: -0.1 * target - 3
    np.testing.assert_allclose(
        passed.result().loss_fn_outputs[0]["logprobs"].tolist(), [-3.3, -3.4, -3.1], 1e-6
    )
    assert passed.result().metrics == {"loss:sum": pytest.approx(6.5), "tokens:sum": 3.0}
    assert stepped.result().metrics == {"grad_norm": 2.0}
    assert [call[0] for call in server.backend.calls] == ["create", "backward", "step"]


def test_forward_alone_adds_no_gradient(server: Running) -> None:
    training = trained(server.client())
    result = training.forward([datum([2, 3]), datum([4, 5, 6])], "cross_entropy").result()
    assert [out["logprobs"].shape for out in result.loss_fn_outputs] == [[2], [3]]
    assert training.optim_step(types.AdamParams()).result().metrics == {"grad_norm": 0.0}


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", None),
        ("gspo", {"clip_low_threshold": 0.9}),
        ("dro", {"beta": 0.1}),
    ],
)
def test_policy_losses(server: Running, loss: Any, config: Any) -> None:
    training = trained(server.client())
    mask = {"sequence_ratio_mask": [0.0, 1.0]} if loss == "gspo" else {}
    row = datum([2, 3], logprobs=[-3.3, -3.1], advantages=[0.0, 2.0], **mask)
    result = training.forward_backward([row], loss, config).result()
    assert result.metrics["loss:sum"] == pytest.approx(2.0 * 3.1)


def test_a_loss_that_the_client_computes(server: Running) -> None:
    training = trained(server.client())

    def loss(data: Any, logprobs: Any) -> Any:
        return sum(-row.sum() for row in logprobs), {"mine": 1.0}

    result = training.forward_backward_custom([datum([2, 3])], loss).result()
    assert result.metrics["mine"] == 1.0 and result.metrics["loss:sum"] == pytest.approx(6.4)
    assert training.optim_step(types.AdamParams()).result().metrics == {"grad_norm": 2.0}


def test_a_batch_in_several_parts_runs_in_order_before_the_step(server: Running) -> None:
    training = trained(server.client())
    parts = {"fwdbwd_max_chunk_len": 2}
    training.holder._client_config = training.holder.get_client_config().model_copy(update=parts)
    passed = training.forward_backward([datum([2, 3])] * 5, "cross_entropy")
    training.optim_step(types.AdamParams()).result()
    result = passed.result()
    assert len(result.loss_fn_outputs) == 5 and result.metrics["tokens:sum"] == 10
    assert [call[0::2] for call in server.backend.calls[1:4]] == [
        ("backward", 2),
        ("backward", 2),
        ("backward", 1),
    ]
    assert server.backend.calls[4][0] == "step"


def test_sampling_from_a_training(server: Running) -> None:
    training = trained(server.client())
    sampler = training.save_weights_and_get_sampling_client().result()
    training.forward_backward([datum([2, 3])], "cross_entropy").result()
    params = types.SamplingParams(max_tokens=4, temperature=0.0)
    result = sampler.sample(PROMPT, 2, params).result()
    for sequence in result.sequences:
        assert sequence.tokens == [token_after([5, 6, 7], place, 3, 0) for place in range(4)]
        assert sequence.logprobs == pytest.approx([-0.5, -1.5, -2.5, -3.5])
        assert sequence.stop_reason == "length"
    assert server.backend.requests[0].adapter in server.backend.samplers
    assert not any(call[0].startswith("save") for call in server.backend.calls)  # nothing on disk


def test_sampling_from_the_base_model_and_a_saved_sampler(server: Running) -> None:
    client = server.client()
    base = client.create_sampling_client(base_model="demo/model").result()
    assert base.get_base_model() == "demo/model"
    params = types.SamplingParams(max_tokens=1, temperature=0.0)
    assert base.sample(PROMPT, 1, params).result().sequences[0].tokens == [token_after([5, 6, 7], 0, 0, 0)]
    training = trained(client)
    path = training.save_weights_for_sampler("first").result().path
    assert path == f"tinker://{training.model_id}/sampler_weights/first"
    saved = client.create_sampling_client(model_path=path).result()
    assert saved.get_base_model() == "demo/model"
    assert saved.sample(PROMPT, 1, params).result().sequences[0].tokens == [token_after([5, 6, 7], 0, 3, 0)]
    assert [r.adapter is False for r in server.backend.requests] == [True, False]


@pytest.mark.parametrize(
    ("stop", "strings", "eos"),
    [
        (None, (), (1,)),
        ("B", ("B",), (1,)),
        (["B", "C"], ("B", "C"), (1,)),
        ([7, 9], (), (7, 9)),
        ([], (), ()),
    ],
)
def test_what_ends_an_answer(server: Running, stop: Any, strings: Any, eos: Any) -> None:
    sampler = server.client().create_sampling_client(base_model="demo/model").result()
    sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2, stop=stop)).result()
    (request,) = server.backend.requests
    assert (request.stop, request.sampling.eos) == (strings, eos)


def test_a_stop_string_is_the_answers_last(server: Running) -> None:
    sampler = server.client().create_sampling_client(base_model="demo/model").result()
    tokens = [token_after([5, 6, 7], place, 0, 0) for place in range(3)]
    params = types.SamplingParams(max_tokens=20, temperature=0.0, stop=chr(65 + tokens[2]))
    (sequence,) = sampler.sample(PROMPT, 1, params).result().sequences
    assert (sequence.tokens, sequence.stop_reason) == (tokens, "stop")


def test_samples_of_one_request_differ_and_repeat(server: Running) -> None:
    sampler = server.client().create_sampling_client(base_model="demo/model").result()
    for _ in range(2):
        sampler.sample(PROMPT, 3, types.SamplingParams(max_tokens=1, seed=5, top_k=4, top_p=0.5)).result()
    sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=1)).result()
    seeds = [request.sampling.seed for request in server.backend.requests]
    assert seeds[:3] == seeds[3:6] and len(set(seeds)) == 5
    sampling = server.backend.requests[0].sampling
    assert (sampling.top_k, sampling.top_p, server.backend.requests[-1].sampling.top_k) == (4, 0.5, 0)


def test_without_max_tokens_an_answer_may_fill_the_context(server: Running) -> None:
    sampler = server.client().create_sampling_client(base_model="demo/model").result()
    result = sampler.sample(PROMPT, 1, types.SamplingParams()).result()
    assert len(result.sequences[0].tokens) == 61


def test_logprobs_of_prompts_and_samples(server: Running) -> None:
    sampler = server.client().create_sampling_client(base_model="demo/model").result()
    assert sampler.compute_logprobs(PROMPT).result() == [None, pytest.approx(-0.6), pytest.approx(-0.7)]
    assert sampler.compute_logprobs(PROMPT, 1).result() == [None, None, pytest.approx(-0.7)]
    # no room for the token that the SDK asks for
    whole = types.ModelInput.from_ints([3] * server.backend.max_length)
    assert len([value for value in sampler.compute_logprobs(whole).result() if value is not None]) == 63
    with pytest.raises(tinker.BadRequestError, match="at most 64 together"):
        sampler.sample(whole, 1, types.SamplingParams(max_tokens=1)).result()
    params = types.SamplingParams(max_tokens=2, temperature=0.0)
    result = sampler.sample(
        PROMPT, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3
    ).result()
    top = result.topk_prompt_logprobs
    assert top is not None and top[0] is None and top[1] == [(0, 0.0), (1, pytest.approx(-0.1))]
    first = result.sequences[0].topk_logprobs
    assert first is not None and len(first) == 2 and [len(row or []) for row in first] == [3, 3]


def test_prompts_that_wait_are_scored_together(server: Running) -> None:
    sampler = server.client().create_sampling_client(base_model="demo/model").result()
    server.backend.gate.clear()
    first = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1))
    until(lambda: server.backend.requests)
    scored = [sampler.compute_logprobs(PROMPT) for _ in range(3)]
    until(lambda: len(server.service.promises) == 4)
    server.backend.gate.set()
    assert first.result() and all(one.result()[1] == pytest.approx(-0.6) for one in scored)
    assert ("score", False, 3) in server.backend.calls


def test_a_training_goes_on_from_a_saved_state(server: Running) -> None:
    client = server.client()
    training = trained(client)
    training.forward_backward([datum([2, 3])], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1.0)).result()
    path = training.save_state("after-1", user_metadata={"step": "1"}).result().path
    assert path == f"tinker://{training.model_id}/weights/after-1"
    again = client.create_training_client_from_state_with_optimizer(path).result()
    fresh = client.create_training_client_from_state(path).result()
    assert again.get_info().lora_rank == 8
    models = server.backend.models
    assert models[again.model_id] == models[training.model_id] and models[again.model_id].steps == 1
    assert models[fresh.model_id].steps == 0


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
def test_a_part_of_the_lora(server: Running) -> None:
    """Rank and modules of a training reach the backend, the records, and a training from its state."""
    client = server.client()
    training = client.create_lora_training_client("demo/model", rank=3, train_mlp=False).result()
    path = training.save_state("a").result().path
    again = client.create_training_client_from_state(path).result()
    for one in (training, again):
        assert server.backend.parts[one.model_id] == LoraPart(3, True, False)
        assert one.get_info().lora_rank == 3
        answer = httpx.post(
            f"{server.url}/api/v1/get_info", json={"model_id": one.model_id}, headers={"X-API-Key": KEY}
        )
        assert (answer.json()["train_mlp"], answer.json()["train_attn"]) == (False, True)
    weights = server.rest().get_weights_info_by_tinker_path(path).result()
    assert (weights.lora_rank, weights.train_mlp, weights.train_attn) == (3, False, True)
    with pytest.raises(tinker.BadRequestError, match="this model is of LoraPart"):
        trained(client).load_state(path).result()


def test_checkpoints_outlive_the_server(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        training = trained(server.client(), user_metadata={"of": "tests"})
        state = training.save_state("a").result().path
        training.save_weights_for_sampler("b").result()
        run = training.model_id
    with running(tmp_path) as server:
        client = server.client()
        rest = server.rest()
        assert rest.get_training_run(run).result().user_metadata == {"of": "tests"}
        assert client.create_training_client_from_state(state).result().get_info().lora_rank == 8


def test_an_existing_checkpoint_is_overwritten_when_asked(server: Running) -> None:
    training = trained(server.client())
    training.save_state("a").result()
    with pytest.raises(tinker.RequestFailedError, match="overwrite=True"):
        training.save_state("a").result()
    assert training.save_state("a", overwrite=True).result()
    (saved,) = server.service.saved.all()
    assert saved.name == "a"


def test_records_of_runs_and_checkpoints(server: Running) -> None:
    client = server.client()
    rest = server.rest()
    training = trained(client)
    run = training.model_id
    assert [one.training_run_id for one in rest.list_training_runs().result().training_runs] == [run]
    state = training.save_state("a", ttl_seconds=7200, user_metadata={"k": "v"}).result().path
    training.save_weights_for_sampler("b").result()
    listed = rest.list_checkpoints(run).result().checkpoints
    assert sorted(one.checkpoint_id for one in listed) == ["sampler_weights/b", "weights/a"]
    first = next(one for one in listed if one.checkpoint_id == "weights/a")
    assert first.expires_at is not None and first.user_metadata == {"k": "v"} and first.size_bytes
    page = rest.list_user_checkpoints(limit=1).result()
    assert len(page.checkpoints) == 1 and page.cursor is not None and page.cursor.total_count == 2
    shown = rest.get_training_run(run).result()
    assert shown.last_checkpoint is not None and shown.last_checkpoint.tinker_path == state
    weights = rest.get_weights_info_by_tinker_path(state).result()
    assert (weights.base_model, weights.lora_rank) == ("demo/model", 8)
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    rest.delete_checkpoint_from_tinker_path(f"tinker://{run}/sampler_weights/b").result()
    (left,) = rest.list_checkpoints(run).result().checkpoints
    assert left.checkpoint_id == "weights/a" and left.expires_at is None
    with pytest.raises(tinker.BadRequestError, match="publishing checkpoints is not supported"):
        rest.publish_checkpoint_from_tinker_path(state).result()
    session = client.holder.get_session_id()
    assert rest.list_sessions().result().sessions == [session]
    assert rest.get_session(session).result().training_run_ids == [run]
    capabilities = rest.get_server_capabilities().result().supported_models
    assert [(one.model_name, one.max_context_length) for one in capabilities] == [("demo/model", 64)]


def test_notes_that_are_no_texts_keep_nobody_from_the_records(server: Running) -> None:
    notes: Any = {"lr": 1e-4, "tags": ["猫"], "of": "me"}
    server.clients.append(tinker.ServiceClient(base_url=server.url, api_key=KEY, user_metadata=notes))
    client, rest = server.clients[-1], server.rest()
    training = client.create_lora_training_client("demo/model", rank=8, user_metadata=notes).result()
    (listed,) = rest.list_training_runs().result().training_runs
    session = rest.get_session(client.holder.get_session_id()).result()
    texts = {"lr": "0.0001", "tags": '["猫"]', "of": "me"}
    assert listed.training_run_id == training.model_id
    assert listed.user_metadata == session.user_metadata == texts


def test_the_archive_of_a_sampler_is_its_adapter(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")  # it needs room beside the adapter only
    training = trained(server.client())
    training.save_weights_for_sampler("b").result()
    url = f"{server.url}/api/v1/training_runs/{training.model_id}/checkpoints/sampler_weights/b/archive"
    answer = httpx.get(url, headers={"X-API-Key": KEY})
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        assert tar.getnames() == ["adapter_config.json", "adapter_model.json"]
        assert json.load(tar.extractfile("adapter_model.json") or io.BytesIO()) == 3.0


def test_what_is_not_served_is_refused_at_once(server: Running) -> None:
    client = server.client()
    for wanted, changes in (
        ("base_model 'other' is not served here", {"base_model": "other"}),
        ("rank=8.*lora.rank=32", {"rank": 32}),
    ):
        arguments = {"base_model": "demo/model", "rank": 8, **changes}
        with pytest.raises(tinker.BadRequestError, match=wanted):
            client.create_lora_training_client(**arguments).result()  # type: ignore[arg-type]
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        client.create_sampling_client(model_path="tinker://nobody/sampler_weights/x").result()
    training = trained(client)
    with pytest.raises(tinker.BadRequestError, match="stable_reinforce' is not supported"):
        training.forward_backward([datum([2, 3])], "stable_reinforce").result()
    # the refused request does not hold up those after it, but its step would be a part of what was asked for
    with pytest.raises(tinker.RequestFailedError, match="no step was taken: request 1 of a pass"):
        training.optim_step(types.AdamParams()).result()
    assert training.optim_step(types.AdamParams()).result().metrics == {"grad_norm": 0.0}


def test_more_models_than_there_is_room_for(tmp_path: Path) -> None:
    with running(tmp_path, FakeBackend(slots=1)) as server:
        first = server.client()
        trained(first)
        second = server.client()
        with pytest.raises(tinker.BadRequestError, match=r"takes 1 model.*ServiceClient\.close"):
            trained(second)
        first.close("success").result()
        assert trained(second).get_info().lora_rank == 8
        assert [call[0] for call in server.backend.calls] == ["create", "forget", "create"]


def test_a_fault_fails_its_request_only(server: Running) -> None:
    training = trained(server.client())
    for fault, category, message in (
        (wrong("the batch is too long"), types.RequestErrorCategory.User, "the batch is too long"),
        (TryAgain("an actor died"), types.RequestErrorCategory.Server, "an actor died"),
        (ZeroDivisionError("a secret"), types.RequestErrorCategory.Server, "its log says why"),
    ):
        server.backend.faults["backward"] = fault
        with pytest.raises(tinker.RequestFailedError, match=message) as failed:
            training.forward_backward([datum([2, 3])], "cross_entropy").result()
        assert failed.value.category is category and "a secret" not in str(failed.value)
    assert math.isfinite(
        training.forward_backward([datum([2])], "cross_entropy").result().metrics["loss:sum"]
    )


def test_no_step_on_a_part_of_a_pass(server: Running) -> None:
    training = trained(server.client())
    for again in (False, True):
        training.forward_backward([datum([2, 3])], "cross_entropy").result()
        server.backend.faults["backward"] = wrong("the batch is too long")
        failing = training.forward_backward([datum([2])], "cross_entropy")
        if again:  # the client knows, and sends what failed once more, on top of the rest
            with pytest.raises(tinker.RequestFailedError, match="too long"):
                failing.result()
            failing = training.forward_backward([datum([2])], "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=1.0))
        with pytest.raises(
            tinker.RequestFailedError, match=r"no step was taken.*send that pass again, whole"
        ):
            step.result()
        if not again:
            with pytest.raises(tinker.RequestFailedError, match="too long"):
                failing.result()
    (weight,) = server.backend.models.values()
    assert weight.steps == 0 and weight.gradient == 0.0
    alone = training.forward_backward([datum([2, 3])], "cross_entropy").result().metrics["loss:sum"]
    assert math.isfinite(alone)
    assert training.optim_step(types.AdamParams()).result().metrics["grad_norm"] > 0
    assert training.forward([datum([2])], "cross_entropy").result()


def test_a_session_of_generation_that_fails(server: Running) -> None:
    sampler = server.client().create_sampling_client(base_model="demo/model").result()
    params = types.SamplingParams(max_tokens=1)
    server.backend.faults["sampling"] = wrong("all recoveries are used up")
    with pytest.raises(tinker.RequestFailedError, match="recoveries"):
        sampler.sample(PROMPT, 1, params).result()
    server.backend.faults["score"] = wrong("no memory")
    with pytest.raises(tinker.RequestFailedError, match="no memory"):
        sampler.compute_logprobs(PROMPT).result()
    assert len(sampler.sample(PROMPT, 2, params).result().sequences) == 2


def test_samples_are_drawn_again_after_a_death(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = server.client().create_sampling_client(base_model="demo/model").result()
    params = types.SamplingParams(max_tokens=5, seed=3)
    expected = [one.tokens for one in sampler.sample(PROMPT, 3, params).result().sequences]
    server.backend.deaths = 2
    server.backend.faults["sampling"] = TryAgain("another actor died")
    assert [one.tokens for one in sampler.sample(PROMPT, 3, params).result().sequences] == expected
    assert server.backend.deaths == 0
    server.backend.deaths = MOST_TRIES
    with pytest.raises(tinker.RequestFailedError, match="an actor died"):
        sampler.sample(PROMPT, 3, params).result()


def test_a_sample_that_is_given_up_is_cancelled(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    promise = server.service.promise
    monkeypatch.setattr(server.service, "promise", lambda name: (asked.append(name), promise(name))[1])
    sampler = server.client().create_sampling_client(base_model="demo/model").result()
    server.backend.gate.clear()
    pending = sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=9))
    until(lambda: asked and len(server.backend.requests) == 2)
    pending.future().cancel()
    until(lambda: ("sampled",) in server.backend.calls)


def test_a_sampler_in_another_process(server: Running) -> None:
    sampler = server.client().create_sampling_client(base_model="demo/model").result()
    there = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=KEY)
    params = types.SamplingParams(max_tokens=1, temperature=0.0)
    answers = [one.sample(PROMPT, 1, params).result().sequences[0] for one in (sampler, there)]
    assert answers[0].tokens == answers[1].tokens and answers[0].sequence_id != answers[1].sequence_id


@pytest.mark.parametrize("key", ["tml-secret", "secret"])
def test_the_keys_prefix_may_be_the_sdks_alone(tmp_path: Path, key: str) -> None:
    with running(tmp_path, key=key) as server:
        assert server.client(key="tml-secret").holder.get_session_id()
        with pytest.raises(tinker.AuthenticationError, match="incorrect API key"):
            server.client(key="tml-other").holder  # noqa: B018
        server.clients.pop()
