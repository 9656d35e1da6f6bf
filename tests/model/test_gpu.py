"""The same stage on CUDA: parity with the reference on the CPU, and what crosses the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kt_ray.config.schema import LoraConfig
from kt_ray.model import range_loop
from kt_ray.model.attention import attend
from kt_ray.model.hidden_shelf import HostShelf
from kt_ray.model.streamed_weights import StreamedWeights, bring
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.stages import pass_spec, run
from tests.model.test_attention import exact, made, plainly
from tests.model.test_lora_linear import EXACT, HALF, adapted, base_of, normal, passed
from tests.model.test_stage_parity import assert_close, assert_logits, ready
from tests.model.test_streamed_weights import attached

pytestmark = [
    pytest.mark.accept("parity"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROWS = random_rows(5)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "mixtral", "qwen2_moe"])
@pytest.mark.parametrize("cuts", [(0, 3), (0, 1, 3)])
def test_parity(checkpoint: Callable[..., Path], family: str, cuts: tuple[int, ...]) -> None:
    """Padding, groups, an odd number of rows, dropout; experts stay on the CPU. Not bit-equal: other sums."""
    torch.set_float32_matmul_precision("highest")
    reference, stages = ready(checkpoint(family), LoraConfig(rank=4, dropout=0.1), cuts, device="cuda:0")
    for stage in stages:
        assert all(p.is_cuda for p in stage.model.causal.parameters())
        assert all(p.is_cuda and p.grad.is_cuda for p in stage.parameters.values())
    got = run(stages, pass_spec(ROWS, groups=2, micro=2, step=3), reference)
    got.grads = {name: grad.cpu() for name, grad in got.grads.items()}
    assert_close(got, reference.run(ROWS, step=3, forced_ids=got.exchange.expert_ids), 1e-4)
    seconds = got.loops[-1].seconds()
    assert seconds["attention"] > 0 and seconds["loss"] > 0
    want = reference.run(ROWS, train=False)
    assert_logits(run(stages, pass_spec(ROWS, kind="eval"), reference), ROWS, want, 1e-4)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_hidden_states_come_back_from_the_host(checkpoint: Callable[..., Path], family: str) -> None:
    """The same bits on the card, whatever is recomputed when and wherever hidden states wait."""
    found = {}
    for kind in ("retain", "group", "micro_batch", "host"):
        lora = LoraConfig(rank=4, dropout=0.1)
        reference, stages = ready(checkpoint(family), lora, (0, 3), device="cuda:0", activations=kind)
        spec = pass_spec(ROWS, groups=2, micro=1, step=3)
        found[kind] = run(stages, spec, reference)
        again = run(stages, spec, reference)  # the memory is used again
        assert again.loss == found[kind].loss
        for stage in stages:
            assert stage.shelf is None or stage.shelf._memory.is_pinned()
    for kind in ("retain", "micro_batch", "host"):
        assert found[kind].loss == found["group"].loss
        for name, grad in found["group"].grads.items():
            assert torch.equal(found[kind].grads[name].cpu(), grad.cpu()), name


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("output", ["recompute", "retain"])
def test_layers_by_ranges(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str, output: str
) -> None:
    """Hidden states and heads' outputs in host memory; the gradients of whole rows to rounding."""
    monkeypatch.setattr(range_loop, "RANGE_TOKENS", 5)
    torch.set_float32_matmul_precision("highest")
    ranges = {"activations": "ranges", "head_ranges": 2, "attention_output": output}
    lora, cuts = LoraConfig(rank=4, dropout=0.1), (0, 1, 3)
    reference, stages = ready(checkpoint(family), lora, cuts, device="cuda:0", **ranges)
    got = run(stages, pass_spec(ROWS, groups=2, micro=2, step=3), reference)
    got.grads = {name: grad.cpu() for name, grad in got.grads.items()}
    assert_close(got, reference.run(ROWS, step=3, forced_ids=got.exchange.expert_ids), 1e-4)
    assert all(stage.shelf is not None and stage.shelf._memory.is_pinned() for stage in stages)


def test_copies_wait_for_the_device() -> None:
    """A device far behind the host: nothing is copied before it is there, or overwritten too early."""
    shelf = HostShelf(torch.device("cuda:0"))
    shape, most = (64, 1024, 1024), []
    for turn in range(3):
        shelf.clear([shape] * 4, torch.float32)
        kept = []
        for number in range(4):
            torch.cuda._sleep(200_000_000)
            hidden = torch.full(shape, float(turn * 4 + number), device="cuda:0")
            kept.append(shelf.keep(hidden))
            del hidden  # its memory may be used again at once
        if turn == 1:
            kept[0].fetch()
            continue  # a pass that is given up
        for number, one in enumerate(kept):
            if number < 3:
                kept[number + 1].fetch()
            torch.cuda._sleep(200_000_000)
            back = one.take()
            assert bool((back == turn * 4 + number).all())
        most.append(torch.cuda.max_memory_allocated())
    assert most[1] <= most[0] + 1024  # blocks of the copies are used again
    shelf.close()


def test_streamed_layers_give_the_same_bits(tmp_path: Path) -> None:
    """Seven layers, three of them dense, through three slots."""
    path = build_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=7, first_k_dense_replace=3)
    found = []
    for more in ({}, {"streamed": tuple(range(7)), "slots": 3, "embedding_on_host": True}):
        reference, stages = ready(path, LoraConfig(rank=4, dropout=0.1), (0, 7), device="cuda:0", **more)
        found.append(run(stages, pass_spec(ROWS, groups=1, micro=1, step=3), reference))
        weights = stages[0].streamed
        if weights is not None:
            assert all(own.block.is_pinned() for own in weights._layers.values())
            assert all(slot.is_cuda for slot in weights._memory)
            assert not stages[0].model.causal.get_input_embeddings().weight.is_cuda
    stay, streamed = found
    assert streamed.loss == stay.loss
    for name, grad in stay.grads.items():
        assert torch.equal(streamed.grads[name].cpu(), grad.cpu()), name


def test_weights_wait_for_the_device() -> None:
    """A device far behind the host: no slot is filled while it is used, or used before it is full."""
    shape = (4096, 4096)
    layers: dict[int, torch.nn.Module] = {}
    for number in range(6):
        layers[number] = torch.nn.Linear(*shape, bias=False)
        layers[number].weight = torch.nn.Parameter(torch.full(shape, float(number)), requires_grad=False)
    weights = attached(layers, StreamedWeights(range(6), 2, torch.device("cuda:0")))
    sums = []
    with torch.no_grad():
        for number in [*range(6), *range(5, -1, -1)] * 2:
            bring(layers[number])
            sums.append((number, layers[number].weight.sum(dtype=torch.float64)))  # at once
            torch.cuda._sleep(50_000_000)
            sums.append((number, layers[number].weight.sum(dtype=torch.float64)))  # and long afterwards
    assert all(float(total) == number * 4096.0**2 for number, total in sums)
    assert weights.device_bytes == 2 * 4096 * 4096 * 4
    weights.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["causal", "window", "blocks"])
def test_sinks_by_fused_kernels(dtype: torch.dtype, kind: str) -> None:
    """gpt-oss's shape; torch is not allowed the kernels that hold scores."""
    module, tensors = made(3, 64, 64, dtype)
    n = torch.arange(tensors[0].shape[2])
    seen = (n[:, None] >= n[None])[None, None]
    if kind != "causal":
        seen = seen & (n[:, None] - n[None] < 5)
    want, gradients = exact(module, tensors, seen, 0.125)
    leaves = [t.cuda().requires_grad_() for t in tensors]
    given = {"causal": None, "window": seen.cuda(), "blocks": torch.full((1, 1, 1, 1), 5)}[kind]
    with torch.nn.attention.sdpa_kernel(
        [torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]
    ):
        out, _ = attend(module, *leaves, given, scaling=0.125, s_aux=module.sinks.cuda())
        found = torch.autograd.grad(out.double().square().sum(), leaves)
    most = 1e-5 if dtype == torch.float32 else 3e-2
    for own, value in zip((out.detach(), *found), (want, *gradients), strict=True):
        assert float((own.cpu().double() - value).norm()) <= most * float(value.norm())


def test_narrow_values_by_the_flash_kernel() -> None:
    """DeepSeek-V3's widths; torch is allowed no other kernel."""
    module, tensors = made(1, 192, 128, torch.bfloat16)
    upstream = torch.randn(tensors[2].transpose(1, 2).shape, generator=torch.Generator().manual_seed(1))
    n = torch.arange(tensors[0].shape[2])
    want = plainly(*tensors, (n[:, None] >= n[None])[None, None], 0.07, upstream.bfloat16())
    leaves = [t.cuda().requires_grad_() for t in tensors]
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.FLASH_ATTENTION]):
        out, _ = attend(module, *leaves, None, scaling=0.07)
        found = torch.autograd.grad(out, leaves, upstream.bfloat16().cuda())
    for own, value, roundings in zip((out.detach(), *found), want, (2, 4, 4, 4), strict=True):
        assert float((own.cpu().double() - value).norm()) <= roundings * 2**-8 * float(value.norm())


@pytest.mark.parametrize("kind", ["plain", "bias", "quantized"])
def test_lora_in_two_parts(kind: str) -> None:
    """bfloat16 on CUDA takes the path of kt_ray/model/lora_linear.py, which agrees with PEFT's on the CPU."""
    layer, parameters = adapted(base_of(kind, 320, 200))
    x = normal(3, 2, 65, 320).bfloat16()
    want = passed(layer, x, parameters)
    layer.cuda()
    assert layer.q_proj(x.cuda()).grad_fn.name() == "PartsFunctionBackward"
    found = passed(layer, x.cuda(), parameters)
    for own, value, most in zip(found, want, (HALF, 2 * HALF, EXACT, EXACT), strict=True):
        assert float((own.cpu() - value).norm()) <= most * float(value.norm())
