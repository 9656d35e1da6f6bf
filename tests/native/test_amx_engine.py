"""The engine on AMX: on a CPU that has it, elsewhere the shipped extension under the emulator, whose counts
prove that tile products ran. Bits and counts; never speed."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kt_ray.native import Engine
from tests.helpers.amx import Amx
from tests.helpers.avx512 import SLOW_WITHOUT
from tests.helpers.matrices import VARIANTS, quantised_case
from tests.helpers.native import Case, Shape, make_case, tolerance

pytestmark = [
    pytest.mark.accept("engine"),
    pytest.mark.skipif(bool(Amx.unusable()), reason=f"AMX cannot run here: {Amx.unusable()}"),
    *SLOW_WITHOUT,
]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def amx(tmp_path_factory: pytest.TempPathFactory) -> Amx:
    return Amx.build(tmp_path_factory.mktemp("amx"))


def call(amx: Amx, function: str, *arguments: str, **environment: str) -> str:
    """What a function of this module prints in a process where AMX is."""
    program = f"import sys; from tests.native import test_amx_engine as m; m.{function}(*sys.argv[1:])"
    return amx.run([sys.executable, "-c", program, *arguments], KT_RAY_ISA="amx", **environment)


def products(amx: Amx, since: int = 0) -> int:
    return amx.counts()["tdpbf16ps"] - since if amx.emulated else 0


# -- the engine's own tests ----------------------------------------------------------------------------

# Without the largest shapes, and what says nothing about an instruction set's bfloat16 kernels.
SELECTION = {
    "test_formats_engine.py": "amx and not (ranks or same_numbers or halves)",
    "test_engine.py": "amx and bfloat16",
    "test_rows.py": "amx and (formats or routings or other_tokens)",  # no tiles: AVX-512 alone
    "test_scatter.py": "amx",
    "test_activations.py": "amx and bfloat16 and (many_rows or transposed-inter or recomputing or threads)",
}


@pytest.mark.slow
@pytest.mark.parametrize("file", SELECTION)
def test_the_engine_s_own_tests_pass(amx: Amx, file: str) -> None:
    """Every format there and back with odd sizes and routings, activations, adapters, dropout, threads."""
    before = products(amx)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SELECTION[file]]
    said = amx.run([*command, str(HERE / file)], KT_RAY_ISA="amx", OMP_NUM_THREADS="1")
    assert " passed" in said and "skipped" not in said, said
    if amx.emulated and file != "test_rows.py":
        assert products(amx, before) > 10_000


# -- counts --------------------------------------------------------------------------------------------

ROWS, HIDDEN, INTER, RANK = 48, 96, 64, 8


def plan(adapter: bool) -> tuple[int, int]:
    """Tile products of ROWS tokens of one expert, forward and backward, as docs/kernels.md lays tiles out.

    48 rows are blocks of 16 and 32 rows; per piece of 32 elements of depth a panel of 32 columns takes
    two products for the one and four for the other. An adapter's matrix is two bfloat16 wide.
    """
    per_piece = 2 + 4

    def panels(columns: int, depth: int) -> int:
        return -(-columns // 32) * -(-depth // 32) * per_piece

    forward = panels(2 * INTER, HIDDEN) + panels(HIDDEN, INTER)
    backward = panels(INTER, HIDDEN) + panels(HIDDEN, 2 * INTER)
    if adapter:
        forward += panels(2 * 2 * RANK, HIDDEN) + panels(2 * RANK, INTER)
        backward += panels(2 * RANK, HIDDEN) + 2 * panels(2 * RANK, INTER)
    return forward, backward


def known_case(rank: int) -> Case:
    shape = Shape(tokens=ROWS, slots=1, experts=1, hidden=HIDDEN, inter=INTER, rank=rank)
    return make_case(shape, torch.bfloat16, routing="one")


PLANNED = [(rank, threads) for rank in (0, RANK) for threads in (1, 2)]


def print_counts() -> None:
    """For each of PLANNED the counts, and how many threads hold tiles: at first, after a forward, after a
    backward, and after the engine's end."""
    emulator = ctypes.CDLL(None)
    counts = (ctypes.c_uint64 * 64)()
    names = ["ldtilecfg", "sttilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps"]

    def now() -> dict[str, int]:
        emulator.amxemu_counts(counts)
        return {**dict(zip(names, counts, strict=False)), "configured": emulator.amxemu_configured()}

    found = []
    for rank, threads in PLANNED:
        case = known_case(rank)
        lora = case.lora or None
        with Engine(threads=threads) as engine:
            assert engine.isa == "amx"
            start = now()
            _, saved = engine.forward(case.weights, case.x, case.ids, case.weights_TK, lora=lora)
            middle = now()
            grads = [a.zeros_like() for a in case.lora] or None
            engine.backward(case.weights, saved, case.dy, lora=lora, lora_grads=grads)
            end = now()
        found.append([start, middle, end, now()])
    print(json.dumps(found))


def test_products_are_as_planned_and_tiles_released(amx: Amx) -> None:
    if not amx.emulated:
        pytest.skip("this CPU has AMX: nothing counts")
    before = products(amx)
    found = json.loads(call(amx, "print_counts"))
    for (rank, threads), counts in zip(PLANNED, found, strict=True):
        start, middle, end, _ = counts
        forward, backward = (b["tdpbf16ps"] - a["tdpbf16ps"] for a, b in ((start, middle), (middle, end)))
        assert (forward, backward) == plan(rank > 0), (rank, threads)
        # Blocks of 16 and 32 rows share a configuration; no thread keeps its tiles after its task.
        assert min(b["ldtilecfg"] - a["ldtilecfg"] for a, b in ((start, middle), (middle, end))) >= 2
        assert end["tilerelease"] - start["tilerelease"] >= 4
        assert [c["configured"] for c in counts] == [0, 0, 0, 0]
    chosen = found[0][0]["tdpbf16ps"]  # to choose between instruction sets, before the first call
    assert products(amx, before) == chosen + sum(sum(plan(rank > 0)) for rank, _ in PLANNED)


DEEP = Shape(tokens=60, slots=2, experts=3, hidden=1120, inter=544, rank=0)


def deep_case() -> Case:
    return make_case(DEEP, torch.bfloat16)


def row_blocks(rows: int) -> list[int]:
    """Rows of an expert's blocks: as even as steps of 16 rows allow, at most 32."""
    steps, count = -(-rows // 16), -(-rows // 32)
    ends = [min(rows, steps * b // count * 16) for b in range(count + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def deep_plan(rows: list[int], columns: int, depth: int) -> dict[str, int]:
    """Tile operations of the products of all experts; after every block of at most 512 depths a store."""
    panels, pieces = columns // 32, depth // 32
    cuts = -(-pieces // 16)
    blocks = [block for expert in rows for block in row_blocks(expert)]
    sums = sum(4 if block > 16 else 2 for block in blocks)
    operands = sum(4 if block > 16 else 3 for block in blocks)
    return {
        "tilezero": panels * sums,
        "tileloadd": panels * (pieces * operands + (cuts - 1) * sums),
        "tilestored": panels * cuts * sums,
        "tdpbf16ps": panels * pieces * sums,
    }


def print_deep_counts() -> None:
    """Counts of forward, of backward; then how far results are from avx512_bf16."""
    emulator = ctypes.CDLL(None)
    counts = (ctypes.c_uint64 * 64)()
    names = ["ldtilecfg", "sttilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps"]

    def now() -> dict[str, int]:
        emulator.amxemu_counts(counts)
        return dict(zip(names, counts, strict=False))

    case = deep_case()
    with Engine(threads=1) as engine:
        found = [now()]
        _, saved = engine.forward(case.weights, case.x, case.ids, case.weights_TK)
        found.append(now())
        engine.backward(case.weights, saved, case.dy)
        found.append(now())
        results = case.run(engine)
    with Engine("avx512_bf16", threads=1) as vectors:
        wanted = case.run(vectors)
    difference = max(float((results[n] - wanted[n]).norm() / wanted[n].norm()) for n in wanted)
    print(json.dumps([*found, difference]))


def test_depth_goes_in_blocks_through_groups_of_panels(amx: Amx) -> None:
    if not amx.emulated:
        pytest.skip("this CPU has AMX: nothing counts")
    *found, difference = json.loads(call(amx, "print_deep_counts"))
    rows = torch.bincount(deep_case().ids.flatten(), minlength=DEEP.experts)[: DEEP.experts].tolist()
    assert len({len(row_blocks(n)) for n in rows}) > 1, rows
    sizes = {
        "forward": [(2 * DEEP.inter, DEEP.hidden), (DEEP.hidden, DEEP.inter)],
        "backward": [(DEEP.inter, DEEP.hidden), (DEEP.hidden, 2 * DEEP.inter)],
    }
    for (before, after), products in zip(itertools.pairwise(found), sizes.values(), strict=True):
        plans = [deep_plan(rows, columns, depth) for columns, depth in products]
        planned = {name: sum(plan[name] for plan in plans) for name in plans[0]}
        assert {name: after[name] - before[name] for name in planned} == planned
    assert difference < tolerance(torch.bfloat16, 0, 1) / 4


# -- results -------------------------------------------------------------------------------------------


def print_differences() -> None:
    """Relative distance of amx from avx512_bf16, the largest over all results, by format."""
    found = {}
    with Engine("amx", threads=2) as tiles, Engine("avx512_bf16", threads=2) as vectors:
        for name in ("bf16", *VARIANTS):
            multiple = VARIANTS[name].multiple if name in VARIANTS else 1
            size = -(-72 // multiple) * multiple
            shape = Shape(tokens=45, slots=2, experts=2, hidden=size, inter=size, rank=5, adapters=2)
            case = quantised_case(shape, name, dropout=0.1)
            a, b = case.run(tiles), case.run(vectors)
            found[name] = max(float((a[n] - b[n]).norm() / b[n].norm()) for n in a)
    print(json.dumps(found))


def test_avx512_bf16_agrees_to_rounding(amx: Amx) -> None:
    """Both add exact products in float32, in other orders: a stored value may fall to the other side of its
    rounding, which happens to few."""
    before = products(amx)
    found = json.loads(call(amx, "print_differences"))
    assert set(found) == {"bf16", *VARIANTS}
    assert 0 < max(found.values()) < tolerance(torch.bfloat16, 0, 1) / 4, found
    if amx.emulated:
        assert products(amx, before) > 10_000


# -- permission and processes --------------------------------------------------------------------------

REFUSED = """
from kt_ray.native import Engine
try:
    Engine()
except ValueError as error:
    print(error)
"""


def test_without_permission_an_engine_says_so(amx: Amx) -> None:
    if not amx.emulated:
        pytest.skip("this CPU has AMX: its permission is not ours to refuse")
    said = amx.run([sys.executable, "-c", REFUSED], KT_RAY_ISA="amx", AMXEMU_PERMISSION="deny")
    assert said.startswith("KT_RAY_ISA: instruction set 'amx' cannot be used on this machine; available: ")
    assert "amx (AMX tile data not permitted by the operating system (arch_prctl: errno 1," in said


def fork_and_compute() -> None:
    """A child made by fork builds its own engine, tiles and all, and gets the parent's results."""
    case = known_case(RANK)
    with Engine(threads=2) as engine:
        want = case.run(engine)
        child = os.fork()
        if child == 0:
            with Engine(threads=2) as own:
                got = case.run(own)
            os._exit(0 if all(torch.equal(got[n], want[n]) for n in want) else 3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        again = case.run(engine)
    print(status, all(torch.equal(again[n], want[n]) for n in want))


def test_a_forked_child_has_tiles_of_its_own(amx: Amx) -> None:
    assert call(amx, "fork_and_compute").split() == ["0", "True"]


def test_the_emulator_reports_tiles_that_are_left(amx: Amx, tmp_path: Path) -> None:
    """The check above would see an engine that forgets to release."""
    if not amx.emulated:
        pytest.skip("this CPU has AMX: no emulator")
    source = tmp_path / "left.c"
    source.write_text(
        """
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
int amxemu_configured(void);
int main() {
    _Alignas(64) unsigned char config[64] = {1};
    config[16] = 64, config[48] = 16;
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 1;
    printf("%d ", amxemu_configured());
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
    printf("%d ", amxemu_configured());
    __asm__ volatile("tilerelease");
    printf("%d", amxemu_configured());
}
"""
    )
    program = tmp_path / "left"
    subprocess.run(
        ["gcc", "-mamx-tile", source, "-o", program, str(amx.emulator)], check=True, capture_output=True
    )
    assert amx.run([str(program)]) == "0 1 0"
