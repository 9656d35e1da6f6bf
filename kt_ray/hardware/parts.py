"""CPUs and GPUs by name, with the figures of their data sheets, and names of whole hosts made of them.

`2x4090_2x9654_1024gb` is a host of two RTX 4090, two EPYC 9654 and 1,024 GiB over both sockets. A hardware
file may name a part as well (`cpu: EPYC 9654`, `name: RTX 4090`) and leave out what is said here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kt_ray.errors import UserError
from kt_ray.hardware.rates import Figure

CUDA_GIVES = 0.985  # of a card's memory as sold: the driver and the firmware keep the rest


@dataclass(frozen=True)
class Cpu:
    """One socket. cores: those that compute experts; isa: the best; figures: as a hardware file's rates."""

    name: str
    cores: int
    isa: str
    figures: Mapping[str, Figure] = field(default_factory=dict)


class Reached(NamedTuple):
    """Part of a card's bf16 FLOP/s that large matrix products and flash attention reach, and who says so."""

    gemm: float
    flash: float
    flash_backward: float
    gemm_source: str
    flash_source: str


_TORCH_SQUARES = (
    "torch's bf16 products of squares of 4,096 to 10,240 (zzc0721/torch-performance-test-data issues"
)
_FLASH = (
    "part of the peak for pairs that are seen. Published of FlashAttention-2: 0.73 and 0.63 on an RTX A5000 "
    "(width 64, 2,048 positions: gpu-mode/ring-attention issue 10), 0.5 to 0.73 on an A100 (arXiv 2307.08691)"
)
DATA_CENTRE = Reached(
    0.7,
    0.55,
    0.45,
    f"published 0.68 to 0.75 on an A100, 0.73 to 0.81 on an H100: {_TORCH_SQUARES} 108, 79)",
    f"assumed: {_FLASH}",
)
# Cards whose tensor cores add in float32 at half their rate (GeForce, and L20 and L40 of the same chip).
GEFORCE = Reached(
    0.85,
    0.65,
    0.5,
    "published 0.92 to 0.97 on an RTX 4090, 0.86 to 1.15 on three RTX 5090 and 0.64 to 0.85 on a fourth, "
    f"1.03 to 1.09 on an RTX 3080, 0.9 to 0.95 on an L20: {_TORCH_SQUARES} 78, 96, 124, 15, 200, 114, 107)",
    f"assumed: {_FLASH}",
)


class GpuSheet(NamedTuple):
    """A card: GiB that CUDA gives, dense bf16 FLOP/s with float32 sums, bytes/s of memory and of PCIe, and
    dense FP8 FLOP/s with float32 sums; 0 = it has no FP8 products. `reached`: parts of those bf16 FLOP/s."""

    gib: float
    flops: float
    memory: float
    pcie: float
    float8: float = 0.0
    reached: Reached = DATA_CENTRE


def _cpu(
    name: str,
    cores: int,
    isa: str,
    clock: float,
    why: str,
    channels: int,
    modules: str,
    more: Mapping[str, Figure] | None = None,
) -> Cpu:
    """clock in GHz; modules: "DDR5-4800", with a remark in brackets where the data sheet has another."""
    rate = channels * int(modules.split("-")[1].split()[0]) * 8e6  # 8 bytes per transfer and channel
    sheet = f"data sheet: {channels} channels {modules} are {rate / 1e9:g} GB/s; assumed: 80 % of it"
    dram = Figure(round(0.8 * rate / 1e9) * 1e9, sheet)
    return Cpu(name, cores, isa, {"clock": Figure(clock * 1e9, why), "dram": dram, **(more or {})})


def _base(clock: float, boost: float) -> str:
    return f"data sheet: base {clock:g} GHz, boost {boost:g}"


_UNDER_AMX = "assumed: sustained under AMX on all cores (docs/kernels.md)"
_TWO_FMA = "two 512-bit FMA per cycle"
_FASTER = "assumed: below Zen4's, since products are twice as fast beside the same decoding"
_ZEN5 = {
    "avx512_bf16_bf16_per_cycle": Figure(128, "Zen 5: two 512-bit vdpbf16ps per cycle"),
    "avx512_f32_per_cycle": Figure(64, f"Zen 5: {_TWO_FMA}"),
    "avx512_bf16_f32_per_cycle": Figure(64, f"Zen 5: {_TWO_FMA}"),
    "avx512_bf16_forward": Figure(0.7, _FASTER),
    "avx512_bf16_backward": Figure(0.62, _FASTER),
}
_ICE_LAKE = {
    "avx512_f32_per_cycle": Figure(64, f"data sheet: {_TWO_FMA}"),
    "avx512_forward": Figure(0.64, _FASTER),
    "avx512_backward": Figure(0.55, _FASTER),
}
_FOUR = "DDR5-3600 (what four modules run at)"

# What a user writes -> the CPU. How much of the peak the engine reaches is nominal.py's, by instruction set.
CPUS: dict[str, Cpu] = {
    "5950x": _cpu("Ryzen 9 5950X", 16, "avx2", 3.4, _base(3.4, 4.9), 2, "DDR4-3200"),
    "7950x": _cpu("Ryzen 9 7950X", 16, "avx512_bf16", 4.5, _base(4.5, 5.7), 2, _FOUR),
    "9950x": _cpu("Ryzen 9 9950X", 16, "avx512_bf16", 4.3, _base(4.3, 5.7), 2, _FOUR, _ZEN5),
    "13900k": _cpu("Core i9-13900K", 8, "avx2", 3.0, f"{_base(3.0, 5.8)}; P-cores only", 2, _FOUR),
    "7742": _cpu("EPYC 7742", 64, "avx2", 2.25, _base(2.25, 3.4), 8, "DDR4-3200"),
    "7763": _cpu("EPYC 7763", 64, "avx2", 2.45, _base(2.45, 3.5), 8, "DDR4-3200"),
    "9354": _cpu("EPYC 9354", 32, "avx512_bf16", 3.25, _base(3.25, 3.8), 12, "DDR5-4800"),
    "9654": _cpu("EPYC 9654", 96, "avx512_bf16", 2.4, _base(2.4, 3.7), 12, "DDR5-4800"),
    "9355": _cpu(
        "EPYC 9355", 32, "avx512_bf16", 3.5, "data sheet: base 3.55 GHz, all cores", 12, "DDR5-6000", _ZEN5
    ),
    "6348": _cpu(
        *("Xeon Gold 6348", 28, "avx512", 2.2, "data sheet: base 2.6 GHz; assumed: 2.2 under AVX-512", 8),
        "DDR4-3200",
        _ICE_LAKE,
    ),
    "8480": _cpu("Xeon Platinum 8480+", 56, "amx", 2.0, _UNDER_AMX, 8, "DDR5-4800"),
    "8488c": _cpu("Xeon Platinum 8488C", 48, "amx", 2.0, _UNDER_AMX, 8, "DDR5-4800"),
}

ASSUMED = DATA_CENTRE._replace(gemm_source="assumed: part of the peak that large matrix products reach")

# A part of the card's name -> its data sheet; the first that fits counts. For a space there may be a hyphen.
GPUS: dict[str, GpuSheet] = {
    "4090 D": GpuSheet(23.6, 147.1e12, 1008e9, 25e9, 294.2e12, GEFORCE),
    # 2,375 of the 5090's 3,352 "AI TOPS".
    "5090 D": GpuSheet(31.3, 148.4e12, 1792e9, 50e9, 296.9e12, GEFORCE),
    "4090": GpuSheet(23.6, 165.2e12, 1008e9, 25e9, 330.3e12, GEFORCE),
    "5090": GpuSheet(31.3, 209.5e12, 1792e9, 50e9, 419e12, GEFORCE),
    "3090": GpuSheet(23.7, 71e12, 936e9, 25e9, reached=GEFORCE),
    "A100 80GB": GpuSheet(79.2, 312e12, 1935e9, 25e9),
    "A100": GpuSheet(39.4, 312e12, 1555e9, 25e9),
    "H100 PCIe": GpuSheet(79.1, 756e12, 2000e9, 50e9, 1513e12),
    "H100 NVL": GpuSheet(92.6, 835e12, 3900e9, 50e9, 1671e12),
    "H100": GpuSheet(79.1, 989e12, 3350e9, 50e9, 1979e12),
    "H200 NVL": GpuSheet(139.8, 835e12, 4800e9, 50e9, 1671e12),
    "H200": GpuSheet(139.8, 989e12, 4800e9, 50e9, 1979e12),
    "L40S": GpuSheet(44.4, 362e12, 864e9, 25e9, 733e12, ASSUMED),
    "L40": GpuSheet(44.4, 181e12, 864e9, 25e9, 362e12, GEFORCE),
}

_HOST = re.compile(
    r"(?:(?P<gpus>\d+)x(?P<gpu>[a-z0-9]+(?:-d|-pcie|-nvl)?)(?:-(?P<gib>\d+)gb)?_)?"
    r"(?:(?P<sockets>\d+)x)?(?P<cpu>[a-z0-9]+)_(?P<memory>\d+)gb",
    re.IGNORECASE,
)


def cpu_named(name: str) -> Cpu | None:
    """The CPU that a text names ("EPYC 9654", "Intel(R) Xeon(R) Platinum 8480+"); None = not in the table."""
    other = r"[0-9]|H\b"  # a Xeon 6348H has other cores than a 6348
    return next(
        (cpu for key, cpu in CPUS.items() if re.search(rf"(?<!\w){key}(?!{other})", name, re.I)), None
    )


def gpu_named(name: str) -> GpuSheet | None:
    """The data sheet of the card that a text names; None = not in the table."""
    return next((sheet for key, sheet in GPUS.items() if _has_model(name, key)), None)


def given_gib(name: str) -> float | None:
    """GiB that CUDA gives of the card that a text names: its data sheet's, or as many as the text says where
    that is another size ("RTX 4090 48 GB"); None = not in the table."""
    sheet = gpu_named(name)
    sold = re.search(r"(?<![0-9.])(\d+) ?GB\b", name, re.IGNORECASE)
    if sheet is None or sold is None:
        return None if sheet is None else sheet.gib
    given = int(sold[1]) * CUDA_GIVES
    return given if abs(given - sheet.gib) > 0.1 * sheet.gib else sheet.gib


def _has_model(name: str, key: str) -> bool:
    """Whether `key` stands in `name` as a whole model: 4090 does in "RTX4090", A100 does not in "RTX A1000",
    nor H200 in "GH200", nor 4090 in "RTX 4090 Laptop GPU" or, as that is sold too, "RTX 4090 D"."""
    before = "0-9" if key[0].isdigit() else "0-9a-z"
    model = key.replace(" ", r"(?:-SXM4)?[ -]?").replace("GB", " ?GB")
    other = r"[0-9]|[ -]?(?:S|Ti|Super|D|Laptop|Mobile|Max-Q)\b"
    return re.search(rf"(?<![{before}]){model}(?!{other})", name, re.IGNORECASE) is not None


def named_host(name: str) -> dict[str, Any]:
    """The content of a hardware file for a host named by its parts.

    Raises:
        UserError: the name is not made like one, or a part is not in the tables.
    """
    found = _HOST.fullmatch(name)
    cpu = cpu_named(found["cpu"]) if found else None
    if not found or cpu is None or (found["gpu"] and gpu_named(found["gpu"]) is None):
        gpus = ", ".join(key.replace(" ", "-").lower() for key in GPUS)
        raise UserError(
            "plan.hardware names no host",
            where="plan.hardware",
            observed=name,
            required="a file, wizard, or GPUs, CPUs and memory of all sockets as 2x4090_2x9654_1024gb or "
            f"1x7950x_128gb; CPUs {', '.join(CPUS)}; GPUs {gpus} (of another size: 4090-48gb)",
            remedy="set plan.hardware=wizard: it asks six questions and writes hardware.yaml",
        )
    sockets = int(found["sockets"] or 1)
    host: dict[str, Any] = {
        "sockets": [{"count": sockets, "cpu": cpu.name, "memory_gib": int(found["memory"]) / max(1, sockets)}]
    }
    if found["gpu"]:
        card = {"count": int(found["gpus"]), "name": found["gpu"].upper()}
        if found["gib"]:
            card |= {
                "name": f"{card['name']} {found['gib']} GB",
                "memory_gib": int(found["gib"]) * CUDA_GIVES,
            }
        host["gpus"] = [card]
    return host
