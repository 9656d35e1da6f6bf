"""Requests and answers of the Tinker API as they travel; the SDK's own package has their types.

Legend: n tokens of a datum or prompt, k most probable tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kt_ray.batch import TokenLoss
from kt_ray.errors import UserError
from kt_ray.generate.requests import Token
from kt_ray.serve.api_errors import ApiError
from kt_ray.train_server.backend import AdamParams, Backend, Datum, PassResult, Scores
from kt_ray.train_server.futures import Reply

try:
    from google.protobuf.message import DecodeError
    from tinker import types
    from tinker.proto import tinker_public_pb2 as proto
except ImportError as error:
    raise UserError(
        "the Tinker API needs the package tinker",
        observed=str(error),
        required="tinker 0.38",
        remedy="pip install 'kt_ray[tinker]'",
    ) from error

PROTOBUF = "application/x-protobuf"
NO_TOKEN, NO_LOGPROB = 0, -99999.0  # cells of a table of most probable tokens that stand for none
_POLICY = ("logprobs", "advantages")
_CLIPS = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"}
# loss -> inputs beside target_tokens; keys of loss_fn_config -> fields of TokenLoss
LOSSES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "cross_entropy": (("weights",), {}),
    "importance_sampling": (_POLICY, {}),
    "ppo": (_POLICY, _CLIPS),
    "cispo": (_POLICY, _CLIPS),
    "gspo": ((*_POLICY, "sequence_ratio_mask"), _CLIPS),
    "dro": (_POLICY, {"beta": "beta"}),
}


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that is the client's to mend: the SDK raises it at once."""
    return ApiError(400, message, param=param, code=code)


# -- requests ----------------------------------------------------------------------------------------


def pass_request(body: bytes) -> Any:
    """The protobuf message of forward_backward; its contents are not checked yet.

    Raises:
        ApiError: it is none.
    """
    try:
        return proto.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        raise bad("the body is not the protobuf message ForwardBackwardRequest") from None


def data_of(message: Any, backend: Backend) -> list[Datum]:
    """The rows of a pass, checked.

    Raises:
        ApiError: what is wrong with which datum.
    """
    loss = message.loss_fn
    if loss not in LOSSES:
        raise bad(f"loss_fn '{loss}' is not supported by this server; it has {', '.join(LOSSES)}", "loss_fn")
    given = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != given:
        raise bad("the message has fields that tinker 0.38 does not know; leave them out", "data")
    if not message.data:
        raise bad("data is empty; send at least one datum", "data")
    return [_datum(datum, loss, f"data[{i}]", backend) for i, datum in enumerate(message.data)]


def _datum(datum: Any, loss: str, where: str, backend: Backend) -> Datum:
    parts = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise bad(f"{where}.model_input has a chunk of {kind or 'no kind'}; only text is supported")
        if len(chunk.encoded_text.tokens) % 4:
            raise bad(f"{where}.model_input: the bytes of a chunk are no whole int32 numbers")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, np.int32).astype(np.int64))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    check_tokens(tokens, f"{where}.model_input", backend)
    if len(tokens) > backend.max_length:
        raise bad(
            f"{where}.model_input has {len(tokens)} tokens; this server takes at most {backend.max_length} "
            "(data.max_length)",
            code="context_length_exceeded",
        )
    names = LOSSES[loss][0]
    given = {
        name: _tensor(t, f"{where}.loss_fn_inputs['{name}']") for name, t in datum.loss_fn_inputs.items()
    }
    unknown = sorted(set(given) - {"target_tokens", *names})
    if unknown:
        raise bad(
            f"{where}.loss_fn_inputs['{unknown[0]}'] is not an input of '{loss}' on this server, which takes "
            f"{', '.join(('target_tokens', *names))}; leave it out",
            "loss_fn_inputs",
        )
    if loss == "cross_entropy":
        given.setdefault("weights", np.ones(len(tokens), np.float32))
    for name in ("target_tokens", *names):
        if name not in given:
            raise bad(f"{where}.loss_fn_inputs['{name}'] is missing; '{loss}' needs it", "loss_fn_inputs")
        if given[name].shape != tokens.shape:
            raise bad(
                f"{where}.loss_fn_inputs['{name}'] has shape {list(given[name].shape)}, required "
                f"[{len(tokens)}]: one value for each token of model_input",
                "loss_fn_inputs",
            )
    targets = given.pop("target_tokens")
    if targets.dtype != np.int64:
        raise bad(f"{where}.loss_fn_inputs['target_tokens'] must be int64", "loss_fn_inputs")
    check_tokens(targets, f"{where}.loss_fn_inputs['target_tokens']", backend)
    inputs = {name: given[name].astype(np.float32) for name in names}
    for name, values in inputs.items():
        if not np.isfinite(values).all():
            raise bad(f"{where}.loss_fn_inputs['{name}'] has values that are not finite", "loss_fn_inputs")
    return Datum(tokens, targets, inputs)


def _tensor(tensor: Any, where: str) -> np.ndarray:
    if tensor.WhichOneof("encoding") == "sparse_csr":
        raise bad(f"{where} is sparse; this server takes one dense value for each token", "loss_fn_inputs")
    kinds: dict[Any, np.dtype[Any]] = {
        proto.DTYPE_FLOAT32: np.dtype(np.float32),
        proto.DTYPE_INT64: np.dtype(np.int64),
    }
    if tensor.dtype not in kinds:
        raise bad(f"{where} has a type that is not supported; send float32 or int64", "loss_fn_inputs")
    kind, shape = kinds[tensor.dtype], list(tensor.shape)
    size = len(tensor.dense) // kind.itemsize
    if len(tensor.dense) % kind.itemsize or min(shape, default=0) < 0 or (shape and math.prod(shape) != size):
        raise bad(
            f"{where} has {len(tensor.dense)} bytes, which shape {shape} does not have", "loss_fn_inputs"
        )
    return np.frombuffer(tensor.dense, kind).reshape(shape or [size])


def check_tokens(tokens: np.ndarray, where: str, backend: Backend) -> None:
    """Raises ApiError: there are none, or one is not in the vocabulary."""
    if not len(tokens):
        raise bad(f"{where} has no tokens; send at least one")
    outside = np.flatnonzero((tokens < 0) | (tokens >= backend.vocab_size))
    if len(outside):
        raise bad(
            f"{where} has token {int(tokens[outside[0]])} at position {outside[0]}; the vocabulary is 0 to "
            f"{backend.vocab_size - 1}: use the tokenizer of {backend.base_model}"
        )


def loss_of(message: Any) -> TokenLoss:
    """The loss of a pass, whose name `data_of` has checked.

    Raises:
        ApiError: loss_fn_config has what the loss does not know.
    """
    config: dict[str, float] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise bad(f"loss_fn_config['{name}'] must be a number", "loss_fn_config")
        config[name] = value.number
    known = LOSSES[message.loss_fn][1]
    for name, value in config.items():
        if name not in known:
            has = ", ".join(known) or "none"
            raise bad(
                f"loss_fn_config['{name}'] is not of '{message.loss_fn}', which has {has}", "loss_fn_config"
            )
        if not (math.isfinite(value) and value >= 0):
            raise bad(f"loss_fn_config['{name}'] is {value}, required at least 0", "loss_fn_config")
    loss = TokenLoss(message.loss_fn, **{known[name]: value for name, value in config.items()})
    low, high = loss.bounds
    if low > high:  # every ratio would be the upper one
        raise bad(
            f"clip_low_threshold is {low:g} and clip_high_threshold {high:g}, required the first at most the "
            "second",
            "loss_fn_config",
        )
    return loss


def adam_of(params: Any) -> AdamParams:
    """Raises ApiError: another optimizer, or a value out of range."""
    if not isinstance(params, types.AdamParams):
        raise bad(f"the optimizer '{params.type}' is not supported by this server; use AdamParams")
    values = {name: float(getattr(params, name)) for name in AdamParams.__dataclass_fields__}
    for name, value in values.items():
        below = 1.0 if name.startswith("beta") else math.inf
        if not 0 <= value < below or (
            name == "eps" and value < 1e-30
        ):  # 0 / 0 where there is no gradient yet
            required = "at least 0 and less than 1" if below == 1.0 else "at least 0, and finite"
            required = "at least 1e-30, and finite" if name == "eps" else required
            raise bad(f"{name} is {value}, required {required}", name)
    return AdamParams(**values)


def metadata_of(request: Any) -> dict[str, Any] | None:
    """The client's notes, which are kept and sent as JSON.

    Raises:
        ApiError: they cannot be.
    """
    notes: dict[str, Any] | None = request.user_metadata
    try:
        json.dumps(notes, allow_nan=False)
    except ValueError:
        raise bad(
            "user_metadata has NaN or infinity, which JSON has not; leave it out", "user_metadata"
        ) from None
    return notes


# -- answers -----------------------------------------------------------------------------------------


def plain(fields: Mapping[str, Any]) -> Reply:
    return Reply(json.dumps(fields).encode())


def pass_reply(result: PassResult) -> Reply:
    """Per datum: "logprobs" [n]."""
    message = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    rows = [np.asarray(row, np.float32) for row in result.logprobs]
    tensor = message.loss_fn_outputs.add(num_datums=len(rows)).fields["logprobs"]
    tensor.dtype = proto.DTYPE_FLOAT32
    tensor.data = b"".join(row.tobytes() for row in rows)
    tensor.offsets = np.cumsum([0, *(row.nbytes for row in rows)], dtype=np.int64).tobytes()
    # The SDK joins the parts of one call by what stands behind the colon.
    for name, value in {"loss:sum": result.loss, **result.metrics}.items():
        message.metrics[name if name.count(":") == 1 else f"{name}:mean"] = value
    return Reply(message.SerializeToString(), PROTOBUF)


def sample_reply(
    sequences: Sequence[Sequence[Token]],
    scores: Scores | None,
    *,
    top: int,
    prompt_logprobs: bool,
    prompt_top: int,
    last: int | None,
) -> Reply:
    """
    Args:
        sequences: tokens of each; the last has its finish.
        scores: of the prompt, where its log-probabilities or most probable tokens are asked for.
        top, prompt_logprobs, prompt_top, last: see SampleRequest.
    """
    message = proto.SampleResponse()
    for sequence in sequences:
        tokens = [token for token in sequence if token.token >= 0]
        made = message.sequences.add()
        length = sequence[-1].finish == "length"
        made.stop_reason = proto.STOP_REASON_LENGTH if length else proto.STOP_REASON_STOP
        made.tokens = np.array([token.token for token in tokens], np.int32).tobytes()
        made.logprobs = np.array([token.logprob for token in tokens], np.float32).tobytes()
        if top:
            ids = np.full((len(tokens), top), NO_TOKEN, np.int32)
            logprobs = np.full((len(tokens), top), NO_LOGPROB, np.float32)
            for row, token in enumerate(tokens):
                ids[row, : len(token.top)] = [i for i, _ in token.top]
                logprobs[row, : len(token.top)] = [value for _, value in token.top]
            _fill_top(made.topk_sampled_logprobs, ids, logprobs)
    if scores is not None:
        n = len(scores.logprobs) + 1
        first = 1 if last is None else n - last
        if prompt_logprobs:
            values = np.full(n, np.nan, np.float32)
            values[first:] = scores.logprobs[first - 1 :]
            message.prompt_logprobs = values.tobytes()
        if prompt_top:
            ids = np.full((n, prompt_top), NO_TOKEN, np.int32)
            logprobs = np.full((n, prompt_top), NO_LOGPROB, np.float32)
            ids[first:] = scores.top_ids[first - 1 :, :prompt_top]
            logprobs[first:] = scores.top_logprobs[first - 1 :, :prompt_top]
            _fill_top(message.topk_prompt_logprobs, ids, logprobs)
    return Reply(message.SerializeToString(), PROTOBUF)


def _fill_top(table: Any, ids: np.ndarray, logprobs: np.ndarray) -> None:
    table.length, table.k = ids.shape
    table.token_ids, table.logprobs = ids.tobytes(), logprobs.tobytes()
