"""Memory of the expert engine beside its weights: formulas, checked against what the engine reports.

Legend: T tokens and R rows (slots that name a local expert) of one call; H hidden size, I intermediate
size, r the largest LoRA rank; H', I' padded to multiples of 32, r' to a multiple of 16 (0 without
adapters); s bytes of the storage type (4 for float32 weights, else 2), c of the compute type (2 where the
instruction set multiplies bfloat16 and the weights are not float32, else 4; with INT8 products 2 on amx
alone); q of an element that these quantise; p = 2 projections before the activation, 1 without a gate.
docs/numerics.md says what each buffer holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kt_ray.config.limits import INT8_BACKENDS
from kt_ray.config.schema import LoraConfig
from kt_ray.dims.model_dims import ModelDims
from kt_ray.dims.weight_formats import BACKEND_STORAGE
from kt_ray.placement.lora_sizes import expert_rank

HUGE_PAGE = 2 << 20
ROUTING = 16  # bytes of a row's token, slot and router weight
HASHES = 12  # and of its dropout hashes
INT8 = 34 / 32  # of a value of gate or up in blocks of int8

_LANES = {"reference": 8, "avx2": 8}  # floats of a vector; all others 16
_BF16_PRODUCTS = ("avx512_bf16", "amx")
_SPAN_BYTES = 2 << 20  # of a span's packed rows, within 64 to 512 rows
_CHUNK_ROWS = 128
_PANEL_BYTES = 128 << 10
_AMX_PANEL_BYTES = 32 << 10  # depth goes in blocks through
_AMX_SUM_PANELS = 4  # so many panels, whose sums are kept,
_AMX_SPAN_ROWS = 512  # of so many rows,
_AMX_PANELS_AHEAD = 4  # and so many are decoded side by side
_NARROW_SUM_PANELS = 8  # where a panel has 16 columns, along columns
_BLOCK_ROWS = 32  # at most; fewer on most instruction sets
_GRAD_ROWS = 512
_GRAD_RANKS = 8
_TOUCH_LINES = 8
_WIDE_ROW = 24  # bytes of an address and two distances
_DW_COLUMNS = 128
_ROW_SCALE = 8  # bytes of a scale and of what a sum starts from


def _padded(n: int, step: int) -> int:
    return -(-n // step) * step


@dataclass(frozen=True)
class EngineShape:
    """One layer's experts as the engine sees them."""

    # hidden, inter: H and I
    hidden: int
    inter: int
    rank: int  # the largest LoRA rank; 0 = no adapters
    isa: str  # the instruction set
    float32: bool = False  # whether the weights are float32 (all other formats compute as bfloat16)
    gated: bool = True  # whether the experts have a gate projection
    dropout: bool = False  # whether LoRA dropout is on
    # format of weights that are multiplied in int8, "int8" or "int4"; None = the engine's own products
    integers: str | None = None

    @property
    def _widths(self) -> tuple[int, int, int]:
        return _padded(self.hidden, 32), _padded(self.inter, 32), _padded(self.rank, 16)

    @property
    def _elements(self) -> tuple[int, int]:
        if self.integers is not None:
            return 2, 2 if self.isa == "amx" else 4
        storage = 4 if self.float32 else 2
        return storage, 2 if not self.float32 and self.isa in _BF16_PRODUCTS else 4

    @property
    def _quantised(self) -> int:
        """Bytes of an element of a quantised left operand; avx512 is taken as it is without VNNI."""
        return 1 if self.isa in _BF16_PRODUCTS else 2

    def _quantised_depth(self, depth: int) -> int:
        """Elements of a row of one: whole cache lines."""
        return _padded(depth, 64 // self._quantised)

    @property
    def _parts(self) -> int:
        return 2 if self.gated else 1

    @property
    def without_lora(self) -> EngineShape:
        """A layer whose experts have no adapters."""
        return replace(self, rank=0, dropout=False)

    def saved(self, tokens: float, rows: float, activations: str = "retain") -> dict[str, float]:
        """Bytes kept of one forward for backward, by buffer: their sum is `Saved.bytes`.

        retain      T H' s + R (p I' s + 3 r' 4 + 16 + 12 with dropout); x, T H' s, with adapters alone
        int8        the same with 34 / 32 in the place of s of gate and up
        recompute   T H' s + R (16 + 12 with dropout)
        """
        h, i, r = self._widths
        storage, _ = self._elements
        kept = {"routing": rows * (ROUTING + (HASHES if self.dropout else 0))}
        if activations == "recompute" or self.rank:
            kept["x"] = tokens * h * storage
        if activations != "recompute":
            kept["gate and up"] = rows * self._parts * i * (INT8 if activations == "int8" else storage)
            kept["lora in"] = rows * 2 * r * 4
            kept["lora mid"] = rows * r * 4
        return kept

    def call(self, tokens: float, rows: float, activations: str = "retain") -> dict[str, float]:
        """Bytes of one backward's buffers, shared by all threads; a forward needs fewer.

        T H' s + R (I' c + p I' c + 3 r' 4 + 4 (I / 128 rounded up) + 4), and what `saved` would have kept of
        gate and up with retain, with recompute also of the adapters; with INT8 products R (p I' q + 8) more.
        """
        h, i, r = self._widths
        storage, compute = self._elements
        buffers = {
            "act": rows * i * compute,
            "gradients of gate and up": rows * self._parts * i * compute,
            "dy": tokens * h * storage,
            "lora out": rows * r * 4,
            "gradients of lora in": rows * 2 * r * 4,
            "parts of dw": -(-self.inter // _DW_COLUMNS) * rows * 4,
            "dw": rows * 4,
        }
        if self.integers is not None:
            depth = self._quantised_depth(self._parts * i)
            buffers["quantised gradients of gate and up"] = rows * depth * self._quantised
            buffers["their scales"] = rows * _ROW_SCALE
        if activations != "retain":
            again = ("gate and up", *(("lora in", "lora mid") if activations == "recompute" else ()))
            buffers |= {name: size for name, size in self.saved(tokens, rows).items() if name in again}
        return buffers

    def thread(self) -> int:
        """Bytes of one thread's scratch: two panels, packed rows, and what is as small as they are wide.

        With w columns of a panel (32, or 16 on avx2 and reference), P = 128 KiB, g = 1 (8 where w = 16),
        a = 1 and S = 2 MiB / (H' c) rows of a span, within 64 and 512; on amx P = 32 KiB, a = g = 4 and
        S = 512, but for float32:

            2 a min(P, max(H', p I') w c) + max(S, 128) (max(H', I') c + 4 g w)
            + w (8 r' + 512 ⌈4 r' / w⌉) + w 2,176 + 256 r' + 43 KiB         r' at least 16

        INT8 products have a = 1, and beside it what `_integer_scratch` says.
        """
        blocks = self.isa == "amx" and not self.float32
        h, i, r = self._widths
        _, compute = self._elements
        columns = 2 * _LANES.get(self.isa, 16)
        slice_bytes = 32 * columns * compute
        most = _AMX_PANEL_BYTES if blocks else _PANEL_BYTES
        panel = min(max(h, self._parts * i) // 32, most // slice_bytes) * slice_bytes
        span = _AMX_SPAN_ROWS if blocks else min(max(_SPAN_BYTES // (h * compute), 64), 512)
        rows = max(span, _CHUNK_ROWS)
        rank = max(r, 16)
        ahead = _AMX_PANELS_AHEAD if blocks and self.integers is None else 1
        sums = _AMX_SUM_PANELS if blocks else _NARROW_SUM_PANELS if columns == 16 else 1
        parts = (
            *(ahead * panel, ahead * panel),
            rows * max(h, i) * compute,
            sums * rows * columns * 4,
            _BLOCK_ROWS * columns * 4,
            2 * rank * columns * 4,
            -(-4 * rank // columns) * _CHUNK_ROWS * columns * 4,
            _GRAD_ROWS * _GRAD_RANKS * 4,
            _GRAD_ROWS * columns * 4,
            *(_GRAD_ROWS * _WIDE_ROW, _GRAD_ROWS * _WIDE_ROW),
            _BLOCK_ROWS * _TOUCH_LINES * 8,
            (2 * 32 * rank + columns // 2) * 4,
            *(() if self.integers is None else self._integer_scratch(columns, most, span)),
        )
        return sum(_padded(part, 128) for part in parts)

    def _integer_scratch(self, columns: int, most: int, span: int) -> tuple[int, ...]:
        """What INT8 products add to it: two panels of integers, quantised rows of a span with their scales, a
        row and its channels' scales; with int4 also scales of groups of 32, and ratios of scales.

        Args:
            columns: of a panel. most: bytes of one. span: rows.
        """
        h, i, _ = self._widths
        size = self._quantised
        widest = self._quantised_depth(max(h, self._parts * i))
        slices = min(widest // 32, most // (32 * columns * size))
        packed = self._quantised_depth(h)
        groups = self.integers == "int4"
        panel = slices * columns * (32 * size + 4 * groups)
        scales = span * (packed // 32 if groups else 1) * _ROW_SCALE
        return (panel, panel, span * packed * size, scales, *[widest * 4] * (3 if groups else 2))


def rounded(size: float) -> int:
    """What a buffer of `size` bytes takes: whole cache lines, from 2 MiB on whole huge pages."""
    return _padded(math.ceil(size), HUGE_PAGE if size >= HUGE_PAGE else 64)


def engine_shape(dims: ModelDims, lora: LoraConfig, isa: str, backend: str = "auto") -> EngineShape:
    """A layer's routed experts as the engine of `isa` computes them."""
    requantised = backend in (*BACKEND_STORAGE, "llamafile") or dims.experts_file_bytes
    return EngineShape(
        hidden=dims.expert_width,
        inter=dims.expert_intermediate,
        rank=expert_rank(dims, lora),
        isa=isa,
        float32=dims.expert_format == "f32" and not requantised,
        gated=dims.gated,
        dropout=lora.experts and lora.dropout > 0,
        integers=BACKEND_STORAGE[backend].format if backend in INT8_BACKENDS else None,
    )
