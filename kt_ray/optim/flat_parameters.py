"""Parameters end to end in one vector, their gradients in another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

# Elements that each parameter's room is a multiple of. Which kernel a matrix product takes, and so its last
# bits, may depend on where its operands begin: within 256 bytes that is the same for all, as in memory of
# their own.
_ALIGNED = 64


def flat_size(shapes: Mapping[str, Sequence[int]]) -> int:
    """Elements of a vector that holds parameters of these shapes."""
    return sum(size for _, size in _rooms(shapes))


def views(flat: Tensor, shapes: Mapping[str, Sequence[int]]) -> list[Tensor]:
    """Each parameter within a vector of `flat_size`."""
    rooms = zip(_rooms(shapes), shapes.values(), strict=True)
    return [flat[start : start + torch.Size(shape).numel()].view(shape) for (start, _), shape in rooms]


def _rooms(shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Where each parameter begins, and its elements with those that nobody uses: zeros."""
    start = 0
    for shape in shapes.values():
        size = -(-torch.Size(shape).numel() // _ALIGNED) * _ALIGNED
        yield start, size
        start += size


class FlatParameters:
    """Float32 parameters of one device as views of `values`, their gradients as views of `grads`: what
    concerns all of them is one operation instead of one for each.

    Args:
        parameters: by name; they keep their values, and gradients become zeros.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], device: torch.device) -> None:
        self._parameters = list(parameters.values())
        self._shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.values = torch.zeros(flat_size(self._shapes), dtype=torch.float32, device=device)
        self.grads = torch.zeros_like(self.values)
        for parameter, value in zip(self._parameters, views(self.values, self._shapes), strict=True):
            value.copy_(parameter.detach())
        self.find()

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of `values`, of `grads` or of another vector of that layout."""
        return dict(zip(self._shapes, views(flat, self._shapes), strict=True))

    def find(self) -> None:
        """The parameters and their gradients are where the two vectors lie now."""
        values, grads = views(self.values, self._shapes), views(self.grads, self._shapes)
        for parameter, value, grad in zip(self._parameters, values, grads, strict=True):
            parameter.data, parameter.grad = value, grad
