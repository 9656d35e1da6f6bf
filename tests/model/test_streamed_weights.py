"""Weights that pass through slots, on the stand-in: the same bits as weights that stay."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kt_ray.config.schema import LoraConfig
from kt_ray.model import known_outputs
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from kt_ray.model.streamed_weights import StreamedWeights, bring
from tests.helpers.hf_reference import build_checkpoint

CPU = torch.device("cpu")


class Layer(nn.Module):
    """Matrices of several types and shapes, small tensors, a trained one, a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.first = nn.Parameter(drawn(7, 5), requires_grad=False)
        self.second = nn.Parameter(drawn(5, 3, 2).bfloat16(), requires_grad=False)
        self.norm = nn.Parameter(drawn(5), requires_grad=False)
        self.lora = nn.Parameter(drawn(2, 5))
        self.register_buffer("table", drawn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first.T).sum() + self.second.sum() + self.lora.sum()


def made(count: int, slots: int) -> tuple[dict[int, nn.Module], StreamedWeights, list[dict[str, Tensor]]]:
    layers: dict[int, nn.Module] = {number: Layer(number) for number in range(count)}
    before = [{name: t.clone() for name, t in layer.state_dict().items()} for layer in layers.values()]
    return layers, attached(layers, StreamedWeights(range(count), slots, CPU)), before


def attached(layers: dict[int, nn.Module], weights: StreamedWeights) -> StreamedWeights:
    for index, layer in layers.items():
        weights.add(index, layer)
    weights.attach(layers)
    return weights


def test_matrices_pass_through_slots_and_the_rest_stays() -> None:
    layers, weights, before = made(5, 2)
    small = [(layer.norm, layer.lora, layer.table) for layer in layers.values()]
    places = [[t.data_ptr() for t in of_layer] for of_layer in small]
    own = {slot.data_ptr(): slot.numel() for slot in weights._memory}
    order = [0, 1, 2, 3, 4, 3, 2, 4, 0, 1]
    for number in order:
        assert torch.equal(layers[number](torch.ones(5)), Layer(number)(torch.ones(5)))
        for matrix in (layers[number].first, layers[number].second):
            assert isinstance(matrix, Tensor)
            assert any(at <= matrix.data_ptr() < at + size for at, size in own.items()), "is in a slot"
        for layer, state in zip(layers.values(), before, strict=True):  # in a slot or in host memory
            assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    assert [[t.data_ptr() for t in of_layer] for of_layer in small] == places
    # 7 x 5 x 4 and 5 x 3 x 2 x 2 bytes, each from a multiple of 256 on
    assert weights.host_bytes == 5 * 512 and weights.device_bytes == 2 * 512
    assert weights.copied_bytes % 512 == 0 and weights.copied_bytes >= 512 * len(set(order))


def test_what_is_held_is_not_overwritten() -> None:
    """Autograd keeps views of the slot's memory: without `hold` the gradient would be another layer's."""
    gradients = []
    for held in (True, False):
        layers, weights, _ = made(4, 3)
        x = torch.ones(5, requires_grad=True)
        if held:
            weights.slots.hold(2)
        out = layers[2](x)
        with torch.no_grad():
            for number in (0, 1, 3, 0):
                layers[number](torch.ones(5))
        out.backward()
        assert x.grad is not None
        gradients.append(x.grad)
    expected = Layer(2).first.sum(dim=0)
    assert torch.allclose(gradients[0], expected)
    assert not torch.allclose(gradients[1], expected), "this test would not notice"


def test_a_copy_of_a_layer_is_its_own() -> None:
    layers, weights, before = made(4, 2)
    bring(layers[3])
    copied = copy.deepcopy(layers[3])
    for number in (0, 1, 2):
        bring(layers[number])
    assert all(torch.equal(value, before[3][name]) for name, value in copied.state_dict().items())
    assert torch.equal(copied(torch.ones(5)), Layer(3)(torch.ones(5)))
    bring(nn.Linear(2, 2))  # not streamed: nothing happens
    assert weights.slots.slot_of(3) is not None


@pytest.mark.parametrize("lora", [LoraConfig(rank=2), LoraConfig(rank=2, dora=True, experts=False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stage_holds_less_and_says_what(tmp_path: Path, lora: LoraConfig, dtype: str) -> None:
    """Every layer's tensors, and what the probes find, are those of a stage whose layers stay."""
    path = build_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=6)
    common = {"lora": lora, "dtype": dtype, "padded": True}
    whole = Stage(StageSpec(str(path), (0, 6), 6, **common))  # type: ignore[arg-type]
    streamed = Stage(StageSpec(str(path), (0, 6), 6, **common, streamed=(0, 1, 3, 4, 5), slots=3))  # type: ignore[arg-type]
    assert streamed.scales == whole.scales and streamed.padding_moves == whole.padding_moves
    for index, layer in streamed.model.layers.items():
        bring(layer)
        expected = whole.model.layers[index].state_dict()
        observed = layer.state_dict()
        assert observed.keys() == expected.keys()
        assert all(torch.equal(observed[name], value) for name, value in expected.items())
    assert streamed.streamed is not None and whole.streamed is None
    largest = max(
        sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in whole.model.layers.values()
    )
    assert 0 < streamed.streamed.device_bytes < 3 * 1.1 * largest + 3 * 256 * 40
    assert streamed.streamed.host_bytes > streamed.streamed.device_bytes


def test_probes_find_weights_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that no slot has shows its host block: on a GPU a probe's numbers would be elsewhere."""
    path = build_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=6)
    places: list[int] = []

    def noted(probe: known_outputs._Probe, candidates: object) -> known_outputs.KnownOutputs:
        places.append(next(probe.layer.parameters()).untyped_storage().data_ptr())
        return known_outputs.KnownOutputs()

    monkeypatch.setattr(known_outputs._Probe, "known", noted)
    stage = Stage(StageSpec(str(path), (0, 6), 6, streamed=(0, 1, 2, 3, 4, 5), slots=3))
    assert stage.streamed is not None
    slots = {memory.untyped_storage().data_ptr() for memory in stage.streamed._memory}
    assert len(places) == 2 and set(places) <= slots  # a dense layer and one with experts


def test_pissa_takes_from_weights_in_host_memory(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "olmoe")
    lora = LoraConfig(rank=2, init="pissa", experts=False)
    whole = Stage(StageSpec(str(path), (0, 3), 3, lora=lora))
    streamed = Stage(StageSpec(str(path), (0, 3), 3, lora=lora, streamed=(0, 1, 2), slots=2))
    assert all(torch.equal(p, streamed.parameters[name]) for name, p in whole.parameters.items())
    for index, layer in whole.model.layers.items():
        bring(streamed.model.layers[index])
        observed = streamed.model.layers[index].state_dict()
        assert all(torch.equal(observed[name], value) for name, value in layer.state_dict().items())


def test_a_file_of_another_name_is_left_alone(tmp_path: Path) -> None:
    """In another container the driver's path may be a stranger's file."""
    stray = tmp_path / "log"
    stray.write_text("a line\n")
    layers: dict[int, nn.Module] = {number: Layer(number) for number in range(3)}
    weights = attached(layers, StreamedWeights(range(3), 2, CPU, (str(stray), "kt_ray-weights-0")))
    assert stray.read_text() == "a line\n"
    assert not weights.shared and weights.not_shared == f"{stray} is {stray}, another file"
    assert torch.equal(layers[2](torch.ones(5)), Layer(2)(torch.ones(5)))


def test_a_transposed_matrix_stays_one() -> None:
    """Products of transposed and of plain matrices may sum in another order."""
    layer = nn.Linear(6, 4, bias=False)
    layer.weight = nn.Parameter(torch.randn(6, 4).T, requires_grad=False)
    value = layer.weight.clone()
    weights = attached({0: layer}, StreamedWeights([0], 1, CPU))
    bring(layer)
    assert layer.weight.stride() == (1, 4) and torch.equal(layer.weight, value)
    assert weights.facts() == {"layers": 1, "host_bytes": 256, "device_bytes": 256, "copied_bytes": 256}
