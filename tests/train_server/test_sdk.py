"""The API as the SDK's own clients use it."""

from __future__ import annotations

from tinker import types

from tests.train_server.conftest import Running


def datum(tokens: list[int], **inputs: list[float]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": [*tokens[1:], 1], **inputs},
    )


def test_training_and_sampling(server: Running) -> None:
    client = server.client()
    training = client.create_lora_training_client("demo/model", rank=8, seed=3).result()
    info = training.get_info()
    assert (info.lora_rank, info.model_data.tokenizer_id) == (8, "demo/tokenizer")
    passed = training.forward_backward([datum([2, 3, 4], weights=[0.0, 1.0, 1.0])], "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=0.5))
    assert passed.result().metrics["loss:sum"] > 0
    assert passed.result().loss_fn_outputs[0]["logprobs"].shape == [3]
    assert stepped.result().metrics == {"grad_norm": 2.0}
    sampling = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([5, 6])
    response = sampling.sample(prompt, 2, types.SamplingParams(max_tokens=4, seed=1)).result()
    assert [len(s.tokens) for s in response.sequences] == [4, 4]
    assert sampling.compute_logprobs(prompt).result()[0] is None
