"""When a GPU lane pays, on paper: one DeepSeek-V3 layer's forward, split as `placement.lane_share` does it.

    python benchmarks/lane_on_paper.py

Pure arithmetic: nothing is measured here. docs/streaming.md has its output and where each figure comes from.
"""

from __future__ import annotations

from kt_ray.placement.lane_share import ExpertSizes, LaneRates, best_share

HIDDEN, INTER, EXPERTS, PER_TOKEN, RANK = 7168, 2048, 256, 8, 8
PARAMS = 3 * HIDDEN * INTER
ADAPTER = 4 * 3 * RANK * (HIDDEN + INTER)
BYTES = {"FP8": PARAMS * (1 + 4 / 128**2), "BF16": PARAMS * 2.0, "MXFP4": PARAMS * (1 / 2 + 1 / 32)}
LINK, GPU = 25e9, 80e12
CPUS = {"16 Zen 4 cores": (3.0e12, 60e9), "1 AMX socket": (20e12, 250e9), "2 AMX sockets": (40e12, 500e9)}
TOKENS = (256, 1024, 4096, 8192, 32768)


def table() -> list[str]:
    """Rows of markdown."""
    rows = ["| experts | CPU | tokens | CPU alone, ms | with the lane, ms | carried | saved |"]
    rows.append("|---|---|--:|--:|--:|--:|--:|")
    for kind, size in BYTES.items():
        sizes = ExpertSizes(EXPERTS, EXPERTS, PER_TOKEN, PARAMS, size + ADAPTER, HIDDEN)
        for cpu, (flops, memory) in CPUS.items():
            for tokens in TOKENS:
                split = best_share(sizes.work(tokens), LaneRates(LINK, GPU, flops, memory))
                rows.append(
                    f"| {kind} | {cpu} | {tokens:,} | {1e3 * split.plain:,.0f} | {1e3 * split.seconds:,.0f} "
                    f"| {split.carried} | {split.gain:.0%} |"
                )
    return rows


if __name__ == "__main__":
    print("\n".join(table()))
