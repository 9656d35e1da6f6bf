"""The mask against its definition in plain integers, and what it may not depend on."""

from __future__ import annotations

import zlib

import pytest
import torch

from kt_ray.model import dropout
from kt_ray.model.dropout import CounterDropout, DropoutContext, module_stream
from kt_ray.native.dropout_hash import UP, combine, expert_stream, fmix, keep_mask, row_hash

M = 0xFFFFFFFF


def definition(seed: int, step: int, stream: int, sample: int, position: int, j: int, p: float) -> bool:
    """The mask of one element, written from the specification with Python integers only."""

    def mix(h: int) -> int:
        h ^= h >> 16
        h = h * 0x85EBCA6B & M
        h ^= h >> 13
        h = h * 0xC2B2AE35 & M
        return h ^ h >> 16

    h = 0
    for v in (seed & M, seed >> 32 & M, step, stream, sample & M, sample >> 32, position):
        h = mix(h * 31 + v + 0x9E3779B9 & M)
    return mix(h + (j + 1) * 0x9E3779B9 & M) >= int(p * 2**32)


def test_known_values() -> None:
    """Literal values, so that another implementation (C++) can be held against the same."""
    assert fmix(0) == 0
    assert fmix(1) == 0x514E28B7
    assert fmix(0xDEADBEEF) == 0x0DE5C6A9
    assert module_stream("model.layers.3.self_attn.q_proj") == zlib.crc32(b"model.layers.3.self_attn.q_proj")
    assert expert_stream(3, 5, UP) == combine(combine(combine(0x45585054, 3), 5), 1)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    ("seed", "step", "sample"), [(0, 0, 0), (2**40 + 7, 123456, 2**33 + 5), (1, 2**31, M)]
)
def test_mask_is_the_definition(p: float, seed: int, step: int, sample: int) -> None:
    stream, features = 0x89ABCDEF, 37
    samples_N = torch.tensor([sample, sample, 4])
    positions_N = torch.tensor([0, 8191, 3])
    mask = keep_mask(row_hash(seed, step, stream, samples_N, positions_N), features, p)
    for row in range(3):
        for j in range(features):
            expected = definition(seed, step, stream, int(samples_N[row]), int(positions_N[row]), j, p)
            assert bool(mask[row, j]) == expected


def test_kept_share_is_one_minus_p() -> None:
    rows = row_hash(3, 1, 9, torch.arange(400), torch.zeros(400, dtype=torch.int64))
    mask = keep_mask(rows, 500, 0.1)
    assert abs(float(mask.float().mean()) - 0.9) < 5 * (0.09 / mask.numel()) ** 0.5
    # neither rows nor columns are alike
    assert mask.float().mean(0).min() > 0.7 and mask.float().mean(1).min() > 0.7
    assert len({tuple(row.tolist()) for row in mask}) == 400


def _context(samples: list[int], positions: list[int], **extra: object) -> DropoutContext:
    return DropoutContext(1, 2, True, torch.tensor(samples), torch.tensor(positions), **extra)  # type: ignore[arg-type]


def test_module_scales_and_back_propagates_through_the_kept() -> None:
    module = CounterDropout(0.25, "model.layers.0.self_attn.q_proj", _context([7, 7, 8], [0, 1, 0]))
    x = torch.randn(1, 3, 16, requires_grad=True)
    out = module(x)
    kept = out != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(out[kept], x[kept] / 0.75)
    out.sum().backward()
    assert torch.equal(x.grad, kept / 0.75)


def test_layout_of_rows_does_not_matter() -> None:
    """[b, s, F] and [b·s, F] give one mask, and a sample's mask is its own wherever it stands."""
    x = torch.ones(6, 32)
    name = "model.layers.0.mlp.up_proj"
    both = CounterDropout(0.5, name, _context([3, 3, 3, 9, 9, 9], [0, 1, 2, 0, 1, 2]))
    alone = CounterDropout(0.5, name, _context([9, 9, 9], [0, 1, 2]))
    assert torch.equal(both(x), both(x.view(2, 3, 32)).view(6, 32))
    assert torch.equal(both(x)[3:], alone(x[:3]))
    assert not torch.equal(both(x)[:3], both(x)[3:])


def test_a_layers_modules_share_one_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own hashes; other rows, another step and another layer have others."""
    made: list[int] = []

    def counted(seed: int, step: int, streams: list[int], *rows: torch.Tensor) -> torch.Tensor:
        made.append(len(streams))
        return row_hash(seed, step, streams, *rows)

    monkeypatch.setattr(dropout, "row_hash", counted)
    context, samples_N, x = DropoutContext(), torch.tensor([7, 7, 8]), torch.ones(3, 40)
    names = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    modules = {name: CounterDropout(0.5, name, context) for name in names}

    def seen(step: int, positions: list[int]) -> list[list[bool]]:
        positions_N, masks = torch.tensor(positions), []
        with context.rows(1, step, samples_N, positions_N):
            for name, module in modules.items():
                mask = module(x) != 0
                own = row_hash(1, step, module_stream(name), samples_N, positions_N)
                assert torch.equal(mask, keep_mask(own, 40, 0.5)) and torch.equal(mask, module(x) != 0)
                masks.append(mask.flatten().tolist())
        assert not context.enabled and context.samples_N is None and not context._hashes
        return masks

    first = seen(2, [0, 1, 0])
    assert made == [2, 1] and len({tuple(mask) for mask in first}) == 3
    assert seen(3, [0, 1, 0]) != first and seen(2, [3, 4, 5]) != first and seen(2, [0, 1, 0]) == first
    assert made == [2, 1] * 4


def test_off_in_evaluation() -> None:
    x = torch.randn(2, 4)
    context = _context([1, 1], [0, 1])
    context.enabled = False
    assert CounterDropout(0.5, "a", context)(x) is x


def test_refuses_rows_that_are_not_tokens() -> None:
    module = CounterDropout(0.5, "model.layers.0.conv", _context([1, 1], [0, 1]))
    with pytest.raises(RuntimeError, match=r"model\.layers\.0\.conv saw 3 rows instead of 2"):
        module(torch.ones(3, 4))
    module.context.samples_N = None
    with pytest.raises(RuntimeError, match="outside a layer call"):
        module(torch.ones(2, 4))


@pytest.mark.accept("parity")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_same_mask_on_cuda() -> None:
    samples, positions = torch.arange(64) * 2**30, torch.arange(64)
    cpu = keep_mask(row_hash(5, 6, 7, samples, positions), 301, 0.3)
    gpu = keep_mask(row_hash(5, 6, 7, samples.cuda(), positions.cuda()), 301, 0.3)
    assert torch.equal(cpu, gpu.cpu())
