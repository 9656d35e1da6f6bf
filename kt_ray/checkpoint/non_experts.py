"""Load everything but the routed experts into a Hugging Face model that was built on meta.

The mapping from checkpoint keys to module names is transformers' own
(`get_model_conversion_mapping`: renamings such as Mixtral's ".block_sparse_moe." -> ".mlp.", and
converters that split or join tensors), so that a family loads here as it does there. So are the
parameters that stay in float32 whatever the dtype (`e_score_correction_bias`).

Quantised weights are dequantised one at a time, on their device, or stay quantised as `QuantizedLinear`.
Tables of n-grams stay in their files (`MappedTable`).
Keys of a multimodal checkpoint outside its language model are skipped and reported.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from kt_ray.checkpoint.expert_layout import ExpertLayout
from kt_ray.checkpoint.index import CheckpointIndex, some
from kt_ray.checkpoint.key_map import LoadReport, map_keys, tensors_made
from kt_ray.checkpoint.mapped_table import MappedTable, check_parts, in_order, is_mapped_table
from kt_ray.checkpoint.names import expert_name, is_other_modality, layer_of, layers_key
from kt_ray.checkpoint.quantized_linear import QuantizedLinear, dequantized
from kt_ray.checkpoint.safetensors_file import TensorInfo, damaged

if TYPE_CHECKING:  # expert actors import this package and need no transformers
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

_FLOATING = {"F32", "BF16", "F16", "F64"}
# Buffers that config.json determines: Qwen4-Exp's numbers of n-grams, which a release need not store.
_DETERMINED = re.compile(r"\.ple_embedding\.(layer_multipliers|ngram_heads_(vocab_sizes|offsets))$")
_PLAIN = _FLOATING | {"I64", "I32", "I16", "I8", "U8", "BOOL"}


def load_non_experts(
    index: CheckpointIndex,
    module: PreTrainedModel,
    *,
    layers: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device | str,
    need_embedding: bool = True,
    need_head: bool = True,
    keep_quantized: bool = False,
    on_host: Container[int | None] = (),
    embedding_on_host: bool = False,
    ready: Callable[[int], None] = lambda layer: None,
) -> LoadReport:
    """Fill the parameters and persistent buffers of some layers, frozen, on `device`.

    Args:
        module: a `...ForCausalLM` built under `torch.device("meta")`; routed-expert parameters, where
            they are still there, are left as they are.
        layers: [start, stop) of the decoder layers to fill.
        dtype: type of floating-point tensors, except those that transformers keeps in float32.
        need_embedding: also fill the input embedding.
        need_head: also fill what comes after the layers: the final norm and lm_head. Buffers outside the
            layers are filled anyway.
        keep_quantized: linear modules whose weight is stored quantised become `QuantizedLinear`.
        on_host: layers whose tensors stay on the CPU. embedding_on_host: so does the input embedding.
        ready: called with each of those as soon as it is filled, in their order.

    Raises:
        UserError: missing keys (sorted), wrong shapes.
    """

    embedding = module.get_input_embeddings()
    prefix = next(f"{name}." for name, part in module.named_modules() if part is embedding)

    def place(name: str) -> torch.device | str:
        away = layer_of(name) in on_host or (embedding_on_host and name.startswith(prefix))
        return "cpu" if away else device

    targets, tied, sources = _targets(module, layers, need_embedding, need_head)
    mapping, report = map_keys(index, module, ExpertLayout.detect(index), sources, layers)

    # Modules in the place of the model's own.
    kept: dict[str, torch.nn.Module] = {}
    plan = _dtype_plan(module, dtype)
    # A model built in `dtype` says by its own tensors which ones the family keeps in another type.
    built = {n: t.dtype for n, t in module.state_dict().items()} if module.dtype == dtype else {}
    placed = {  # which no checkpoint needs to store
        name: torch.empty(tensor.shape, dtype=built.get(name, dtype), device=place(name))
        for name, tensor in targets.items()
        if not tensor.numel()
    }

    absent = [name for name in targets if _DETERMINED.search(name) and name not in mapping]
    placed |= {name: value.to(place(name)) for name, value in _determined(module, absent).items()}

    def fill(names: list[str]) -> None:
        parameters: dict[int, torch.nn.Parameter] = {}  # of values that names share
        _check_complete(index, names, {*placed, *kept})
        for name in names:
            if name in kept:
                _replace(module, name, kept.pop(name))
        for name, value in [(name, placed.pop(name)) for name in names if name in placed]:
            _assign(index, module, name, value, parameters)

    def of_layer(target: str) -> int:
        layer = layer_of(target)
        return -1 if layer is None else layer

    filled: set[str] = set()
    shared = set(tied) | set(tied.values())
    for layer, of_one in groupby(sorted(mapping, key=of_layer), key=of_layer):
        for target in of_one:
            transform, keys = mapping[target]
            if is_mapped_table(target):
                shape = tuple(targets[target].shape)
                kept[target] = MappedTable(_parts(index, keys), shape, dtype, place(target))
                continue
            if keep_quantized and transform is None and _keepable(module, target, shared):
                stored = index.matrices.get(keys[-1][0])
                if stored is not None:
                    _check_shape(index, target, stored.shape, targets[target].shape)
                    kept[target] = QuantizedLinear(stored.read(), dtype, place(target))
                    continue
            for name, value in _realise(index, module, target, transform, keys, device).items():
                if name in sources:
                    placed[name] = _cast(name, value, built.get(name, dtype), plan).to(place(name))
        if layer in on_host:
            own = [name for name in targets if layer_of(name) == layer]
            fill(own)
            filled |= {*own}
            ready(layer)
    for name in targets:
        if name not in placed and name in tied and tied[name] in placed:
            placed[name] = placed[tied[name]]
    fill([name for name in targets if name not in filled])
    return report


def check_non_experts(
    index: CheckpointIndex, module: PreTrainedModel, *, layout: ExpertLayout | None = None
) -> LoadReport:
    """What `load_non_experts` of the whole model would refuse, found in the headers alone.

    Args:
        module: a `...ForCausalLM` built under `torch.device("meta")`.
        layout: the routed experts, which are passed over; None = detected here.

    Raises:
        UserError: missing keys, keys that the model has no place for, wrong shapes (of tensors that are
            loaded as they are); biases of the experts in the checkpoint alone, or in the model alone.
    """
    layout = layout or ExpertLayout.detect(index)
    _check_biases(index, module, layout)
    _check_layer_count(index)
    everything = (0, sys.maxsize)
    targets, tied, sources = _targets(module, everything, True, True)
    present: set[str] = set()
    mapping, report = map_keys(index, module, layout, sources, everything)
    for target, (converter, keys) in mapping.items():
        _check_formats(index, keys)
        made = tensors_made(target, converter)
        present |= made
        if any(name in targets and targets[name].is_floating_point() for name in made):
            # Without scales they would be taken for the weights' values.
            _check_formats(index, keys, _FLOATING, "stored as integers without scales")
        if is_mapped_table(target):
            check_parts(_parts(index, keys), tuple(targets[target].shape))
        elif converter is None and target in targets:
            _check_shape(index, target, index.shape(keys[-1][0]), targets[target].shape)
    present |= {name for name, tensor in targets.items() if not tensor.numel() or _DETERMINED.search(name)}
    _check_complete(index, targets, {n for n in targets if n in present or tied.get(n) in present})
    if report.unexpected:
        raise damaged(
            "checkpoint holds weights that the model has no place for",
            index.first(report.unexpected[0]).file,
            f"unexpected: {some(report.unexpected)}",
            f"the tensors of {type(module).__name__} as config.json describes it",
        )
    return report


def _check_biases(index: CheckpointIndex, module: PreTrainedModel, layout: ExpertLayout) -> None:
    """Experts have biases in model and checkpoint, or in neither: an absent set would just not be added."""
    parameters = [name for name in module.state_dict() if expert_name(name)]
    biases = [name for name in parameters if name.endswith("_bias")]
    if parameters and bool(biases) != layout.biased:
        what = "checkpoint holds biases of the experts that the model has no place for"
        observed = some([names[0] for parts in layout.biases.values() for names in parts.values()])
        if biases:
            what = "checkpoint lacks the biases of the experts"
            observed = f"{type(module).__name__} has {some(biases, 2)}"
        raise damaged(what, index.path, observed, "biases in both or in neither")


def _check_complete(index: CheckpointIndex, targets: Collection[str], present: Collection[str]) -> None:
    missing = sorted(set(targets) - set(present))
    if missing:
        required = f"{len(targets)} tensors outside the routed experts"
        raise damaged(
            "checkpoint lacks weights of the model", index.path, f"missing: {some(missing)}", required
        )


def _check_formats(
    index: CheckpointIndex,
    keys: Iterable[tuple[str, str]],
    allowed: Collection[str] = _PLAIN,
    fault: str = "in a format that is not supported",
) -> None:
    for key, _ in keys:
        if key not in index.matrices and index.tensors[key].dtype not in allowed:
            raise damaged(
                f"weights outside the experts are {fault}",
                index.tensors[key].place,
                index.tensors[key].dtype,
                "BF16, F16, F32, or a quantised format with its scales",
                "use a bfloat16 or float32 checkpoint of this model",
            )


# Parts of a layer of multi-token prediction that no other layer has.
_MTP_PARTS = ("eh_proj", "enorm", "hnorm", "shared_head", "mtp", "nextn")
_MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_hidden_layers")


def _check_layer_count(index: CheckpointIndex) -> None:
    """Refuse a config.json that cuts decoder layers off; layers of multi-token prediction may lie beyond."""
    count = index.layer_count
    if count is None:
        return
    beyond: dict[int, list[str]] = {}
    for name in index.names:
        layer = layer_of(name)
        if layer is not None and layer >= count and not is_other_modality(name):
            beyond.setdefault(layer, []).append(name)
    own = [n for n, names in beyond.items() if not any(part in key for key in names for part in _MTP_PARTS)]
    own = [n for n in own if any(f"layers.{count - 1}." in key for key in _alike(index, beyond[n], n, count))]
    stated = max([0, *(v for key in _MTP_LAYERS if isinstance(v := index.text_config.get(key), int))])
    if len(own) > stated:
        raise damaged(
            "config.json has fewer layers than the checkpoint",
            index.path / "config.json",
            f"{count} layers by {layers_key(index.text_config)}, and weights of layers up to {max(own)}",
            f"{1 + max(own)} layers",
            "take config.json from the model's release",
        )


def _alike(index: CheckpointIndex, names: list[str], layer: int, count: int) -> list[str]:
    """The last counted layer's tensors that correspond to those of a layer beyond."""
    renamed = (name.replace(f"layers.{layer}.", f"layers.{count - 1}.", 1) for name in names)
    return [name for name in renamed if name in index.names]


def _check_shape(index: CheckpointIndex, name: str, observed: Sequence[int], required: Sequence[int]) -> None:
    if tuple(observed) != tuple(required):
        where = f"{index.path}, {name}"
        raise damaged("checkpoint and model disagree about a shape", where, list(observed), list(required))


def _targets(
    module: PreTrainedModel, layers: tuple[int, int], need_embedding: bool, need_head: bool
) -> tuple[dict[str, torch.Tensor], dict[str, str], set[str]]:
    """The module's tensors to fill; tied name -> its source; and names that the checkpoint stores them by."""
    tied: dict[str, str] = dict(getattr(module, "all_tied_weights_keys", None) or {})
    embedding = module.get_input_embeddings()
    in_embedding = {id(tensor) for tensor in (*embedding.parameters(), *embedding.buffers())}
    names: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        layer = layer_of(name)
        if expert_name(name):
            continue
        if layer is not None:
            take = layers[0] <= layer < layers[1]
        elif id(tensor) in in_embedding and name not in tied:
            take = need_embedding
        else:  # buffers, as those of rotary tables, are used on every stage
            take = need_head or not isinstance(tensor, torch.nn.Parameter)
        if take:
            names[name] = tensor
    # A tied tensor is stored once, under its source's name.
    return names, tied, set(names) | {tied[name] for name in names if name in tied}


@torch.no_grad()
def _determined(module: PreTrainedModel, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Buffers as `from_pretrained` makes those that a checkpoint lacks."""
    values = {}
    for path, of_one in groupby(sorted(names), key=lambda name: name.rpartition(".")[0]):
        owner = module.get_submodule(path)
        for name in of_one:
            leaf = name.rpartition(".")[2]
            values[name] = owner._buffers[leaf] = torch.empty_like(getattr(owner, leaf), device="cpu")
        module._init_weights(owner)
    return values


def _parts(index: CheckpointIndex, keys: list[tuple[str, str]]) -> list[TensorInfo]:
    """Of a table that is looked up in its files."""
    return in_order(index.first(key) for key, _ in keys)


def _realise(
    index: CheckpointIndex,
    module: PreTrainedModel,
    target: str,
    converter: WeightConverter | None,
    keys: list[tuple[str, str]],
    device: torch.device | str,
) -> dict[str, torch.Tensor]:
    _check_formats(index, keys)
    if converter is None:
        return {target: _value(index, keys[-1][0], device)}
    transform = copy.deepcopy(converter)
    for key, pattern in keys:
        # transformers collects futures or tensors here; its annotation names the first only.
        transform.add_tensor(target, key, pattern, _value(index, key, device))  # type: ignore[arg-type]
    values = transform.convert(target, model=module, config=module.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}


def _value(index: CheckpointIndex, key: str, device: torch.device | str) -> torch.Tensor:
    """A plain tensor as stored, on the CPU; a quantised one in float32, on the device."""
    stored = index.matrices.get(key)
    if stored is None:
        return index.read(key)
    return dequantized(stored.read(), device).reshape(stored.shape)


def _keepable(module: PreTrainedModel, name: str, tied: set[str]) -> bool:
    """Whether a parameter is the weight of a plain linear module that nothing else shares."""
    path, _, leaf = name.rpartition(".")
    return leaf == "weight" and name not in tied and type(module.get_submodule(path)) is torch.nn.Linear


def _replace(module: PreTrainedModel, name: str, other: torch.nn.Module) -> None:
    path = name.rpartition(".")[0]
    parent, _, leaf = path.rpartition(".")
    if isinstance(other, QuantizedLinear):
        bias = module.get_submodule(path)._parameters.get("bias")  # still empty: loaded like any other
        other.register_parameter("bias", bias)
    setattr(module.get_submodule(parent), leaf, other)


def _dtype_plan(module: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    from transformers.core_model_loading import build_glob_alternation

    kept = module._get_dtype_plan(dtype)
    return build_glob_alternation(list(kept))[0] if kept else None


def _cast(name: str, value: torch.Tensor, dtype: torch.dtype, kept: re.Pattern[str] | None) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    return value.to(torch.float32 if kept is not None and kept.search(name) else dtype)


def _assign(
    index: CheckpointIndex,
    module: PreTrainedModel,
    name: str,
    value: torch.Tensor,
    parameters: dict[int, torch.nn.Parameter],
) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    empty = getattr(owner, leaf)
    _check_shape(index, name, value.shape, empty.shape)
    if leaf in owner._parameters:
        parameter = parameters.setdefault(id(value), torch.nn.Parameter(value, requires_grad=False))
        owner._parameters[leaf] = parameter
    else:
        owner._buffers[leaf] = value


def materialize_buffers(module: PreTrainedModel, device: torch.device | str) -> list[str]:
    """Give buffers that no checkpoint holds (rotary tables, ...) their values on `device`.

    Meta buffers that are not persistent are allocated and computed by the family's own
    `_init_weights`, as `from_pretrained` does. Whatever else these modules hold, parameters and stored
    buffers, is left alone. Returns the names of the buffers, sorted.

    Raises:
        ValueError: a buffer's module also holds parameters still on meta (load them first).
    """
    owners: dict[str, torch.nn.Module] = {}
    done: list[str] = []
    for path, owner in module.named_modules():
        names = [n for n in owner._non_persistent_buffers_set if owner._buffers.get(n) is not None]
        for name in names:
            buffer = owner._buffers[name]
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.empty_like(buffer, device=device)
                owners[path] = owner
                done.append(f"{path}.{name}" if path else name)
    with torch.no_grad():
        for path, owner in owners.items():
            if any(p.is_meta for p in owner.parameters(recurse=False)):
                raise ValueError(f"{path}: load its parameters before its buffers")
            stored = (t for n, t in owner.named_buffers(recurse=False) if n in owner.state_dict())
            loaded = [*owner.parameters(recurse=False), *(t for t in stored if not t.is_meta)]
            saved = [(tensor, tensor.detach().clone()) for tensor in loaded]
            module._init_weights(owner)
            for tensor, value in saved:
                tensor.copy_(value)
    return sorted(done)
