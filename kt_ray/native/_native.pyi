from collections.abc import Callable, Iterable, Sequence
from typing import Any

TensorArg = tuple[str, int, str, tuple[int, ...], bool]
"""(name, address, dtype, shape, contiguous on the CPU)"""
MatrixArg = tuple[str, str, int, int, int, int, int, int, int, str, int, int, int, int, int]
"""One projection of all experts, W[e][n][k]:
(name, format, E, N, K, address, bytes between experts, rows, columns (0 where elements have no address),
scale type or "none", address of the scales, bytes between experts' and rows' scales,
rows and columns that one scale covers)"""
WeightsArg = tuple[
    MatrixArg | None,
    MatrixArg,
    MatrixArg,
    int,
    list[int],
    tuple[str, float, float, float],
    tuple[TensorArg | None, TensorArg | None, TensorArg | None],
]
"""(gate, up, down, layer, expert_ids, (activation, alpha, limits of gate and up or
infinity), their biases)"""
LoraArg = tuple[TensorArg | None, TensorArg | None, TensorArg, TensorArg, TensorArg, TensorArg, float]
"""(gate_a, gate_b, up_a, up_b, down_a, down_b, scale); the first two None where there is no gate"""

def isas() -> list[tuple[str, bool, str]]: ...
def product_rates() -> list[tuple[str, float]]:
    """(instruction set, FLOP/s of one core) of every available one but reference; measured once."""

class Saved:
    """What backward needs of one forward; opaque but for its size."""

    @property
    def bytes(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def slots(self) -> int: ...
    def release(self) -> None:
        """Give the memory back to the engine: at once, or when a running backward has read it."""

class Engine:
    def __init__(
        self,
        isa: str,
        threads: int,
        cpus: list[int],
        int8_products: bool = False,
        tokens_per_row: float = 0.0,
    ) -> None: ...
    def row_tokens(self, weights: WeightsArg, slots: int) -> int: ...
    def forward(
        self,
        weights: WeightsArg,
        x: TensorArg,
        ids: TensorArg,
        weights_TK: TensorArg,
        lora: list[LoraArg],
        adapter_of_token: TensorArg | None,
        dropout: tuple[float, int, int] | None,
        keys: TensorArg | None,
        keep: int,
        y: TensorArg,
        check_finite: bool,
        tokens_alone: int | None,
    ) -> Saved | None: ...
    def backward(
        self,
        weights: WeightsArg,
        saved: Saved,
        dy: TensorArg,
        lora: list[LoraArg],
        lora_grads: list[LoraArg | None],
        dx: TensorArg | None,
        dw: TensorArg,
        check_finite: bool,
    ) -> None: ...
    def join(self, parts: list[TensorArg], out: TensorArg) -> None: ...
    def add_rows(self, parts: list[tuple[TensorArg, TensorArg]], out: TensorArg) -> None: ...
    def squares(self, tensors: list[TensorArg]) -> list[float]: ...
    def scatter_tasks(self, hidden: int, inter: int, rows: list[int]) -> list[tuple[int, int, int]]:
        """(slab, run, rows) of the tasks that add to tokens, for bfloat16 experts with so many rows each."""
    def close(self) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def calls(self) -> int: ...
    @property
    def busy_seconds(self) -> float: ...
    @property
    def scratch_bytes(self) -> int: ...

class Turns:
    """Whose turn it is at a slab, by itself, for tests."""

    def __init__(self, slabs: int) -> None: ...
    def wait(self, slab: int, run: int) -> bool: ...
    def done(self, slab: int, run: int) -> None: ...
    def fail(self) -> None: ...

class ThreadPool:
    """The engine's threads by themselves, for tests."""

    def __init__(self, threads: int, cpus: list[int]) -> None: ...
    def run(self, count: int, task: Callable[[int, int], None], ends: list[int] = ...) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def busy_seconds(self) -> float: ...

def play(
    programs: Sequence[tuple[str, float, Iterable[Any]]], capacity: dict[str, float], keep_spans: bool
) -> tuple[
    list[float],
    list[float],
    list[dict[str, float]],
    dict[str, float],
    dict[str, float],
    list[tuple[Any, Any, float, float]],
    list[tuple[Any, ...]],
]:
    """programs: (resource, width, items) of every actor (kt_ray.timing.event_loop).

    Returns of every actor when it ended, the seconds that it computed and those that it waited, by reason;
    seconds of every resource, and of the longest chain by what it went through; if kept, (actor, item, start,
    end) and (tag, resource, start, end) of what was done; the tags that were waited for in vain.
    """

class Resource:
    """What several tasks use at once, as the event loop has it (benchmarks/described_card.py)."""

    def __init__(self, capacity: float, since: float = 0.0) -> None: ...
    def begin(self, number: int, seconds: float, width: float, now: float) -> bool:
        """Returns whether the next end must be foreseen anew."""
    def foresee(self) -> float:
        """When the next task ends; void as soon as `version` is another. Raises IndexError: idle."""
    def end(self, now: float) -> int:
        """The number of the task that ends. Raises IndexError: idle."""
    @property
    def idle(self) -> bool: ...
    @property
    def version(self) -> int: ...
