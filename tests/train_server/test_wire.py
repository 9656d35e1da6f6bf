"""The wire format by itself; what it refuses is in test_bad_requests.py, what it carries in test_sdk.py."""

from __future__ import annotations

import importlib.util
import random
import sys

import numpy as np
import pytest
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from kt_ray.errors import UserError
from kt_ray.serve.api_errors import ApiError
from kt_ray.train_server import wire
from kt_ray.train_server.backend import PassResult
from tests.helpers.fake_train_backend import FakeBackend
from tests.helpers.train_server import datum


def test_without_the_sdk_one_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)
    spec = importlib.util.spec_from_file_location("wire_without_tinker", wire.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(UserError, match=r"pip install 'kt_ray\[tinker\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_damaged_passes_are_read_or_refused() -> None:
    rows = [datum([2, 3, 4]), datum([5])]
    request = ForwardBackwardRequest(
        forward_backward_input=ForwardBackwardInput(data=rows, loss_fn="cross_entropy"),
        model_id="m",
        seq_id=1,
    )
    good, backend, choose = (
        forward_backward_request_to_proto(request).SerializeToString(),
        FakeBackend(),
        random.Random(0),
    )
    assert len(wire.data_of(wire.pass_request(good), backend)) == 2
    refused = 0
    for _ in range(2000):
        body = bytearray(good)
        for _ in range(choose.randrange(1, 5)):
            body[choose.randrange(len(body))] = choose.randrange(256)
        try:
            message = wire.pass_request(bytes(body))
            wire.data_of(message, backend)
            wire.loss_of(message)
        except ApiError:
            refused += 1
    assert 0 < refused < 2000


def test_provenance_changes_nothing() -> None:
    """The cookbook's RL sends it with every loss; those of this server do not read it."""
    plain = datum([2, 3, 4])
    spans = [types.SampledProvenanceSpan(sequence_id="a", length=3)]
    for row in (plain, plain.with_provenance(model_input=spans, loss_fn_inputs=spans)):
        given = ForwardBackwardInput(data=[row], loss_fn="cross_entropy")
        request = ForwardBackwardRequest(forward_backward_input=given, model_id="m", seq_id=1)
        body = forward_backward_request_to_proto(request).SerializeToString()
        (read,) = wire.data_of(wire.pass_request(body), FakeBackend())
        assert read.tokens.tolist() == [2, 3, 4]


def test_metrics_say_how_parts_are_joined_and_rows_keep_their_lengths() -> None:
    rows = [np.array([-1.0, -2.0]), np.array([]), np.array([-3.0])]
    reply = wire.pass_reply(PassResult(rows, 6.0, {"norm": 2.0, "tokens:sum": 3.0}))
    output = deserialize_forward_backward_output(reply.body)
    assert output.metrics == {"loss:sum": 6.0, "norm:mean": 2.0, "tokens:sum": 3.0}
    assert [one["logprobs"].tolist() for one in output.loss_fn_outputs] == [[-1.0, -2.0], [], [-3.0]]


def test_every_loss_gets_the_inputs_that_it_needs() -> None:
    """What the API lets through is what the model reads."""
    from kt_ray.model import policy_losses
    from kt_ray.train_server.wire import LOSSES

    assert set(LOSSES) == set(policy_losses._NEEDED)
    for name, needed in policy_losses._NEEDED.items():
        assert set(needed) <= set(LOSSES[name][0]), name
