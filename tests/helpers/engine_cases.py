"""The C++ driver of the engine (tests/native/cpp/engine_driver.cpp): its cases by name, and its builds.

python -m tests.helpers.engine_cases      # writes tests/native/corpus anew
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kt_ray.disk import cache_root

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "kt_ray" / "native" / "src"
DRIVER = ROOT / "tests" / "native" / "cpp" / "engine_driver.cpp"
CORPUS = ROOT / "tests" / "native" / "corpus"

# As driver_case.h reads them: one byte each, in this order.
FIELDS = (
    *("gate", "up", "down", "activation", "biases", "hidden", "inter", "wide", "tokens", "slots", "experts"),
    *("adapters", "rank0", "rank1", "rank2", "routing", "dropout", "threads", "keep", "flags", "layout"),
    *("limit", "seed"),
)
VARIANTS = (
    *("f32", "bf16", "fp8-128x128", "fp8-128x128-ue8m0", "fp8-channel", "fp8-3x32", "mxfp4"),
    *("int8-channel", "int8-32", "int8-128", "int4-channel", "int4-32", "int4-128"),
    *("q8_0", "q4_0", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "nvfp4", "uint4-32", "uint4-128"),
)
SILU, GELU, OAI, RELU2 = range(4)
RANDOM, NOBODY, ONE, TWICE, SPARSE, UNEVEN = range(6)
RETAIN, RECOMPUTE, NOTHING = range(3)
X_BF16, IDS_32, CHECK_FINITE, FRESH_ENGINE, SOME_GRADS, NO_GRADS, LARGE_X, POISON = (1 << n for n in range(8))
TRANSPOSED, INTERLEAVED, PADDED, SHIFTED, DOWN_TOO = (1 << n for n in range(5))


def encode(gate: str = "bf16", **fields: int | str) -> bytes:
    """A case's bytes; `gate`, `up` and `down` are names of VARIANTS, the others numbers.

    By default: 11 tokens, 2 of 3 experts, one adapter of rank 5, sizes of one and a half units or more.
    """
    values = {"tokens": 11, "slots": 1, "experts": 3, "adapters": 1, "rank0": 4, "threads": 1, "seed": 7}
    numbers: dict[str, int] = {**values, "hidden": 44, "inter": 36, "gate": VARIANTS.index(gate)}
    for name, value in fields.items():
        numbers[name] = 1 + VARIANTS.index(value) if isinstance(value, str) else value
    assert set(numbers) <= set(FIELDS), set(numbers) - set(FIELDS)
    return bytes(numbers.get(name, 0) for name in FIELDS)


def corpus() -> dict[str, bytes]:
    """Every case of the corpus by its file's name."""
    cases: dict[str, bytes] = {}
    for n, variant in enumerate(VARIANTS):
        layout = PADDED | SHIFTED | DOWN_TOO if n % 2 else 0
        dropout = 150 if n % 3 == 0 else 0
        cases[f"format-{variant}"] = encode(
            variant, activation=n % 4, layout=layout, dropout=dropout, keep=n % 2, flags=n % 4, biases=n % 8
        )
    for name, activation in {"silu": SILU, "gelu_tanh": GELU, "swiglu_oai": OAI, "relu2": RELU2}.items():
        for limit in (0, 75):
            fields = {"activation": activation, "limit": limit, "biases": 7, "tokens": 29, "adapters": 2}
            cases[f"activation-{name}{'-limit' if limit else ''}"] = encode("f32", **fields, rank1=2)
    for name, layout in {
        "transposed": TRANSPOSED,
        "interleaved": INTERLEAVED,
        "both": TRANSPOSED | INTERLEAVED,
    }.items():
        cases[f"layout-{name}"] = encode("bf16", layout=layout | PADDED | DOWN_TOO, tokens=37)
        cases[f"layout-{name}-f32"] = encode("f32", layout=layout | DOWN_TOO, activation=RELU2)
    for name, fields in {
        "one-by-one": {"hidden": 0, "inter": 0, "tokens": 9},
        "odd": {"hidden": 36, "inter": 28, "tokens": 61, "slots": 2},
        "wide-hidden": {"hidden": 150, "inter": 2, "wide": 15, "tokens": 5},
        "wide-inter": {"hidden": 2, "inter": 150, "wide": 14, "tokens": 5},
        "many-rows": {"hidden": 6, "inter": 4, "tokens": 246, "experts": 2, "rank0": 1, "dropout": 140},
    }.items():
        for variant in ("f32", "bf16", "fp8-3x32"):
            cases[f"size-{name}-{variant}"] = encode(variant, **fields)
    for name, fields in {
        "no-tokens": {"tokens": 0},
        "one-token": {"tokens": 1, "slots": 3},
        "no-experts": {"experts": 0},
        "nobody": {"routing": NOBODY},
        "one-expert": {"routing": ONE, "tokens": 71},
        "twice": {"routing": TWICE, "slots": 3},
        "sparse": {"routing": SPARSE, "experts": 5, "tokens": 40},
        "uneven": {"routing": UNEVEN, "experts": 5, "tokens": 79, "slots": 3, "adapters": 3},
        "default-adapter": {"routing": 128},
    }.items():
        cases[f"routing-{name}"] = encode("int8-channel", **fields, dropout=140)
    for rank, byte in {1: 0, 16: 15, 17: 16, 33: 32, 256: 240}.items():
        cases[f"rank-{rank}"] = encode("fp8-128x128", rank0=byte, tokens=7)
    cases["adapters-3"] = encode("mxfp4", adapters=3, rank0=32, rank1=6, rank2=16, tokens=45, dropout=150)
    cases["adapters-some-grads"] = encode(adapters=3, flags=SOME_GRADS, tokens=33)
    cases["adapters-no-grads"] = encode(adapters=2, flags=NO_GRADS)
    cases["adapters-none"] = encode("q4_k", adapters=0)
    cases["dropout-nearly-all"] = encode("f32", dropout=254)
    cases["keep-nothing"] = encode(keep=NOTHING)
    for n, variant in enumerate(VARIANTS):  # by rows: whole steps, and a rest
        fields = {
            "hidden": 150 + 17 * n % 60,
            "inter": 130 + 13 * n % 60,
            "layout": (PADDED | SHIFTED) * (n % 2),
        }
        cases[f"rows-{variant}"] = encode(
            variant, **fields, keep=NOTHING, activation=n % 4, tokens=1 + n % 12, adapters=n % 3, biases=n % 8
        )
    cases["keep-recompute"] = encode("q8_0", keep=RECOMPUTE, dropout=190, adapters=2, tokens=30)
    cases["ids-32"] = encode(flags=IDS_32 | X_BF16)
    cases["large-x"] = encode("f32", flags=LARGE_X)
    cases["large-x-limit"] = encode("f32", flags=LARGE_X, activation=OAI, limit=75)
    cases["finite"] = encode("q6_k", flags=CHECK_FINITE, biases=7)
    cases["not-finite"] = encode(flags=CHECK_FINITE | POISON)
    cases["not-finite-unasked"] = encode("f32", flags=POISON)
    cases["mixed-k"] = encode("q4_k", up="q5_k", down="q6_k")
    cases["mixed-plain"] = encode("q4_0", up="q5_1", down="bf16")
    cases["mixed-f32"] = encode("bf16", up="f32", down="fp8-channel")
    cases["fresh"] = encode("int4-32", flags=FRESH_ENGINE, threads=2)
    return cases


ISAS = ("reference", "avx2", "avx512", "avx512_bf16", "amx")
PORTABLE = ("thread_pool", "engine", "finite", "routing", "buffers", "cpu_features")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"))
# As CMakeLists.txt has them; the last two of AVX-512 are for g++'s own intrinsics (its bug 105593).
_BF16 = ("-mavx512bf16", "-mavx512vbmi", "-mavx512vnni")
_QUIET = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "reference": (),
    "avx2": _AVX2,
    "avx512": (*_AVX512, *_QUIET),
    "avx512_bf16": (*_AVX512, *_BF16, *_QUIET),
    "amx": (*_AVX512, *_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8", *_QUIET),
}
_COMMON = ("-std=c++20", "-Wall", "-Wextra", "-ffp-contract=off", "-I", str(SOURCES))
_KERNELS = ("-fno-math-errno", "-fno-trapping-math")


def compiler() -> str | None:
    """The C++ compiler there is, if any."""
    return shutil.which("c++") or shutil.which("g++")


def build(folder: Path, isas: Sequence[str], sanitizers: Sequence[str], also: Sequence[str] = ()) -> Path:
    """Compiles the driver, the engine and these instruction sets' kernels under sanitizers.

    The driver itself runs without: it is test code, and five times as fast. Two compilers at a time. Objects
    are kept in kt_ray's cache by their command and a digest of all sources, and compiled once.

    Args:
        folder: for the program.
        isas: whose kernels are wanted, slowest first.
        sanitizers: flags for all.
        also: flags for all but the vector kernels, whose compilation they would double.
    """
    program = compiler()
    assert program is not None
    checks = [*sanitizers, "-O1", "-g1"]
    cache = object_cache()
    written = digest_of(program, SOURCES, DRIVER.parent)

    def compile_one(name: str) -> Path:
        if name == "driver":
            source, flags = DRIVER, ["-O2", "-g1"]
        elif name in ISA_FLAGS:
            more = also if name == "reference" else ()
            source, flags = SOURCES / "isa" / f"{name}.cpp", [*checks, *more, *_KERNELS, *ISA_FLAGS[name]]
        else:
            source, flags = SOURCES / f"{name}.cpp", [*checks, *also]
        command = [program, *_COMMON, *flags, "-c", str(source)]
        target = cache / f"{name}-{hashlib.sha256(' '.join([written, *command]).encode()).hexdigest()[:16]}.o"
        if not target.exists():
            partial = target.with_suffix(f".{os.getpid()}")
            run([*command, "-o", str(partial)])
            partial.rename(target)
        return target

    # The slowest first; the driver last, so that inline functions are linked from checked objects.
    with ThreadPoolExecutor(2) as pool:
        objects = [*pool.map(compile_one, [*reversed(isas), *PORTABLE, "driver"])]
    run([program, *sanitizers, *also, *map(str, objects), "-pthread", "-o", str(folder / "engine_driver")])
    return folder / "engine_driver"


def object_cache() -> Path:
    """The folder for what tests compile, without what is older than 30 days."""
    cache = cache_root() / "test_objects"
    cache.mkdir(parents=True, exist_ok=True)
    for old in cache.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process compiles, too
            if old.stat().st_mtime < time.time() - 30 * 24 * 3600:
                old.unlink()
    return cache


def digest_of(program: str, *roots: Path) -> str:
    """Of the compiler's version, and of every file that an object may be made of: those below `roots`."""
    digest = hashlib.sha256(run([program, "--version"]).encode())
    files = [p for root in roots for p in ([root] if root.is_file() else root.rglob("*")) if p.is_file()]
    for path in sorted(files):
        digest.update(f"{path} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def shipped_objects() -> list[Path]:
    """The kernels' and the engine's objects of the extension in use, or none if CMake's folder is gone.

    Only one after the last change of the sources counts.
    """
    newest = max(p.stat().st_mtime for p in SOURCES.rglob("*") if p.is_file())
    names = [f"isa/{isa}.cpp.o" for isa in ISAS] + [f"{name}.cpp.o" for name in PORTABLE]
    for folder in (
        [Path(os.environ["KT_RAY_BUILD"])] if "KT_RAY_BUILD" in os.environ else ROOT.glob("build/*")
    ):
        found = [p for name in names for p in (folder / "CMakeFiles").glob(f"*.dir/kt_ray/native/src/{name}")]
        if len(found) == len(names) and max(p.stat().st_mtime for p in found) >= newest:
            return found
    return []


def build_shipped(folder: Path, objects: Sequence[Path]) -> Path:
    """The driver with the very objects that ship."""
    program = compiler()
    assert program is not None
    target = folder / "engine_driver"
    run([program, *_COMMON, "-O2", str(DRIVER), *map(str, objects), "-pthread", "-o", str(target)])
    return target


def run(command: Sequence[str], **environment: str) -> str:
    """Both outputs of a process that must succeed."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {' '.join(command)}\n{done.stdout[-20000:]}"
    return done.stdout


if __name__ == "__main__":
    CORPUS.mkdir(exist_ok=True)
    for old in CORPUS.iterdir():
        old.unlink()
    for name, content in corpus().items():
        (CORPUS / name).write_bytes(content)
    print(f"{len(corpus())} cases")
