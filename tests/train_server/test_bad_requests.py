"""What is wrong with a request is said by name, at once, with a status that the SDK does not repeat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as proto

from kt_ray.train_server.endpoints import validator
from tests.helpers.train_server import MAX_BODY, PROTOBUF, Raw, Running, running


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raw]:
    with running(tmp_path_factory.mktemp("saved")) as server:
        made = Raw(server)
        yield made
        made.http.close()


@pytest.fixture(scope="module")
def model(raw: Raw) -> str:
    return raw.model()


@pytest.fixture(scope="module")
def sampler(raw: Raw) -> str:
    return raw.sampler()


@pytest.fixture(scope="module")
def numbers() -> Iterator[int]:
    return iter(range(1, 1000))


def message(model: str, number: int) -> Any:
    """A right one."""
    made = proto.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="cross_entropy")
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([2, 3, 4], np.int32).tobytes()
    put(datum, "target_tokens", np.array([3, 4, 1], np.int64))
    put(datum, "weights", np.ones(3, np.float32))
    return made


def put(datum: Any, name: str, values: np.ndarray) -> None:
    kinds = {"float32": proto.DTYPE_FLOAT32, "int64": proto.DTYPE_INT64}
    tensor = proto.Tensor(dense=values.tobytes(), dtype=kinds[values.dtype.name], shape=values.shape)
    datum.loss_fn_inputs[name].CopyFrom(tensor)


def change_tokens(tokens: list[int]) -> Any:
    def change(made: Any) -> None:
        made.data[0].model_input[0].encoded_text.tokens = np.array(tokens, np.int32).tobytes()

    return change


def change_input(name: str, values: np.ndarray) -> Any:
    return lambda made: put(made.data[0], name, values)


def sparse(made: Any) -> None:
    made.data[0].loss_fn_inputs["weights"].sparse_csr.values = b""


def image(made: Any) -> None:
    made.data[0].model_input.add().image.data = b"png"


def text_config(made: Any) -> None:
    made.loss_fn_config_v2["beta"].text = "much"


def crossed(made: Any) -> None:
    made.loss_fn = "ppo"
    put(made.data[0], "logprobs", -np.ones(3, np.float32))
    put(made.data[0], "advantages", np.ones(3, np.float32))
    made.data[0].loss_fn_inputs.pop("weights")
    made.loss_fn_config["clip_low_threshold"] = 1.5


PASSES = {
    "no data": (lambda made: made.ClearField("data"), "data is empty"),
    "unknown loss": (lambda made: setattr(made, "loss_fn", "mse"), "loss_fn 'mse' is not supported"),
    "custom loss": (lambda made: setattr(made, "loss_fn", "custom"), "loss_fn 'custom' is not supported"),
    "no tokens": (change_tokens([]), r"data\[0\].model_input has no tokens"),
    "half a token": (
        lambda made: setattr(made.data[0].model_input[0].encoded_text, "tokens", b"abc"),
        "no whole int32",
    ),
    "token out of range": (change_tokens([2, 50, 4]), "token 50 at position 1; the vocabulary is 0 to 49"),
    "negative token": (change_tokens([2, -1, 4]), "token -1 at position 1"),
    "too long": (change_tokens([2] * 65), "65 tokens; this server takes at most 64"),
    "image": (image, "a chunk of image"),
    "field of a newer SDK": (
        lambda made: made.data[0].MergeFromString(b"\x9a\x06\x00"),
        "fields that tinker 0.38 does not know",
    ),
    "empty chunk": (lambda made: made.data[0].model_input.add(), "a chunk of no kind"),
    "no targets": (
        lambda made: made.data[0].loss_fn_inputs.pop("target_tokens"),
        "'target_tokens'.* is missing",
    ),
    "wrong shape": (change_input("weights", np.ones(2, np.float32)), r"has shape \[2\], required \[3\]"),
    "several targets": (
        change_input("target_tokens", np.ones((3, 2), np.int64)),
        r"has shape \[3, 2\], required \[3\]",
    ),
    "target out of range": (change_input("target_tokens", np.array([1, 2, 99])), "token 99 at position 2"),
    "float targets": (change_input("target_tokens", np.ones(3, np.float32)), "must be int64"),
    "nan": (change_input("weights", np.array([1, np.nan, 1], np.float32)), "not finite"),
    "sparse": (sparse, "is sparse"),
    "unknown input": (change_input("mask", np.ones(3, np.float32)), "'mask'.* is not an input"),
    "no type": (
        lambda made: setattr(made.data[0].loss_fn_inputs["weights"], "dtype", 0),
        "a type that is not supported",
    ),
    "bytes and shape differ": (
        lambda made: made.data[0].loss_fn_inputs["weights"].shape.append(7),
        "which shape",
    ),
    "bounds that cross": (crossed, "clip_low_threshold is 1.5 and clip_high_threshold 1.2"),
    "unknown setting": (lambda made: made.loss_fn_config.update(beta=0.1), "is not of 'cross_entropy'"),
    "setting in words": (text_config, "must be a number"),
    "policy loss without advantages": (
        lambda made: (setattr(made, "loss_fn", "ppo"), made.data[0].loss_fn_inputs.pop("weights")),
        "'logprobs'.* is missing; 'ppo' needs it",
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_that_is_wrong(raw: Raw, model: str, numbers: Iterator[int], name: str) -> None:
    change, wanted = PASSES[name]
    number = next(numbers)
    made = message(model, number)
    change(made)
    answer = raw.http.post("forward_backward", content=made.SerializeToString(), headers=PROTOBUF)
    assert answer.status_code == 400, answer.text
    with pytest.raises(AssertionError, match=wanted):
        raise AssertionError(answer.json()["error"]["message"])
    # its number is taken: the next one runs
    assert raw.result(raw.passed(model, next(numbers)))


def test_a_right_pass_for_comparison(raw: Raw, model: str, numbers: Iterator[int]) -> None:
    content = message(model, next(numbers)).SerializeToString()
    assert raw.http.post("forward_backward", content=content, headers=PROTOBUF).status_code == 200


@pytest.mark.parametrize(
    ("content", "headers", "status", "wanted"),
    [
        (b"\xff\xff\xff", PROTOBUF, 400, "is not the protobuf message"),
        (b"{}", {"content-type": "application/json"}, 400, "application/x-protobuf"),
        (b"", {**PROTOBUF, "content-encoding": "zstd"}, 400, "compressed"),
        (b"", PROTOBUF, 404, "there is no model ''"),
        (b"0" * (MAX_BODY + 1), PROTOBUF, 413, "larger than"),
    ],
)
def test_a_pass_that_is_none(raw: Raw, content: bytes, headers: Any, status: int, wanted: str) -> None:
    answer = raw.http.post("forward_backward", content=content, headers=headers)
    assert answer.status_code == status and wanted in answer.text


PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
SAMPLES: list[tuple[dict[str, Any], str]] = [
    ({"num_samples": 0}, "num_samples is 0"),
    ({"num_samples": 10**6}, "required 1 to 128"),
    ({"seq_id": None}, "seq_id are required"),
    ({"prompt": {"chunks": []}}, "prompt has no tokens"),
    ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [50]}]}}, "token 50"),
    ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [10**30]}]}}, "64-bit"),
    (
        {"prompt": {"chunks": [{"type": "image_asset_pointer", "location": "x", "format": "png"}]}},
        "only text",
    ),
    ({"sampling_params": {"max_tokens": 0}}, "max_tokens is 0"),
    ({"sampling_params": {"max_tokens": 63}}, "at most 64 together"),
    ({"sampling_params": {"temperature": -1}}, "temperature is out of range"),
    ({"sampling_params": {"top_p": 0}}, "top_p is out of range"),
    ({"sampling_params": {"top_k": -2}}, "top_k is -2"),
    ({"sampling_params": {"min_p": 0.5}}, "sampling_params.min_p"),
    ({"sampling_params": {"stop": [99]}}, "stop has token 99"),
    ({"sampling_params": {"stop": [""]}}, "a stop string is empty"),
    ({"topk_sample_logprobs": 21}, "required 0 to 20"),
    ({"topk_prompt_logprobs": -1}, "required 0 to 20"),
    ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported"),
    ({"record_stability_info": True}, "(loss_fn=importance_sampling for recipes"),
    (
        {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}},
        "target_prompt_logprobs is not supported",
    ),
    ({"prompt_logprobs": True, "prompt_logprobs_last_n": 2}, "required 1 to 1"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"base_model": "another"}, "base_model 'another' is not served here"),
    ({"model_path": "tinker://run/sampler_weights/a"}, "leave it out"),
]


@pytest.mark.parametrize(("change", "wanted"), SAMPLES)
def test_a_sample_that_is_wrong(raw: Raw, sampler: str, change: dict[str, Any], wanted: str) -> None:
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": PROMPT, "sampling_params": {}, **change}
    answer = raw.http.post("asample", json=body)
    assert answer.status_code == 400 and wanted in answer.json()["error"]["message"], answer.text


def test_a_wrong_body_makes_few_errors_and_not_millions(raw: Raw, sampler: str) -> None:
    """All those of 400 KB of chunks took 1.2 GB."""
    body = {"sampling_session_id": sampler, "seq_id": 1, "sampling_params": {}}
    wrong = json.dumps({**body, "prompt": {"chunks": [0] * 200_000}}).encode()
    with pytest.raises(ValidationError) as error:
        validator(types.SampleRequest).validate_json(wrong)
    assert error.value.error_count() <= 10
    answer = raw.http.post("asample", content=wrong, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "prompt.chunks[0]" in answer.json()["error"]["message"], answer.text


def test_a_body_of_too_many_fields_is_refused_as_a_whole_and_holds_its_place(raw: Raw) -> None:
    """200,000 of them, in 3 MB, took four seconds."""
    model = raw.model(2)
    body = {"model_id": model, "seq_id": 1, **{f"k{i}": 1 for i in range(1000)}}
    answer = raw.http.post("optim_step", json=body)
    assert answer.status_code == 400 and "1002 fields, more than 100" in answer.json()["error"]["message"]
    assert isinstance(raw.result(raw.passed(model, 2)), bytes)


def test_objects_within_a_body_have_few_fields_and_notes_any_number(raw: Raw, sampler: str) -> None:
    """One chunk of 200,000 made 800,011 errors."""
    many = {f"k{i}": 1 for i in range(1000)}
    chunk = {"type": "encoded_text", "tokens": [1], **many}
    body = {"sampling_session_id": sampler, "seq_id": 1, "sampling_params": {}, "prompt": {"chunks": [chunk]}}
    answer = raw.http.post("asample", json=body)
    error = answer.json()["error"]["message"]
    assert answer.status_code == 400 and "an object of the body has 1002 fields, more than 100" in error
    body = {"tags": [], "sdk_version": "0", "user_metadata": {**many, "more": many}}
    assert raw.http.post("create_session", json=body).status_code == 200


@pytest.mark.parametrize("path", ["create_session", "create_model"])
def test_metadata_that_is_no_json(raw: Raw, path: str) -> None:
    body = {
        "session_id": raw.session,
        "model_seq_id": 6,
        "base_model": "demo/model",
        "lora_config": {"rank": 1},
    }
    body = body if path == "create_model" else {"tags": [], "sdk_version": "0"}
    content = json.dumps({**body, "user_metadata": {"lr": [float("nan")]}}).encode()
    answer = raw.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "user_metadata has NaN" in answer.json()["error"]["message"], (
        answer.text
    )
    assert raw.http.get("training_runs").status_code == 200


OTHERS: list[tuple[str, str, Any, int, str]] = [
    ("POST", "create_session", {}, 400, "missing required parameter"),
    ("POST", "create_session", [], 400, "must be a JSON object"),
    ("POST", "session_heartbeat", {"session_id": "nobody"}, 410, "has ended, or never was"),
    ("POST", "sessions/nobody/finish", {}, 410, "has ended, or never was"),
    ("POST", "get_info", {"model_id": "nobody"}, 404, "there is no model 'nobody'"),
    ("POST", "unload_model", {"model_id": "nobody"}, 404, "there is no model 'nobody'"),
    ("POST", "get_info", {"model_id": "*"}, 404, "no state of this one is saved"),
    (
        "POST",
        "asample",
        {"sampling_session_id": "x", "seq_id": 0, "prompt": PROMPT, "sampling_params": {}},
        404,
        "",
    ),
    ("POST", "weights_info", {"tinker_path": "file:///etc/passwd"}, 400, "is no checkpoint's path"),
    ("POST", "weights_info", {"tinker_path": "tinker://../weights/x"}, 400, "is no name"),
    ("POST", "weights_info", {"tinker_path": "tinker://run/weights/.x"}, 400, "is no name"),
    ("POST", "weights_info", {"tinker_path": "tinker://run/secrets/x"}, 400, "is no checkpoint's path"),
    ("POST", "weights_info", {"tinker_path": "tinker://run/weights/x"}, 404, "there is no checkpoint"),
    ("GET", "training_runs/nobody", None, 404, "there is no training run"),
    ("GET", "training_runs/*/checkpoints", None, 404, "there is no training run"),
    ("GET", "training_runs?limit=-1", None, 400, "limit must be"),
    ("GET", "checkpoints?limit=much", None, 400, "limit"),
    ("DELETE", "training_runs/run/checkpoints/weights/x", None, 404, "there is no checkpoint"),
    ("DELETE", "training_runs/%2e%2e/checkpoints/weights/x", None, 400, "is no name"),
    ("GET", "training_runs/run/checkpoints/weights/x/archive", None, 404, "there is no checkpoint"),
    (
        "PUT",
        "training_runs/run/checkpoints/weights/x/ttl",
        {"ttl_seconds": 5000},
        404,
        "there is no checkpoint",
    ),
    ("POST", "save_weights_external", {}, 400, "external weights"),
    ("POST", "create_custom_loss", {}, 400, "a custom loss on the server"),
    ("POST", "retrieve_futures", {}, 400, "is not supported"),
    ("POST", "copy_weights", {}, 400, "is not supported"),
    ("POST", "auth/token", {}, 400, "is not supported"),
    ("GET", "nowhere", None, 404, "unknown request URL"),
    ("GET", "create_model", None, 405, "not allowed"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "wanted"), OTHERS)
def test_other_requests_that_are_wrong(
    raw: Raw, method: str, path: str, body: Any, status: int, wanted: str
) -> None:
    answer = raw.http.request(method, path, json=body) if body is not None else raw.http.request(method, path)
    assert answer.status_code == status, answer.text
    assert wanted in answer.json()["error"]["message"]


MODELS: list[tuple[dict[str, Any], str]] = [
    ({"base_model": "other"}, "base_model 'other' is not served here; it is demo/model"),
    ({"lora_config": None}, "lora_config is missing"),
    ({"lora_config": {"rank": 9}}, "this server trains ranks 1 to 8"),
    ({"lora_config": {"rank": 0}}, "LoRA of rank 0 is asked for"),
    ({"lora_config": {"rank": 8, "seed": -1}}, "seed is -1"),
    ({"optimizer_config": {"type": "dimuon", "version": 1}}, "the optimizer 'dimuon' is not supported"),
    ({"model_seq_id": -1}, "model_seq_id is -1"),
]


@pytest.mark.parametrize(("change", "wanted"), MODELS)
def test_a_model_that_is_not_made(raw: Raw, change: dict[str, Any], wanted: str) -> None:
    body = {
        "session_id": raw.session,
        "model_seq_id": 5,
        "base_model": "demo/model",
        "lora_config": {"rank": 8},
    }
    answer = raw.http.post("create_model", json={**body, **change})
    assert answer.status_code == 400 and wanted in answer.json()["error"]["message"], answer.text


STEPS: list[tuple[str, dict[str, Any], str]] = [
    ("optim_step", {"adam_params": {"learning_rate": -1}}, "learning_rate is -1"),
    ("optim_step", {"adam_params": {"beta1": 1.0}}, "beta1 is 1.0"),
    ("optim_step", {"adam_params": {"learning_rate": "much"}}, "learning_rate"),
    ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 1}}, "'dimuon' is not supported"),
    ("optim_step", {"adam_params": {}, "seq_id": None}, "seq_id is None"),
    ("optim_step", {"adam_params": {}, "seq_id": 0}, "seq_id is 0"),
    ("save_weights", {"path": "../../etc"}, "is no name of a checkpoint"),
    ("save_weights", {"path": ".hidden"}, "is no name of a checkpoint"),
    ("save_weights", {"path": ""}, "is no name of a checkpoint"),
    ("save_weights", {"path": "x" * 300}, "is no name of a checkpoint"),
    ("save_weights", {"path": "x", "ttl_seconds": -1}, "ttl_seconds is -1"),
    ("save_weights", {"path": "x", "ttl_seconds": 10**12}, "ttl_seconds is"),
    ("save_weights_for_sampler", {"sampling_session_seq_id": 1, "kind": "inflight"}, "kind='inflight'"),
    ("save_weights_for_sampler", {"path": "x", "kind": "inflight"}, "kind='inflight'"),
    ("save_weights_for_sampler", {"path": "x", "sampling_session_seq_id": 1}, "of a sampler without a name"),
    (
        "save_weights_for_sampler",
        {"sampling_session_seq_id": 1, "ttl_seconds": 5},
        "ttl_seconds is of a sampler",
    ),
    (
        "save_weights_for_sampler",
        {"sampling_session_seq_id": 1, "user_metadata": {"a": "b"}},
        "user_metadata is",
    ),
    ("load_weights", {"path": "tinker://a/b", "optimizer": True}, "is no checkpoint's path"),
    ("load_weights", {"path": "x", "optimizer": True, "weights_access_token": "y"}, "weights_access_token"),
    (
        "load_weights",
        {"path": "x", "optimizer": True, "user_metadata": {"a": 1}},
        "user_metadata has no meaning",
    ),
    ("load_weights", {"path": "x", "optimizer": True, "session_id": "y"}, "model_id has no meaning beside"),
]


@pytest.mark.parametrize(("path", "change", "wanted"), STEPS)
def test_a_step_that_is_wrong(
    raw: Raw, model: str, numbers: Iterator[int], path: str, change: dict[str, Any], wanted: str
) -> None:
    body = {"model_id": model, "seq_id": 500 + next(numbers), **change}
    answer = raw.http.post(path, json=body)
    assert answer.status_code == 400 and wanted in answer.json()["error"]["message"], answer.text


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("optim_step", {"adam_params": {"learning_rate": None}}, "learning_rate is null"),
    ("optim_step", {"adam_params": {"learning_rate": "much"}}, "learning_rate"),
    ("optim_step", {}, "optim_params"),
    ("save_weights", {"path": 5}, "path"),
    ("save_weights_for_sampler", {"unheard_of": 1}, "unheard_of"),
    ("load_weights", {"optimizer": True}, "path"),
    ("load_weights", {"path": "x", "optimizer": True, "weights_access_token": "y"}, "weights_access_token"),
    ("load_weights", {"path": "x", "optimizer": True, "base_model": "other"}, "base_model 'other'"),
]


def test_a_request_whose_body_is_wrong_holds_its_place(raw: Raw) -> None:
    model = raw.model(1)
    for number, (path, body, wanted) in enumerate(WRONG, 1):
        answer = raw.http.post(path, json={"model_id": model, "seq_id": number, **body})
        assert answer.status_code == 400 and wanted in answer.json()["error"]["message"], answer.text
    for others in (
        {"model_id": ["x"], "seq_id": 7},
        {"model_id": model, "seq_id": "x"},
        {"seq_id": 7},
        [],
        7,
    ):
        assert raw.http.post("optim_step", json=others).status_code == 400
    last = len(WRONG)  # a load: who comes behind it is told
    assert f"request {last}, had failed" in raw.result(raw.passed(model, last + 1))["error"]


def test_a_training_state_is_not_sampled_from_and_a_sampler_not_trained(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        raw = Raw(server)
        model = raw.model()
        state = raw.result(raw.post("save_weights", model_id=model, seq_id=1, path="a"))["path"]
        adapter = raw.result(raw.post("save_weights_for_sampler", model_id=model, seq_id=2, path="a"))["path"]
        base = {"session_id": raw.session, "sampling_session_seq_id": 0}
        answer = raw.http.post("create_sampling_session", json={**base, "model_path": state})
        assert answer.status_code == 400 and "sample from what save_weights_for_sampler wrote" in answer.text
        for _ in range(2):  # as the SDK repeats it
            raw.post("create_sampling_session", **base, model_path=adapter)
        other = {**base, "sampling_session_seq_id": 1, "model_path": adapter, "base_model": "other"}
        answer = raw.http.post("create_sampling_session", json=other)
        assert answer.status_code == 400 and "base_model 'other'" in answer.text
        other = {**base, "base_model": "demo/model"}  # of the same number
        answer = raw.http.post("create_sampling_session", json=other)
        assert answer.status_code == 400 and "of other weights" in answer.text
        load = {"session_id": raw.session, "model_seq_id": 1, "path": adapter, "optimizer": True}
        answer = raw.http.post("load_weights", json=load)
        assert answer.status_code == 400 and "is for sampling" in answer.text
        server.backend.rank = 4
        answer = raw.http.post("load_weights", json={**load, "path": state})
        assert (
            answer.status_code == 400
            and "with LoRA of rank 8; this server has demo/model with ranks up to 4" in answer.text
        )
        raw.http.close()


def test_who_has_no_key_gets_no_answer(raw: Raw, server: Running) -> None:
    with httpx.Client(base_url=f"{server.url}/api/v1") as nobody:
        assert nobody.get("healthz").json() == {"status": "ok"}
        for headers in ({}, {"X-API-Key": "tml-other"}, {"X-API-Key": ""}):
            answer = nobody.post("create_session", json={}, headers=headers)
            assert answer.status_code == 401 and "X-API-Key" in answer.text
