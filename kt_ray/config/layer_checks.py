"""Checks of rule.layers, of which every entry may be a count, a range or a pattern."""

from __future__ import annotations

import re
from typing import Any

from kt_ray.config.key_errors import check_regex, fault
from kt_ray.config.schema import Config

DEVICE = re.compile(r"cpu|cuda:\d+")
_RANGE = re.compile(r"(\d+)-(\d+)")


def check_layers(config: Config) -> None:
    """rule.layers: counts, ranges or patterns, all entries of one style."""
    layers = config.rule.layers
    if layers is None:
        return
    styles = (
        "counts [31,30], ranges ['0-30','31-60'], ranges with devices [{layers: '0-60', device: 'cuda:0'}] "
        "or patterns [{match: REGEX, device: 'cuda:0'}]"
    )
    if not layers:
        raise fault("rule.layers", layers, "is empty", styles, "set rule.layers=null for a balanced split")
    if all(isinstance(entry, dict) for entry in layers):
        _patterns(config, layers)
        if all("match" in entry for entry in layers):
            return
        _ranges([str(entry["layers"]) for entry in layers])
    elif all(isinstance(entry, int) and not isinstance(entry, bool) for entry in layers):
        if min(layers) < 1:
            raise fault("rule.layers", layers, "has a stage without layers", "counts of at least 1")
    elif all(isinstance(entry, str) for entry in layers):
        _ranges(layers)
    else:
        raise fault("rule.layers", layers, "mixes styles or has entries of no style", styles)
    stages = config.rule.stages
    if isinstance(stages, int) and stages != len(layers):
        raise fault(
            "rule.layers",
            layers,
            f"has {len(layers)} entries for rule.stages={stages}",
            f"{stages} entries, one per stage",
            f"set rule.stages={len(layers)} or rule.layers=null",
        )


def _ranges(layers: list[str]) -> None:
    start = 0
    for entry in layers:
        match = _RANGE.fullmatch(entry.strip())
        if not match:
            raise fault("rule.layers", layers, f"has the entry '{entry}'", "ranges such as '0-15'")
        first, last = int(match[1]), int(match[2])
        if first != start or last < first:
            raise fault(
                "rule.layers",
                layers,
                f"has the range '{entry}' where layer {start} must begin a range",
                "ascending ranges from layer 0, both ends included, without gap or overlap",
                f"begin that range with {start}, or set rule.layers=null for a balanced split",
            )
        start = last + 1


def _patterns(config: Config, layers: list[dict[str, Any]]) -> None:
    for entry in layers:
        key = "layers" if "layers" in layers[0] else "match"
        if set(entry) != {key, "device"}:
            raise fault("rule.layers", entry, "is not a pattern", f"exactly the keys {key} and device")
        if key == "match":
            check_regex("rule.layers", entry["match"])
        devices = entry["device"] if isinstance(entry["device"], list) else [entry["device"]]
        if len(devices) != config.rule.replica_count and isinstance(entry["device"], list):
            raise fault(
                "rule.layers",
                devices,
                f"lists {len(devices)} devices for rule.replicas={config.rule.replica_count}",
                f"{config.rule.replica_count} devices, one per replica",
                f"set rule.replicas={len(devices)}, or name one device",
            )
        for device in devices:
            _layer_device(config, entry[key], device)


def _layer_device(config: Config, entry: object, device: object) -> None:
    if not isinstance(device, str) or not DEVICE.fullmatch(device):
        raise fault(
            "rule.layers",
            device,
            f"is not a device ({entry})",
            "cuda:0, cuda:1, … or cpu; or a list of one per replica",
            "write device: 'cuda:0'",
        )
    kind = device.partition(":")[0]
    if config.rule.device not in ("auto", kind):
        raise fault(
            "rule.layers",
            device,
            f"clashes with rule.device={config.rule.device}",
            f"devices of kind {config.rule.device}",
            f"set rule.device={kind} or rule.layers=null",
        )
