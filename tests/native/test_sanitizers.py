"""The engine in C++ (tests/native/cpp/engine_driver.cpp) on its corpus of cases: under AddressSanitizer with
UndefinedBehaviorSanitizer, under ThreadSanitizer, and with the objects that ship. Any finding ends the
program and fails the test. Most of the time is the compilers'."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from kt_ray.native import available_isas
from tests.helpers import engine_cases
from tests.helpers.amx import Amx
from tests.helpers.engine_cases import CORPUS, build, build_shipped, corpus, run, shipped_objects
from tests.helpers.exhaustive import exhaustive

pytestmark = pytest.mark.skipif(engine_cases.compiler() is None, reason="no C++ compiler")

# Memory comes filled with NaN, large blocks too: what is read before it is written shows in the results.
# Not detect_stack_use_after_return: g++ 12 misaligns vectors on such stacks (its bug 110027).
ASAN = "malloc_fill_byte=255:max_malloc_fill_size=268435456:halt_on_error=1:detect_stack_use_after_return=0"
UBSAN = "halt_on_error=1:print_stacktrace=1"
TSAN = "halt_on_error=1:second_deadlock_stack=1"


def cases_of(said: str) -> int:
    found = re.search(r"^(\d+) cases ok", said, re.MULTILINE)
    assert found is not None, said
    return int(found[1])


def available(isas: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(isa for isa in isas if isa in available_isas())


def test_the_corpus_is_what_the_helper_says() -> None:
    """`python -m tests.helpers.engine_cases` writes it; a fuzzer's finds go into the helper's table."""
    assert {path.name: path.read_bytes() for path in CORPUS.iterdir()} == corpus()
    fields = re.search(r"#define DRIVER_FIELDS\(X\)(.*?)\n\n", _driver_text("driver_case.h"), re.DOTALL)
    assert fields is not None
    assert tuple(re.findall(r"X\((\w+)\)", fields[1])) == engine_cases.FIELDS
    variants = re.findall(r'^    \{"([\w-]+)", kt::Format', _driver_text("driver_stored.h"), re.MULTILINE)
    assert tuple(variants) == engine_cases.VARIANTS


def _driver_text(name: str) -> str:
    return (engine_cases.DRIVER.parent / name).read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("vectors", [False, exhaustive(True)])
def test_no_bad_access_and_no_undefined_behaviour(tmp_path: Path, vectors: bool) -> None:
    """The engine and the reference kernels; with all others of this CPU, but for AMX, whose tiles the
    compiler's checks do not see, and with undefined behaviour, where compilation may take minutes.

    Undefined behaviour in what all instruction sets share (and in the engine around it) is looked for once,
    in the reference kernels.
    """
    isas = ("reference", *(available(("avx2", "avx512", "avx512_bf16")) if vectors else ()))
    undefined = ["-fsanitize=undefined", "-fno-sanitize-recover=all"] if vectors else []
    program = build(tmp_path, isas, ["-fsanitize=address"], undefined)
    said = run(
        [str(program), str(CORPUS), "--random", "10", "--isas", ",".join(isas)],
        ASAN_OPTIONS=ASAN,
        UBSAN_OPTIONS=UBSAN,
    )
    assert cases_of(said) == len(corpus()) + 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("isa", ["reference", exhaustive("avx2")])
def test_no_race_between_threads(tmp_path: Path, isa: str) -> None:
    """Tasks and what they share are the same on every instruction set: one that compiles fast will do."""
    if isa not in available_isas():
        pytest.skip(f"this CPU has no {isa}")
    program = build(tmp_path, [isa], ["-fsanitize=thread"])
    command = [str(program), str(CORPUS), "--threads", "2", "--isas", isa]
    try:
        said = run(command, TSAN_OPTIONS=TSAN)
    except AssertionError as error:
        # Older runtimes do not cope with the address layout of newer kernels.
        if "unexpected memory mapping" not in str(error) or shutil.which("setarch") is None:
            raise
        said = run(["setarch", "-R", *command], TSAN_OPTIONS=TSAN)
    assert cases_of(said) == len(corpus())


def test_the_objects_that_ship_compute_the_corpus(tmp_path: Path) -> None:
    """At full optimisation, with random cases on top; freed and fresh memory holds large numbers."""
    objects = shipped_objects()
    if not objects:
        pytest.skip("the build folder of the extension in use is not here")
    program = build_shipped(tmp_path, objects)
    isas = available(("reference", "avx2", "avx512", "avx512_bf16", "amx"))
    command = [str(program), str(CORPUS), "--isas", ",".join(isas)]
    said = run([*command, "--random", "30"], MALLOC_PERTURB_="128")
    assert cases_of(said) == len(corpus()) + 30
    if Amx.unusable() or "avx512_bf16" not in isas or "amx" in isas:
        return
    amx = Amx.build(tmp_path)
    small = [str(CORPUS / name) for name in ("format-bf16", "size-odd-bf16", "rank-33", "routing-uneven")]
    assert cases_of(amx.run([str(program), "--isas", "amx", *small])) == len(small)
    assert amx.counts()["tdpbf16ps"] > 1000


def test_the_event_loop(tmp_path: Path) -> None:
    """Random programs of actors (tests/native/cpp/event_loop_test.cpp); one thread, so no races."""
    program, sources = tmp_path / "event_loop_test", engine_cases.SOURCES
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1"]
    files = [engine_cases.DRIVER.parent / "event_loop_test.cpp", sources / "event_loop.cpp"]
    command = [engine_cases.compiler(), "-std=c++20", *checks, "-I", sources, *files, "-o", program]
    run([*map(str, command)])
    assert run([str(program)], UBSAN_OPTIONS=UBSAN) == "300 plays ok\n"
