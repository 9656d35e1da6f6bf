"""merge and convert when they are stopped, and what memory they take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kt_ray.tools.merge import merge
from tests.helpers.tiny_moe import expert_modules, lora, per_expert, save, save_adapter


def test_a_killed_merge_goes_on(tmp_path: Path) -> None:
    base = save(tmp_path / "base", per_expert())
    path = save_adapter(tmp_path / "adapter", lora(expert_modules()))
    # Stopped by a signal in the middle of the third shard.
    code = (
        "import os, signal, sys\n"
        "from kt_ray.checkpoint import shard_writer\n"
        "from kt_ray.tools.merge import merge\n"
        "written = shard_writer._write_shard\n"
        "def one(out, name, *rest):\n"
        "    if name.startswith('model-00003'):\n"
        "        (out / f'.{name}.partial').write_bytes(b'half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "    written(out, name, *rest)\n"
        "shard_writer._write_shard = one\n"
        "merge(*sys.argv[1:4], shard_bytes=50_000)\n"
    )
    command = [sys.executable, "-c", code, str(base), str(path), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    shards = sorted((tmp_path / "out").glob("model-*"))
    times = {s.name: s.stat().st_mtime_ns for s in shards}
    assert len(shards) == 2 and not (tmp_path / "out" / "config.json").exists()
    time.sleep(0.01)
    merge(base, path, tmp_path / "out", shard_bytes=50_000)
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == at for name, at in times.items())
    merge(base, path, tmp_path / "whole", shard_bytes=50_000)
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("tool", ["merge", "convert"])
def test_memory_does_not_grow_with_the_model(tmp_path: Path, tool: str) -> None:
    """A base of 150 MB, 100 of them in one tensor: the process grows by much less (one thread)."""
    experts, hidden, inner = 48, 512, 1024
    prefix = "model.layers.0.mlp.experts"
    tensors = {
        f"{prefix}.gate_up_proj": torch.ones(experts, 2 * inner, hidden, dtype=torch.bfloat16),
        f"{prefix}.down_proj": torch.ones(experts, hidden, inner, dtype=torch.bfloat16),
    }
    config = {
        "num_experts": experts,
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "model_type": "qwen3_5_moe_text",
    }
    base = save(tmp_path / "base", tensors, config)
    modules = {f"{prefix}.{e}.down_proj": (hidden, inner) for e in range(experts)}
    path = save_adapter(tmp_path / "adapter", lora(modules))
    run = {
        "merge": "from kt_ray.tools.merge import merge; "
        f"run = lambda: merge({str(base)!r}, {str(path)!r}, out)",
        "convert": "from kt_ray.tools.convert import Options, convert; "
        f"run = lambda: convert({str(base)!r}, out, Options('int8'))",
    }[tool]
    code = (
        f"import torch; torch.set_num_threads(1); out = {str(tmp_path / 'out')!r}\n{run}\n"
        "def peak():\n"
        "    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "before = peak(); run(); print(peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 100_000  # KiB
