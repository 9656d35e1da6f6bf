"""What the AMX engine could reach, by a model; nothing here was measured on AMX.

    python benchmarks/amx_model.py

One DeepSeek-V3 expert on one socket, all cores working on it. Per run of the micro-kernel (32 rows, 32
columns, a block of 512 depths) tile products take 16 cycles each; decoding and the ends of tiles are vector
work, which overlaps completely or not at all. docs/kernels.md has the assumptions and what is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

HIDDEN, INTER = 7168, 2048
CORES, HERTZ, MEMORY = 48, 2.0e9, 246e9  # assumed: clock under AMX load, bytes per second of a socket
FLOP_PER_CYCLE, DEPTH, COLUMNS = 1024, 512, 32
DECODING = 4  # cycles per 32 weights, measured on Zen 4
FORMATS = {"BF16": 2.0, "FP8": 1 + 4 / 128**2, "INT4": 0.5 + 2 / 32}  # bytes per weight

# Zen 4, measured: cycles of a layer of DeepSeek-V2-Lite by part, 3,072 rows of rank 8 (docs/kernels.md).
ROWS, H, I = 3072, 2048, 1408
MS = 235e9 / 64 / 1e3  # cycles per millisecond: 64 FLOP per cycle


@dataclass(frozen=True)
class Direction:
    """A forward or a backward; its products as (columns, depth) of the two sweeps."""

    name: str
    sweeps: tuple[tuple[int, int], tuple[int, int]]
    ends: float  # cycles per sum, without LoRA
    expansion: float  # and of LoRA
    rest: float  # cycles per row and element of hidden and intermediate size: packing, projections, gradients


FORWARD = Direction(
    "forward",
    ((2 * INTER, HIDDEN), (HIDDEN, INTER)),
    ends=5 * MS / (ROWS * (2 * I + H)),
    expansion=5 * MS / (ROWS * (2 * I + H)),
    rest=(4 + 3) * MS / (ROWS * (H + I)),
)
BACKWARD = Direction(
    "backward",
    ((INTER, HIDDEN), (HIDDEN, 2 * INTER)),
    ends=7 * MS / (ROWS * (I + H)),
    expansion=5 * MS / (ROWS * (I + H)),
    rest=(4 + 5 + 8) * MS / (ROWS * (H + I)),
)


@dataclass(frozen=True)
class Engine:
    """How vector work runs."""

    name: str
    passing: bool = True  # ends of tiles run during the next tile's products
    overlap: bool = True  # vector work hides behind tile products
    decoding: float = DECODING
    expands: bool = True  # LoRA at the ends of tiles, on vectors


NOW = Engine("as it is")
ENGINES = (
    NOW,
    Engine("ends after products", passing=False),
    Engine("nothing overlaps", overlap=False),
    Engine("decoding without shuffles", decoding=DECODING / 2),  # forward with swapped operands
    Engine("LoRA's expansions on tiles", expands=False),
)


def cycles(engine: Engine, direction: Direction, rows: int) -> float:
    """Core cycles of the products of an expert's rows (at most 256, a span), their decoding and ends."""
    blocks, total = -(-rows // 32), 0.0
    tile = DEPTH * COLUMNS * 2 * rows / blocks / FLOP_PER_CYCLE
    decoding = DEPTH * COLUMNS / 32 * engine.decoding / blocks

    def run(vector: float) -> float:
        return max(tile, vector) if engine.overlap else tile + vector

    for columns, depth in direction.sweeps:
        ends = (direction.ends + engine.expands * direction.expansion) * rows / blocks * COLUMNS
        last = run(decoding + ends) if engine.passing else run(decoding) + ends
        total += columns // COLUMNS * blocks * ((depth // DEPTH - 1) * run(decoding) + last)
    return total


def main() -> None:
    weights = 3 * HIDDEN * INTER
    for direction in (FORWARD, BACKWARD):
        print(f"{direction.name}: share of the peak, products with decoding and ends / with the rest too")
        for engine in ENGINES:
            shares = []
            for rows in (16, 64, 256):
                ideal, own = 2 * weights * rows / FLOP_PER_CYCLE, cycles(engine, direction, rows)
                rest = direction.rest * rows * (HIDDEN + INTER)
                shares.append(f"{ideal / own:.0%} / {ideal / (own + rest):.0%}")
            print(f"  {engine.name:28} 16, 64, 256 tokens per expert: ", ", ".join(shares))
        for name, size in FORMATS.items():
            memory, limits = weights * size / MEMORY * HERTZ * CORES, []
            for rows in (16, 64, 256):
                whole = cycles(NOW, direction, rows) + direction.rest * rows * (HIDDEN + INTER)
                share = 2 * weights * rows / FLOP_PER_CYCLE / max(whole, memory)
                limits.append(f"{share:.0%} ({'memory' if memory > whole else 'cores'})")
            print(f"  {name:28} 16, 64, 256 tokens per expert: ", ", ".join(limits))


if __name__ == "__main__":
    main()
