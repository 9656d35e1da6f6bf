"""What is installed: by make, in a wheel, in the container's file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kt_ray.native

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def output_of(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_demo_installs_what_a_user_needs_and_check_the_tools(tmp_path: Path) -> None:
    def dry(target: str) -> str:
        return output_of("make", "-n", target, f"VENV={tmp_path}/env", f"PYTHON={sys.executable}")

    demo, check = dry("demo"), dry("check")
    assert "-e ." in demo and "launch.py" in demo
    for word in ("[dev", "tools.txt", "deepspeed"):
        assert word not in demo
    assert "-e ." in check and f"-r {tmp_path}/env/tools.txt" in check
    # The line that names the tools, run as make would.
    script = re.search(r"-c '(import tomllib.*?)' >", check.replace("\\\n", ""), re.DOTALL)
    assert script is not None
    listed = output_of(sys.executable, "-c", script[1])
    extras = PROJECT["optional-dependencies"]
    assert listed.split("\n")[:-1] == [*extras["dev"], *extras["deepspeed"], *extras["tinker"]]


def test_the_engine_brings_its_own_c_library_along() -> None:
    """conda's libstdc++ is older than the compiler's: what the module needs of it is inside."""
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("there is no readelf")
    cache = next((ROOT / "build").glob("*/CMakeCache.txt"), None)
    if cache is not None and re.search(r"^KT_STATIC_LIBSTDCXX:INTERNAL=$", cache.read_text(), re.MULTILINE):
        pytest.skip("this host has no static libstdc++")
    module = next(Path(kt_ray.native.__file__).parent.glob("_native*.so"), None)
    if module is None:
        pytest.skip("the engine is elsewhere")
    if module.stat().st_mtime < (ROOT / "CMakeLists.txt").stat().st_mtime:
        pytest.skip("the engine was built before CMakeLists.txt was changed")
    dynamic = output_of(readelf, "-d", str(module))
    assert "libc.so" in dynamic and "libstdc++" not in dynamic and "libgcc_s" not in dynamic


def test_the_containers_file_copies_what_is_there() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for source in re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE):
        assert (ROOT / source).exists() and source not in ignored
    # What pip builds the wheel from.
    wanted = {
        "CMakeLists.txt",
        "pyproject.toml",
        "kt_ray",
        "conf",
        PROJECT["readme"],
        *PROJECT["license-files"],
    }
    assert not wanted & set(ignored)
    (entry,) = re.findall(r'^ENTRYPOINT \["(.*)"\]$', text, re.MULTILINE)
    assert entry in PROJECT["scripts"]
