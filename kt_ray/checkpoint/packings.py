"""How a checkpoint's tensors become values and scales as the engine takes them, where they differ.

Gptq, Awq    integers turned round (kt_ray/integer_packing.py)
Bytes        X.weight_packed I32 [N, K / 4], four values + 128 in a word: compressed-tensors, of 8 bits
WithZeros    X.weight_packed as int4 has it, X.weight_zero_point I32 [N / 8, K / group], eight rows of W in
             a word, or I8 [N, K / group]: compressed-tensors, of integers that are not symmetric
Nvfp4        E2M1 as mxfp4 has it, a scale F8_E4M3 for 16 columns, and a global scale F32, which multiplies
             the others (X.weight_scale_2 of ModelOpt) or divides them (X.weight_global_scale of
             compressed-tensors); ModelOpt's stacks of gpt-oss hold each matrix, and its scales, turned round
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kt_ray.checkpoint.safetensors_file import TensorInfo, damaged, read_tensor
from kt_ray.errors import UserError
from kt_ray.integer_packing import AWQ_ROWS
from kt_ray.native.quantization import words

_OTHER = (
    "use the model's bfloat16 release, or one in block FP8, MXFP4, NVFP4, symmetric INT8 or INT4 "
    "(compressed-tensors, GPTQ, AWQ)"
)


def unread(where: object, observed: object, required: object) -> UserError:
    """A format that is not read."""
    return damaged("the checkpoint's quantised format cannot be read", where, observed, required, _OTHER)


def _codes(packed: Tensor, bits: int = 4) -> Tensor:
    """int32 [..., n] to int32 [..., n, 32 / bits] from 0 on, the lowest bits first."""
    return packed.unsqueeze(-1) >> torch.arange(0, 32, bits, dtype=torch.int32) & 2**bits - 1


def _bytes(words: Tensor) -> Tensor:
    """int32 [N, K / 4], four values + 128 in a word, to int8 [N, K]."""
    return (words.contiguous().view(torch.uint8) ^ 128).view(torch.int8)


def _bytes_in_words(values: Tensor) -> Tensor:
    """The inverse."""
    return (values.contiguous().view(torch.uint8) ^ 128).view(torch.int32)


@dataclass(frozen=True)
class Packing:
    """One matrix W [N, K], or some: what the engine takes, out of what the file holds.

    Raises:
        UserError: the file holds something that is not read.
    """

    name: ClassVar[str]

    def check(self) -> None:
        """Only raises."""

    def values(self, stored: Tensor) -> Tensor:
        """Out of the values' tensor: [N, ...] as `ExpertMatrix.data`, without experts."""
        return stored

    def scales(self, stored: Tensor) -> Tensor:
        """Out of the scales' tensor: as `ExpertMatrix.scales`, without experts."""
        return stored

    def stored(self, values: Tensor) -> Tensor:
        """The inverse of `values`."""
        return values

    def stored_scales(self, scales: Tensor) -> Tensor:
        """The inverse of `scales`, where these are numbers for groups of columns alone."""
        return scales

    def one(self, index: int) -> Packing:
        """That of one matrix of a stack."""
        return self


@dataclass(frozen=True)
class Gptq(Packing):
    """Zero points, and what they and the order of columns must be to be read."""

    zeros: TensorInfo  # I32 [groups, N bits / 32]
    order: TensorInfo | None  # I32 [K]
    group: int  # columns
    less: int  # by how much zero points are stored too small
    symmetric: bool  # all zero points must be half of all values
    bits: int  # 4, or 8 of symmetric integers
    name = "GPTQ"

    def check(self) -> None:
        self._check_order()
        self._zeros()

    def _check_order(self) -> None:
        if self.order is not None:
            order = read_tensor(self.order)
            if not torch.equal(order, torch.arange(len(order), dtype=order.dtype) // self.group):
                raise unread(self.order.place, "an order of their own", f"groups of {self.group} in order")

    def _zeros(self) -> Tensor:
        """Zero points [groups, N]."""
        zeros = _codes(read_tensor(self.zeros), self.bits).flatten(1)
        expected = 2 ** (self.bits - 1) - self.less
        if self.symmetric and bool((zeros != expected).any()):
            if not bool(zeros.any()):
                what = "shard holds zeros instead of zero points"
                raise damaged(what, self.zeros.place, "zeros", f"{expected} throughout")
            raise unread(self.zeros.place, f"zero points other than {expected}", "symmetric integers")
        if not self.symmetric and self.less and bool((zeros == 15).any()):
            # Some read it as 16, others as 0.
            raise unread(self.zeros.place, "a zero point stored as 15", "from 0 to 14, each stored less 1")
        return zeros + self.less

    def values(self, stored: Tensor) -> Tensor:
        return stored.t() if self.bits == 4 else _bytes(stored.t())

    def stored(self, values: Tensor) -> Tensor:
        return (values if self.bits == 4 else _bytes_in_words(values)).t()

    def stored_scales(self, scales: Tensor) -> Tensor:
        return scales.t()

    def scales(self, stored: Tensor) -> Tensor:
        self._check_order()
        zeros = self._zeros().to(stored.dtype)
        return (stored if self.symmetric else torch.cat((stored, zeros))).t()


@dataclass(frozen=True)
class Awq(Packing):
    """Zero points I32 [groups, N / 8]."""

    zeros: TensorInfo
    name = "AWQ"

    def values(self, stored: Tensor) -> Tensor:
        return words(_awq_codes(stored).t())

    def stored(self, values: Tensor) -> Tensor:
        codes = _codes(values).flatten(1).t()
        return words(codes.unflatten(1, (-1, 8))[..., AWQ_ROWS].flatten(1))

    def scales(self, stored: Tensor) -> Tensor:
        return torch.cat((stored, _awq_codes(read_tensor(self.zeros)).to(stored.dtype))).t()


def _awq_codes(packed: Tensor) -> Tensor:
    """int32 [n, N / 8] to [n, N]."""
    return _codes(packed)[..., [AWQ_ROWS.index(row) for row in range(8)]].flatten(1)


@dataclass(frozen=True)
class Bytes(Packing):
    """INT8 in words."""

    name = "in words"

    def values(self, stored: Tensor) -> Tensor:
        return _bytes(stored)

    def stored(self, values: Tensor) -> Tensor:
        return _bytes_in_words(values)


@dataclass(frozen=True)
class WithZeros(Packing):
    """Zero points I32 [N / 8, groups] or I8 [N, groups]."""

    zeros: TensorInfo
    name = "with zero points"

    def scales(self, stored: Tensor) -> Tensor:
        zeros = read_tensor(self.zeros)
        # As of the values, 8 is added to integers from -8 to 7.
        codes = zeros + 8 if zeros.dtype == torch.int8 else _codes(zeros).transpose(1, 2).flatten(0, 1)
        return torch.cat((stored, codes[: len(stored)].to(stored.dtype)), 1)


@dataclass(frozen=True)
class Stack(Packing):
    """FP8 of a stack."""

    turned: bool  # values are [K, N]
    scales_turned: bool
    name = "of a stack"

    def values(self, stored: Tensor) -> Tensor:
        return stored.mT if self.turned else stored

    def scales(self, stored: Tensor) -> Tensor:
        return stored.mT if self.scales_turned else stored

    def stored(self, values: Tensor) -> Tensor:
        return self.values(values)

    def stored_scales(self, scales: Tensor) -> Tensor:
        return self.scales(scales)


@dataclass(frozen=True)
class Nvfp4(Packing):
    """Scales F8_E4M3 [N, K / 16]. What the engine takes for scales is the global scale alone."""

    of_groups: TensorInfo
    divides: bool  # the global scale divides the others
    turned: bool = False  # values are [K / 2, N], scales [K / 16, N]
    pairs: TensorInfo | None = None  # global scales [E, 2] of gate and of up, which must be equal
    name = "NVFP4"

    def check(self) -> None:
        self.read_scales()
        if self.pairs is not None:
            self.scales(read_tensor(self.pairs))

    def read_scales(self) -> Tensor:
        """F8_E4M3 [N, K / 16]."""
        scales = read_tensor(self.of_groups)
        scales = scales.mT if self.turned else scales
        if bool((scales.view(torch.uint8) & 127 == 127).any()):
            raise damaged("scales are not finite", self.of_groups.place, "NaN", "finite scales")
        return scales

    def values(self, stored: Tensor) -> Tensor:
        scales, values = self.read_scales().view(torch.uint8), stored.view(torch.uint8)
        if self.turned:
            values = values.mT
        return torch.cat((scales.unflatten(-1, (-1, 2)), values.unflatten(-1, (-1, 16))), -1)

    def scales(self, stored: Tensor) -> Tensor:
        global_scale = stored.reshape(-1, 2 if self.pairs else 1)
        if self.pairs and not torch.equal(global_scale[:, 0], global_scale[:, 1]):
            observed = "NVFP4 with another global scale for gate than for up"
            raise unread(self.pairs.place, observed, "the same for both")
        global_scale = global_scale[:, :1]
        return global_scale.reciprocal() if self.divides else global_scale

    def stored(self, values: Tensor) -> Tensor:
        packed = values[..., 2:].flatten(-2)
        return packed.mT if self.turned else packed

    def one(self, index: int) -> Packing:
        pairs = None if self.pairs is None else self.pairs.one(index)
        return replace(self, of_groups=self.of_groups.one(index), pairs=pairs)
