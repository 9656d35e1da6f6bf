#!/usr/bin/env bash
# mode=accept on a machine that has Python, torch, transformers and PEFT, but no network; and CMake, scikit-build-core,
# pybind11 and a C++20 compiler, unless BUILDER built the engine.
#
#   benchmarks/bare_machine.sh wheels FOLDER              with a network: gather what such a machine lacks
#   benchmarks/bare_machine.sh accept FOLDER OUT KEYS...  there, from the checkout: install, build, accept
#
# PYTHON=python3 is the interpreter there, PYTHON_VERSION=3.12 the one to gather wheels for. Ray comes without its Java
# jar, RLlib and dashboard pages, kt-kernel (for accept.against=kt) with its kernels for AMX: 48 MB in all. `accept`
# goes on with the acceptance that the call before left in accept/, so that pieces of some minutes add up; page and
# archive are copied to OUT. The first call installs and builds as well: give it a minute or two more than its
# accept.minutes. With BUILDER, an interpreter of PYTHON_VERSION that has CMake, Ninja, pybind11 and scikit-build-core,
# `wheels` builds the engine, too: no minutes go into that there, and no compiler is needed.
set -euo pipefail
cd "$(dirname "$0")/.."

# Of what the engine is built from.
engine_state() {
    cat CMakeLists.txt $(find kt_ray/native/src -type f | sort) | sha256sum
}

# build_engine PYTHON FOLDER: a wheel of kt_ray into FOLDER.
build_engine() {
    rm -f "$2"/kt_ray-*.whl
    CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) "$1" -m pip wheel -q --no-index --no-deps --no-build-isolation -w "$2" .
}

wheels() {
    local folder=${1:?usage: bare_machine.sh wheels FOLDER} scratch version=${PYTHON_VERSION:-3.12}
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' RETURN
    mkdir -p "$folder"
    local for_there=(--no-deps --only-binary=:all: --python-version "$version" --implementation cp
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
    pinned() { grep -iE "^($1)==" constraints.txt; }
    # Word splitting is meant: one requirement per word.
    # shellcheck disable=SC2046
    python3 -m pip download -q "${for_there[@]}" -d "$folder" \
        $(pinned 'hydra-core|omegaconf|jsonschema|jsonschema-specifications|referencing|rpds-py|attrs|gguf') \
        $(pinned 'msgpack|click|protobuf|requests|urllib3|idna|charset-normalizer|certifi')
    python3 -m pip wheel -q --no-deps -w "$folder" $(pinned antlr4-python3-runtime)
    python3 -m pip download -q "${for_there[@]}" --platform manylinux_2_35_x86_64 -d "$scratch" \
        $(pinned ray) "kt-kernel==$(sed -n 's/^VERSION = "\(.*\)"$/\1/p' benchmarks/kt_venv.py)"
    python3 - "$scratch" "$folder" <<'PY'
import re
import sys
import zipfile
from pathlib import Path

LEFT_OUT = {
    "ray": r"ray/(jars|rllib|dashboard/client)/",
    # The kernels for AMX alone: those that claims are about.
    "kt_kernel": r"(?!kt_kernel[/.-])|kt_kernel/_kt_kernel_ext_(?!amx)",
}
for source in Path(sys.argv[1]).glob("*.whl"):
    left_out = re.compile(LEFT_OUT[source.name.partition("-")[0]])
    with (
        zipfile.ZipFile(source) as whole,
        zipfile.ZipFile(Path(sys.argv[2]) / source.name, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as slim,
    ):
        for item in whole.infolist():
            if left_out.match(item.filename):
                continue
            data = whole.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                data = b"".join(line for line in data.splitlines(True) if not left_out.match(line.decode()))
            slim.writestr(item, data)
PY
    if [ -n "${BUILDER:-}" ]; then
        build_engine "$BUILDER" "$folder"
        engine_state >"$folder/engine.state"
    fi
    du -sh "$folder"
}

# Acceptances of this host, as mode=accept names them by its name, day and second: "node-2" is another host than "node".
acceptances() {
    local d='[0-9][0-9]'
    echo "accept/$(uname -n | tr -c 'A-Za-z0-9_.\n-' '-')-$d$d$d$d-$d$d$d"
}

bring_back() {
    local latest
    [ -z "$(jobs -p)" ] || kill -TERM $(jobs -p) 2>/dev/null || true
    wait
    # Word splitting is meant: a pattern.
    # shellcheck disable=SC2046
    latest=$(ls -td $(acceptances)/ 2>/dev/null | head -1)
    mkdir -p "$OUT"
    for file in page.md page.html report.tar.gz; do
        if [ -e "$latest/$file" ]; then cp "$latest/$file" "$OUT"; fi
    done
}

accept() {
    local folder=${1:?usage: bare_machine.sh accept FOLDER OUT KEYS...} out=${2:?usage: bare_machine.sh accept FOLDER OUT KEYS...}
    shift 2
    local python=${PYTHON:-python3} site=$PWD/build/bare_site built=build/bare_built state made resume=()
    if [ ! -e "$site/.installed" ]; then
        find "$folder" -name '*.whl' ! -name 'kt_*' -print0 |
            xargs -0 "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site"
        touch "$site/.installed"
    fi
    state=$(engine_state)
    if [ "$(cat "$built" 2>/dev/null)" != "$state" ] || ! ls kt_ray/native/_native*.so >/dev/null 2>&1; then
        made=$folder
        if [ "$(cat "$folder/engine.state" 2>/dev/null)" != "$state" ]; then
            made=build/bare_wheel
            build_engine "$python" "$made"
        fi
        rm -rf build/bare_engine
        "$python" -m zipfile -e "$made"/kt_ray-*.whl build/bare_engine
        cp build/bare_engine/kt_ray/native/_native*.so kt_ray/native/
        rm -rf build/bare_engine build/bare_wheel
        echo "$state" >"$built"
    fi
    export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH}
    if compgen -G "$(acceptances)/machine.json" >/dev/null; then resume=(accept.resume=latest); fi
    local code=0 kt
    kt=$(find "$(realpath "$folder")" -name 'kt_kernel*.whl' | head -1)
    if [ -n "$kt" ]; then set -- "accept.kt=$kt" "$@"; fi
    OUT=$out
    trap bring_back EXIT # also when the caller's clock ends this
    trap 'exit 143' TERM
    "$python" launch.py mode=accept accept.root=accept "${resume[@]}" "$@" &
    wait $! || code=$?
    return "$code"
}

case ${1:-} in
wheels | accept) "$@" ;;
*)
    sed -n '2,15s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
