"""Experts in another process: the same bytes, updates of the LoRA, and memory that is gone."""

from __future__ import annotations

import bisect
import mmap
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kt_ray.config.schema import LoraConfig, OptimConfig
from kt_ray.experts import LocalExperts, LocalExpertsSpec
from kt_ray.experts.lane_weights import expert_tensors
from kt_ray.experts.shared_experts import Adapter, ExportedExperts, OpenExperts
from kt_ray.native import ExpertFormula, ExpertLora, ExpertMatrix, ExpertWeights
from tests.helpers import gguf_files, tiny_moe
from tests.helpers.tiny_moe import E, H, I

Content = dict[
    tuple[Any, ...], Any
]  # where in the experts -> a value; tensors as (dtype, shape, strides, bytes)


def loaded(path: Path, *, backend: str = "auto", shared: bool = True, **changes: Any) -> LocalExperts:
    spec = LocalExpertsSpec(
        0, -1, (), 1, (0, 2), backend, "auto", "retain",
        model_dir=str(path), lora=LoraConfig(rank=4), optim=OptimConfig(), seed=0, shared=shared,
    )  # fmt: skip
    made = LocalExperts(replace(spec, **changes))
    made.load()
    return made


def content(
    weights: dict[int, tuple[tuple[int, ...], ExpertWeights]],
    adapters: dict[Adapter, dict[int, ExpertLora]],
) -> Content:
    """All that experts are, whatever process they are in."""
    found: Content = {}

    def add(place: tuple[Any, ...], held: ExpertWeights | ExpertMatrix | ExpertLora) -> None:
        for name in (field.name for field in fields(held)):
            value = getattr(held, name)
            if isinstance(value, ExpertMatrix):
                add((*place, name), value)
            elif isinstance(value, Tensor):
                dense = value.contiguous().view(-1).view(torch.uint8).tolist()
                found[*place, name] = str(value.dtype), tuple(value.shape), value.stride(), dense
            else:
                found[*place, name] = value

    for layer, (ids, own) in weights.items():
        found["ids", layer] = ids
        add(("weights", layer), own)
    for adapter, of in adapters.items():
        for layer, lora in of.items():
            add((adapter, layer), lora)
    return found


def own_content(made: LocalExperts) -> Content:
    weights = {layer: (made.order[layer], own) for layer, own in made.weights.items()}
    return content(
        weights, {True: made.lora.present} | {name: kept.lora for name, kept in made.lora.kept.items()}
    )


def _reader(pipe: Connection) -> None:
    """Another process: for each export what it holds, how many files were open before, and its pages."""
    opened: OpenExperts | None = None
    while True:
        sent = pipe.recv_bytes()
        if not sent:
            return
        before = opened
        try:
            opened = OpenExperts(pickle.loads(sent), None if before is None else before.files)
        except RuntimeError as error:
            pipe.send(str(error))
            continue
        untouched = opened.resident_bytes
        known = 0 if before is None else sum(o is before.files.get(f) for f, o in opened.files.items())
        del before
        found = content(opened.weights, opened.adapters)
        storages = {file.memory.untyped_storage().data_ptr() for file in opened.files.values()} | {
            tensor.untyped_storage().data_ptr()
            for lora in opened.adapters[True].values()
            for tensor in lora.tensors()
        }
        pipe.send((found, known, len(storages), untouched, opened.resident_bytes))


Ask = Callable[[ExportedExperts], Any]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_reader, args=(theirs,), daemon=True)
    process.start()

    def asked(exported: ExportedExperts) -> Any:
        ours.send_bytes(pickle.dumps(exported))
        assert ours.poll(60)
        return ours.recv()

    yield asked
    ours.send_bytes(b"")
    process.join(30)


def _gpt_oss(root: Path) -> LocalExperts:
    tensors = tiny_moe.fused(transposed=True, interleaved=True, biases=True)
    return _of(root, tensors, formulas=dict.fromkeys(range(2), ExpertFormula("swiglu_oai", 1.702, 7.0)))


def _gguf(root: Path) -> LocalExperts:
    sizes = {"gate": (E, 256, 512), "up": (E, 256, 512), "down": (E, 512, 256)}
    plain: dict[str, Tensor] = {}
    stacks: dict[str, Any] = {}
    for layer in range(2):
        for (part, shape), kind in zip(sizes.items(), ("Q4_K", "Q8_0", "F16"), strict=True):
            value = torch.randn(shape, generator=torch.Generator().manual_seed(layer))
            if kind == "F16":
                stacks[f"blk.{layer}.ffn_{part}_exps.weight"] = value.half()
            else:
                stacks[f"blk.{layer}.ffn_{part}_exps.weight"] = gguf_files.stack(kind, value)
            for e in range(E):
                name = f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight"
                plain[name] = torch.zeros(shape[1:], dtype=torch.bfloat16)
    path = tiny_moe.save(root / "m", plain, {"hidden_size": 512})
    file = gguf_files.write_gguf(root / "m.gguf", "qwen3moe", stacks)
    return loaded(path, backend="llamafile", experts_path=str(file))


def _of(root: Path, tensors: dict[str, Any], **how: Any) -> LocalExperts:
    return loaded(tiny_moe.save(root / "m", tensors), **how)


CASES: dict[str, Callable[[Path], LocalExperts]] = {
    "bf16": lambda root: _of(root, tiny_moe.per_expert()),
    "float32, biases": lambda root: _of(root, tiny_moe.per_expert(torch.float32, biases=True)),
    "fused": lambda root: _of(root, tiny_moe.fused()),
    "gpt-oss": _gpt_oss,
    "fp8 blocks": lambda root: _of(root, tiny_moe.encoded(tiny_moe.per_expert(), "fp8")),
    "mxfp4": lambda root: _of(root, tiny_moe.encoded(tiny_moe.per_expert(), "mxfp4")),
    "int4": lambda root: _of(root, tiny_moe.encoded(tiny_moe.per_expert(), "int4")),
    "requantised": lambda root: _of(root, tiny_moe.per_expert(), backend="AMXINT8"),
    "gguf": _gguf,
}


@pytest.mark.parametrize("case", CASES)
def test_another_process_has_the_same_bytes(tmp_path: Path, ask: Ask, case: str) -> None:
    made = CASES[case](tmp_path)
    exported = made.export()
    found, _, storages, untouched, resident = ask(exported)
    expected = own_content(made)
    assert found == expected and storages == 1
    kinds = {place[0] for place in expected}
    assert kinds == {"ids", "weights", True} and expected["ids", 1] == (0, 2)
    assert untouched == 0 and 0 < resident <= exported.files[0].size
    made.close()


@pytest.mark.parametrize("case", CASES)
def test_parts_are_whole_pages_that_no_layer_lies_across(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA copies from what was registered at once, and refuses a page that was registered before."""
    made = CASES[case](tmp_path)
    (whole,) = OpenExperts(made.export()).files.values()
    assert len(whole.parts) == 1
    monkeypatch.setattr("kt_ray.experts.shared_experts.PART", 1)
    opened = OpenExperts(made.export())
    (file,) = opened.files.values()
    first = file.memory.data_ptr()
    starts = [part.data_ptr() - first for part in file.parts]
    ends = [start + part.nbytes for start, part in zip(starts, file.parts, strict=True)]
    assert starts == [0, *ends[:-1]] and ends[-1] == file.memory.nbytes
    assert all(start % mmap.PAGESIZE == 0 for start in starts)
    found = []
    for _, weights in opened.weights.values():
        parts = set()
        for tensor in (t for e in range(weights.E) for t in expert_tensors(weights, e).values()):
            begin = tensor.data_ptr() - first
            parts.add(bisect.bisect(starts, begin) - 1)
            assert begin + tensor.nbytes <= ends[max(parts)]
        assert len(parts) == 1, "tensors that lie together are copied at once"
        found += parts
    assert len(set(found)) == len(opened.weights) > 1, "a part for each layer"
    again = OpenExperts(made.export(), opened.files)
    assert again.files == opened.files


def test_no_byte_differs_from_experts_that_are_not_shared(tmp_path: Path) -> None:
    path = tiny_moe.save(tmp_path / "m", tiny_moe.per_expert(biases=True))
    plain, shared = loaded(path, shared=False), loaded(path)
    assert own_content(plain) == own_content(shared)
    for made in (plain, shared):
        made.lora.keep("other", copy=True)
        made.begin_pass(0, True)
        x, weights = torch.randn(5, H, generator=torch.Generator().manual_seed(1)), torch.full((5, 2), 0.5)
        ids = made.local_ids(0, torch.tensor([[0, 2], [2, 1], [2, 0], [1, 2], [0, 1]]), E)
        y = made.forward(0, 0, [x], ids, weights, torch.arange(5), keep=True)
        made.backward(0, 0, [y.clone()])
        made.lora.apply_gradients(0.1, 1.0)
    assert own_content(plain) == own_content(shared)
    assert I == shared.weights[0].I


def test_updates_and_kept_adapters_are_seen(tmp_path: Path, ask: Ask) -> None:
    made = CASES["bf16"](tmp_path)
    initial, *_ = ask(made.export())
    for _, grad in made.lora.named("grad"):
        grad.fill_(0.25)
    made.lora.apply_gradients(0.5, 1.0)
    updated, known, *_ = ask(made.export())
    assert known == 1, "the file is not mapped again"
    assert updated == own_content(made) != initial
    made.lora.keep("first", copy=True)
    made.lora.restart()
    grown, known, storages, *_ = ask(made.export())
    assert known == 1 and storages == 2, "only the copy's file is mapped"
    assert grown == own_content(made)
    assert grown["first", 0, "up_b"] == updated[True, 0, "up_b"] != grown[True, 0, "up_b"]
    made.lora.keep("last", copy=False)
    last, known, *_ = ask(made.export())
    assert known == 2 and last["last", 1, "down_a"] == last[True, 1, "down_a"]
    made.lora.drop("first")
    dropped, known, *_ = ask(made.export())
    assert known == 2 and ("first", 0, "up_b") not in dropped, "the memory stays, for the next copy"
    made.lora.keep("next", copy=True)
    again, known, storages, *_ = ask(made.export())
    assert known == storages == 2 and again == own_content(made)
    assert again["next", 0, "up_b"] == again[True, 0, "up_b"]


def test_memory_that_is_gone(tmp_path: Path, ask: Ask) -> None:
    """Each fault in one message; what is open already stays readable."""
    made = CASES["bf16"](tmp_path)
    exported = made.export()
    (file,) = exported.files
    short = replace(exported, files=(replace(file, size=file.size + 4096),))
    assert ask(short).endswith(f"has {file.size} bytes, its export says {file.size + 4096}")
    other = replace(exported, files=(replace(file, inode=file.inode + 1),))
    stranger = f"{file.path} is no longer the memory of expert actor 0's weights"
    assert ask(other).startswith(f"{stranger}: it is /memfd:kt_ray-lent-experts-0-")
    opened, expected = OpenExperts(exported), own_content(made)
    made.close()
    del made
    closed = f"the memory of expert actor 0's weights, {file.path}, cannot be opened: "
    assert ask(exported).startswith((closed, stranger))  # another file may have the number by now
    with pytest.raises(RuntimeError, match="expert actor 0's weights"):
        OpenExperts(exported)
    assert opened.weights[0][1].layer == expected["weights", 0, "layer"]
