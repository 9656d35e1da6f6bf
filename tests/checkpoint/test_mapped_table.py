"""Tables of n-grams: rows from the checkpoint's files, in the parts' order, whatever they are stored as."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch

from kt_ray.checkpoint.mapped_table import MappedTable, in_order, is_mapped_table
from kt_ray.checkpoint.safetensors_file import NAMES, TensorInfo, read_header, write_safetensors
from kt_ray.errors import UserError

ROWS, WIDTH = 5, 3  # of each of 12 parts


def write_parts(path: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[list[TensorInfo], torch.Tensor]:
    """Parts of a table in two files, at odd places in them."""
    table = torch.arange(12 * ROWS * WIDTH, dtype=torch.float32).view(-1, WIDTH).to(dtype)
    parts = [(f"ngram_embedding.shard_{n}.weight", values) for n, values in enumerate(table.split(ROWS))]
    found: list[TensorInfo] = []
    for name, own in (("a", parts[1::2]), ("b", parts[::2])):
        own = [("odd", torch.zeros(1, dtype=torch.uint8)), *own]
        entries = [(key, NAMES[value.dtype], value.shape) for key, value in own]
        write_safetensors(path / f"{name}.safetensors", entries, [value for _, value in own])
        header = read_header(path / f"{name}.safetensors")
        found += [info for key, info in header.items() if key != "odd"]
    return found, table


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_those_of_the_joined_parts(tmp_path: Path, dtype: torch.dtype) -> None:
    """shard_10 comes after shard_2; of a float32 copy of the module rows are float32, of the same files."""
    parts, table = write_parts(tmp_path)
    module = MappedTable(in_order(parts), tuple(table.shape), dtype, "cpu")
    ids = torch.tensor([[0, 59, 4], [5, 5, 17]])
    assert torch.equal(module(ids), table[ids].to(dtype))
    assert module(ids[:, :0]).shape == (2, 0, WIDTH)
    wide = copy.deepcopy(module).float()
    assert torch.equal(wide(ids), table[ids].float()) and wide._rows is module._rows
    assert not [*module.parameters()] and not module.state_dict()


@pytest.mark.parametrize("fault", ["part", "width", "type"])
def test_what_is_no_such_table_is_refused(tmp_path: Path, fault: str) -> None:
    parts, table = write_parts(tmp_path, torch.float8_e4m3fn if fault == "type" else torch.bfloat16)
    shape = (len(table), WIDTH + (fault == "width"))
    said = {"part": "lacks parts of a table", "width": "rows of 4", "type": "F8_E4M3; required one of BF16"}
    with pytest.raises(UserError, match=said[fault]):
        MappedTable(parts[1:] if fault == "part" else parts, shape, torch.bfloat16, "cpu")


@pytest.mark.parametrize("row", [-1, 12 * ROWS])
def test_a_row_that_no_table_has_is_refused(tmp_path: Path, row: int) -> None:
    parts, table = write_parts(tmp_path)
    module = MappedTable(in_order(parts), tuple(table.shape), torch.bfloat16, "cpu")
    with pytest.raises(UserError, match=f"lacks a row .* found row {row}; required a number below 60"):
        module(torch.tensor([3, row]))


@pytest.mark.parametrize("fault", ["absent", "empty", "shorter"])
def test_a_file_that_changed_since_its_header_was_read_is_refused(tmp_path: Path, fault: str) -> None:
    parts, table = write_parts(tmp_path)
    file = tmp_path / "b.safetensors"
    if fault == "absent":
        file.unlink()
    else:
        os.truncate(file, 0 if fault == "empty" else file.stat().st_size - 1)
    with pytest.raises(UserError, match="became shorter" if fault == "shorter" else "cannot be mapped"):
        MappedTable(in_order(parts), tuple(table.shape), torch.bfloat16, "cpu")


def test_which_parameters_are_tables() -> None:
    assert is_mapped_table("model.layers.2.ple.ple_embedding.ngram_embedding.weight")
    assert not is_mapped_table("model.embed_tokens.weight")
