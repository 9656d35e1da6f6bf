"""Encodings: what they write is found and read back by stored.py, within half a step of the format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kt_ray.checkpoint import CheckpointIndex
from kt_ray.checkpoint.encode_weights import Encoding
from kt_ray.errors import UserError
from tests.helpers.tiny_moe import CONVENTIONS, encoded, encoding_of, fused, per_expert, save

# Largest relative Frobenius error of normal values: half a step of each format, spread evenly.
BOUNDS = {"fp8": 0.03, "int8": 0.01, "int4": 0.11, "mxfp4": 0.14}
FUSED = ("fp8-fused", "mxfp4-blocks")


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_written_is_read(tmp_path: Path, convention: str) -> None:
    source = fused() if convention in FUSED else per_expert()
    options = {"group": 32} if convention == "int4" else {}
    index = CheckpointIndex.open(save(tmp_path / "m", encoded(source, convention, **options)))
    experts = [name for name in source if ".experts." in name]
    assert set(index.matrices) == set(experts) and index.names == set(source)
    for name in experts:
        matrix, before = index.matrices[name], source[name].float()
        assert matrix.shape == before.shape
        error = float((matrix.dequantize() - before).norm() / before.norm())
        assert 0 < error < BOUNDS[matrix.format], (name, error)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_like_keeps_keys_types_and_values(tmp_path: Path, convention: str) -> None:
    """Values that the format holds already come back unchanged under the same keys."""
    source = fused() if convention in FUSED else per_expert()
    options = {"group": 32} if convention == "int4" else {}
    index = CheckpointIndex.open(save(tmp_path / "m", encoded(source, convention, **options)))
    matrix = index.matrices[min(index.matrices)]
    encoding = Encoding.like(matrix)
    keys = [(e.key, e.dtype, e.shape) for e in encoding.entries]
    infos = [index.tensors[key] for key in matrix.keys[:2]]
    assert keys == [(info.name, info.dtype, info.shape) for info in infos]
    value = matrix.dequantize()
    data, scales, meant = encoding.encode(value)
    step = 0.07 if matrix.format == "int4" else 0.01  # int4's largest code is -8: its scale may move
    assert float((meant - value).norm() / value.norm()) <= step
    assert data.shape == index.read(matrix.keys[0]).shape and scales.shape == index.read(matrix.keys[1]).shape
    if len(matrix.shape) == 3:
        one, one_scales, _ = encoding.encode(value[1])
        assert torch.equal(one.view(torch.uint8), data[1].view(torch.uint8))
        assert torch.equal(one_scales, scales[1])


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_bands_of_rows_change_nothing(convention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (2, 300, 64) if convention in FUSED else (300, 64)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    encoding = encoding_of(convention, "x" if convention in FUSED else "x.weight", shape)
    whole = encoding.encode(value)
    monkeypatch.setattr("kt_ray.checkpoint.encode_weights._BAND", 128)
    for one, other in zip(whole, encoding.encode(value), strict=True):
        assert one.shape == other.shape and torch.equal(one.float(), other.float())


def test_powers_of_two_in_float32(tmp_path: Path) -> None:
    index = CheckpointIndex.open(save(tmp_path / "m", encoded(per_expert(), "fp8")))
    name, matrix = min(index.matrices.items())
    _, plain, _ = Encoding.like(matrix).encode(matrix.dequantize())
    _, scales, _ = Encoding.like(matrix, powers=True).encode(matrix.dequantize())
    assert scales.dtype == torch.float32 and bool((torch.frexp(scales).mantissa == 0.5).all()), name
    assert not bool((torch.frexp(plain).mantissa == 0.5).all())


@pytest.mark.parametrize(
    ("convention", "shape", "group", "message"),
    [
        ("int4", (4, 48), None, "multiple of 32"),
        ("mxfp4", (4, 48), None, "multiple of 32"),
        ("int8", (4, 64), 48, "groups of 48"),
        ("int4", (4, 64), 16, "groups of 16"),
        ("q4", (4, 64), None, "required one of"),
    ],
)
def test_impossible_shapes(convention: str, shape: tuple[int, int], group: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Encoding.new(convention, "x.weight", shape, group=group)
    encoding = Encoding.new("int8", "x.weight", (4, 64))
    with pytest.raises(ValueError, match="shape"):
        encoding.encode(torch.zeros(3, 64))


def test_scales_that_are_missing_are_named(tmp_path: Path) -> None:
    tensors = encoded(per_expert(), "int8")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight_scale"]
    index = CheckpointIndex.open(save(tmp_path / "m", tensors))
    with pytest.raises(UserError, match=r"experts\.2\.up_proj"):
        _ = index.matrices
