"""What a refactor must not move: exact where every x86-64 CPU agrees, else within what rounding can do.

    python -m tests.test_golden    writes tests/golden/engine.json and training.json; see below

- engine.json: the engine's results by instruction set, bit for bit. They depend on nothing else: the engine
  calls no libm, its compiler contracts nothing, and neither the CPU's vendor nor the number of threads
  matters (Zen4's `vdpbf16ps` does what Intel's manual says: of a pair the odd product first, both fused).
  The program above adds this machine's instruction sets and keeps the others.
- training.json: a short run in float32 with overruled routers (tests/helpers/golden.py). Rows, tokens, calls,
  and what the routers would choose are exact, except choices that rounding can turn. Losses and gradient
  norms depend on the kernels that torch picks for a CPU; their bound is how far they move when every weight
  moves by rounding.

Write them anew only for a change that is meant to move them, and say so in the commit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.native import available_isas
from kt_ray.transport.links import ExpertLink
from kt_ray.transport.messages import Address, Message
from tests.helpers.golden import (
    ENGINE_CASES,
    UNIT,
    Record,
    engine_digests,
    row_digests,
    spread,
    train,
    write_model,
)

GOLDEN = Path(__file__).parent / "golden"
NUDGES = ("a", "b", "c")  # runs with weights off by rounding


def recorded(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield write_model(Path(folder) / "model")


@pytest.fixture(scope="module")
def runs(model_dir: Path) -> dict[str, Record]:
    return {isa: train(model_dir, isa) for isa in available_isas()}


RECORDED = pytest.mark.parametrize("isa", sorted({*recorded("engine"), *available_isas()}))


@pytest.mark.parametrize("case", ENGINE_CASES)
@RECORDED
def test_engine_bits(isa: str, case: str) -> None:
    golden = engine_bits(isa)
    assert engine_digests(isa, case) == golden[case]


@RECORDED
def test_engine_bits_by_rows(isa: str) -> None:
    golden, found = engine_bits(isa)["rows"], row_digests(isa)
    assert {case: found.get(case) for case in golden} == golden
    if missing := sorted(found.keys() - golden.keys()):
        pytest.skip(f"no bits by rows of {missing} are recorded: python -m tests.test_golden, on this CPU")


def engine_bits(isa: str) -> Any:
    golden = recorded("engine")
    if isa not in available_isas():
        pytest.skip(f"this CPU has no {isa}")
    if isa not in golden:
        pytest.skip(f"no bits of {isa} are recorded: python -m tests.test_golden, on this CPU")
    return golden[isa]


@pytest.mark.parametrize("isa", available_isas())
def test_training(isa: str, runs: dict[str, Record]) -> None:
    compare(runs[isa], recorded("training"))


def compare(run: Record, golden: Any) -> None:
    """Every fact of a run against the record."""
    assert run.batches == golden["batches"]
    assert run.calls == golden["calls"]
    assert run.rates == pytest.approx(golden["rates"], rel=1e-12)
    compare_adapters(run, golden["adapters"])
    compare_routes(run, golden["routes"])
    for name in ("losses", "norms"):
        moved = [abs(got - want) for got, want in zip(getattr(run, name), golden[name], strict=True)]
        assert max(moved) <= golden["bounds"][name], f"{name} moved by {moved}"
    # The factor is max_grad_norm / norm: its relative error is the norm's.
    relative = golden["bounds"]["norms"] / min(golden["norms"])
    assert run.clips == pytest.approx(golden["clips"], rel=relative)


def compare_adapters(run: Record, golden: Any) -> None:
    """The first value of A, a random integer times a bound, fused multiply-add or not; B is zero."""
    assert list(run.adapters) == list(golden)
    for name, value in run.adapters.items():
        assert value == pytest.approx(golden[name], rel=0, abs=4 * UNIT), name


def compare_routes(run: Record, golden: Any) -> None:
    """The routers' own choices, but for those that rounding can turn."""
    assert {str(layer) for layer in run.routes} == set(golden)
    for layer, notes in run.routes.items():
        choices = golden[str(layer)].split()
        assert len(choices) == len(notes)
        for choice, (token, (experts, margin)) in zip(choices, sorted(notes.items()), strict=True):
            assert "".join(f"{e:x}" for e in experts) == choice or margin < 1, (layer, token, experts, choice)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_other_kernels_of_torch(capability: str) -> None:
    """The same facts with the kernels that torch takes on other CPUs."""
    if capability == torch.backends.cpu.get_cpu_capability().lower():
        pytest.skip("this process already has them")
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_golden", "--compare"],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"agrees with kernels {capability.upper()}" in done.stdout


def test_a_small_change_is_seen(model_dir: Path) -> None:
    """The bound lets rounding pass and little else."""
    with pytest.raises(AssertionError, match="losses moved by"):
        compare(train(model_dir, "reference", "lora.dropout=0.1001"), recorded("training"))


def test_answers_are_added_in_rank_order() -> None:
    """Elementwise sums have the same bits everywhere, in one order: 2**24 + 1 is 2**24, one at a time."""
    parts = [torch.full((3, 4), value) for value in (2.0**24, 1.0, 1.0, -(2.0**24))]

    class Inbox:
        def take(self, tag: tuple[Any, ...]) -> Message:
            return Message(tag, {"y": parts[tag[-1]]})

    class SharedMemory:
        def shares(self, address: Address) -> bool:
            return True

        def send(self, to: Any, message: Message) -> None: ...

        def release(self, lease: Any) -> None: ...

    exchange = ExpertLink(
        Inbox(),  # type: ignore[arg-type]
        SharedMemory(),  # type: ignore[arg-type]
        replica=0,
        experts=range(4),
        number=1,
        experts_of=lambda layer, rank: (),
        num_experts=8,
    )
    ids = torch.zeros(3, 2, dtype=torch.int32)
    exchange.submit_forward(1, 0, torch.zeros(3, 4), ids, torch.zeros(3, 2), torch.zeros(3).long(), False)
    assert exchange.join_forward(1, 0).tolist() == [[0.0] * 4] * 3  # any other order gives 1 or 2


def write() -> None:
    """Records what this machine computes."""
    digests = {
        isa: {case: engine_digests(isa, case) for case in ENGINE_CASES} | {"rows": row_digests(isa)}
        for isa in available_isas()
    }
    _write("engine", recorded("engine") | digests if (GOLDEN / "engine.json").is_file() else digests)
    with tempfile.TemporaryDirectory() as folder:
        run = train(write_model(Path(folder) / "model"), "reference")
        nudged = [train(write_model(Path(folder) / name, nudge=name), "reference") for name in NUDGES]
    moved = spread(nudged, run)
    _write(
        "training",
        {
            "batches": run.batches,
            "calls": run.calls,
            "rates": run.rates,
            "clips": run.clips,
            "losses": run.losses,
            "norms": run.norms,
            # Twice: as far as one run from the exact one, another may be on the other side.
            "bounds": {name: float(f"{2 * max(values):.2g}") for name, values in moved.items()},
            "adapters": run.adapters,
            "routes": {
                str(layer): " ".join(
                    "".join(f"{e:x}" for e in experts) for _, (experts, _) in sorted(notes.items())
                )
                for layer, notes in sorted(run.routes.items())
            },
        },
    )


def _write(name: str, value: Mapping[str, Any]) -> None:
    """JSON with a line for each entry of each entry."""
    blocks = []
    for key, part in value.items():
        pairs = (
            [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in part.items()] if isinstance(part, dict) else None
        )
        lines = pairs if pairs is not None else [json.dumps(entry) for entry in part]
        begin, end = ("{", "}") if pairs is not None else ("[", "]")
        body = ",\n  ".join(lines)
        blocks.append(f" {json.dumps(key)}: {begin}\n  {body}\n {end}")
    whole = ",\n".join(blocks)
    (GOLDEN / f"{name}.json").write_text(f"{{\n{whole}\n}}\n", encoding="utf-8")


def main() -> None:
    if sys.argv[1:] != ["--compare"]:
        write()
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(train(write_model(Path(folder) / "model"), "reference"), recorded("training"))
    print(f"agrees with kernels {torch.backends.cpu.get_cpu_capability()}")


if __name__ == "__main__":
    main()
