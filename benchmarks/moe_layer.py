"""One expert layer, forward and backward: the native engine and its peers, beside the machine's peak.

    python benchmarks/moe_layer.py --shape deepseek_v2_lite --tokens 512 --rank 8 --threads 2 --formats all \\
        --against kt,torch,peft,grouped_mm --wait-quiet 600 --json out.json

All get the same weights, routing and adapters, each in a process of its own, take turns round by round
(the others are stopped meanwhile), and report the median. FLOPs count the frozen matrices only, 6 K T H I
per direction. Records and peers: README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import commit, frame, machine, wait_quiet, write_json
from kt_venv import VERSION, kt_python
from layer_inputs import FORMATS, SHAPES, Case
from layer_session import PEERS, Group, make_group, quiet_cpus, records, run_group
from peak import Peak, Rates, best


def words(text: str) -> list[str]:
    """A list with commas; "none" is empty."""
    return [] if text == "none" else [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    """Positive numbers with commas."""
    values = [int(word) for word in words(text)]
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: positive numbers with commas")
    return values


def formats(text: str) -> list[str]:
    """Names of formats with commas, or "all"."""
    return _choices(text, FORMATS)


def peers(text: str) -> list[str]:
    """Names of peers with commas, or "all", or "none"."""
    return _choices(text, tuple(PEERS))


def _choices(text: str, known: Sequence[str]) -> list[str]:
    chosen = list(known) if text == "all" else words(text)
    if unknown := [word for word in chosen if word not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(known)}")
    return chosen


def isas(text: str) -> list[str]:
    """Names of instruction sets; "all": every one of this machine except reference, the best first."""
    if text != "all":
        return words(text) or ["auto"]
    from kt_ray.native import available_isas

    return [isa for isa in reversed(available_isas()) if isa != "reference"] or ["reference"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kt_ray" / "kt_venv"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="deepseek_v2_lite")
    parser.add_argument("--experts", type=int, metavar="N", help="fewer than the model's: less memory")
    parser.add_argument("--tokens", type=numbers, default=[512], metavar="T,...")
    parser.add_argument("--rank", type=int, default=8, help="0: no adapter")
    parser.add_argument("--threads", type=numbers, default=[2], metavar="N,...")
    parser.add_argument("--formats", type=formats, default=["bf16"], metavar="F,...", help=" ".join(FORMATS))
    parser.add_argument("--isas", type=isas, default=["auto"], metavar="I,...", help="auto, all, or names")
    parser.add_argument("--against", type=peers, default=["torch"], metavar="P,...", help=" ".join(PEERS))
    parser.add_argument("--rounds", type=int, default=5, help="counted ones, after one to warm up")
    parser.add_argument("--profile", action="store_true", help="ours without LoRA besides")
    parser.add_argument(
        "--int8-products", action="store_true", help="ours with int8 products besides, int8 and int4 weights"
    )
    parser.add_argument(
        "--wait-quiet",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="per group: before it, and for repeats",
    )
    parser.add_argument("--peak-seconds", type=float, default=1.0, help="of each loop of peak.cpp")
    parser.add_argument("--kt-venv", type=Path, default=cache, metavar="DIR", help="made when missing")
    parser.add_argument("--kt-wheel", type=Path, metavar="FILE", help="kt-kernel's, instead of PyPI's")
    parser.add_argument("--json", type=Path, help="file to write; standard output otherwise")
    parser.add_argument(
        "--resume", action="store_true", help="keep what --json holds of the same machine, commit and options"
    )
    args = parser.parse_args(arguments)
    most = SHAPES[args.shape][2]
    args.experts = most if args.experts is None else args.experts
    if not 1 <= args.experts <= most:
        parser.error(f"--experts: 1 to {most}")
    if args.rank < 0 or args.rounds < 1:
        parser.error("--rank: at least 0; --rounds: at least 1")
    if args.resume and args.json is None:
        parser.error("--resume: of which --json?")
    return args


def is_quiet(seconds: float) -> bool:
    """Whether others leave the machine alone; waits up to `seconds` for it."""
    return wait_quiet(seconds, below=quiet_cpus(), window=min(20.0, max(1.0, seconds / 10)))


def kept(args: argparse.Namespace, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Records of an earlier call with the same machine, commit and options: those of whole groups.

    about: the machine; gets the options.
    """
    names = ("shape", "experts", "rank", "isas", "against", "rounds", "profile", "int8_products")
    about["options"] = {name: getattr(args, name) for name in names}
    if args.resume:
        with contextlib.suppress(OSError, ValueError, KeyError):
            old = json.loads(args.json.read_text(encoding="utf-8"))
            same = all(old["machine"][key] == about[key] for key in about if key != "load_before")
            if same and old["commit"] == commit():
                found: list[dict[str, Any]] = old["records"]
                return found
    return []


def table(group: Group, rates: Rates) -> str:
    """A group's medians for people."""
    case = group.case
    lines = [f"{case.shape}, {case.tokens} tokens, {case.threads} threads, {case.format}:"]
    for record in records(group, rates):
        name = f"{record['impl']} {record['isa'] or ''}{'' if record['rank'] else ' without LoRA'}"
        name += " int8 products" if record["int8_products"] else ""
        if "error" in record:
            lines.append(f"  {name:34} {record['error']}")
            continue
        peak = "" if record["of_peak"] is None else f", {record['of_peak']:.0%} of peak"
        line = f"  {name:34} {record['direction']:8} {record['median_ms']:9.2f} ms{peak}"
        if record["of_bandwidth"] is not None and case.calls > 1:
            line += f", {record['of_bandwidth']:.0%} of bandwidth"
        for key, words_ in (("ratio_to_ours", "of ours"), ("ratio_to_bf16", "of our BF16")):
            line += f", {record[key]:.2f} {words_}" if key in record else ""
        line += f", repack {record['repack_ms']:.0f} ms of it" if "repack_ms" in record else ""
        lines.append(line)
    if not group.quiet:
        lines.append(f"  WARNING: other programs used {group.others_cpus:.2f} CPUs meanwhile")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print or write its JSON."""
    args = parse(arguments)
    about: dict[str, Any] = machine()
    say = sys.stderr if args.json is None else sys.stdout
    kt: Path | str = ""
    if "kt" in args.against:
        try:
            kt = kt_python(args.kt_venv, args.kt_wheel)
            about["versions"]["kt-kernel"] = VERSION
        except (OSError, RuntimeError) as error:
            kt = f"no environment: {error}"
    groups: list[Group] = []
    old = kept(args, about)
    done = {(r["threads"], r["tokens"], r["format"]) for r in old}
    if args.resume:  # what is left is of these options
        write_json(args.json, old, about)

    def result() -> list[dict[str, Any]]:
        return old + [record for group in groups for record in records(group, about["peak"])]

    with Peak() as peak, tempfile.TemporaryDirectory(prefix="kt_ray_bench_") as logs:
        about["quiet_before"] = is_quiet(args.wait_quiet)
        counts = sorted({1, *args.threads})
        before = about["peak"] = about["peak_before"] = peak.measure(counts, args.peak_seconds)
        print(f"peak: {before or peak.error}", file=say)
        if not about["quiet_before"]:
            print("WARNING: other programs use more than 5 % of the CPUs", file=say)
        for threads, tokens, name in (
            (threads, tokens, name)
            for threads in args.threads
            for tokens in args.tokens
            for name in args.formats
            if (threads, tokens, name) not in done
        ):
            if args.wait_quiet and groups:
                is_quiet(args.wait_quiet)
            case = Case(args.shape, args.experts, tokens, args.rank, name, threads)
            group = make_group(case, args.isas, args.against, args.profile, args.int8_products)
            run_group(group, args.rounds, args.wait_quiet, kt, Path(logs))
            groups.append(group)
            print(table(group, before), file=say, flush=True)
            if args.json is not None:  # what there is so far, should this be interrupted
                write_json(args.json, result(), about)
        after = about["peak_after"] = peak.measure(counts, args.peak_seconds)
        about["peak"] = best(before, after)
        about["peak_error"] = peak.error
    about["load_after"] = round(os.getloadavg()[0], 2)
    if args.json is None:
        sys.stdout.write(frame(result(), about))
    else:
        write_json(args.json, result(), about)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # temporary folders and children go
    raise SystemExit(main())
