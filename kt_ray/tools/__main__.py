"""`python -m kt_ray.tools {convert,merge,export,inspect,random}`: checkpoints and adapters outside training.

Exit codes as of kt-ray: 0 done; 1 a fault in kt_ray; 2 bad input (one line on stderr); 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from kt_ray.errors import guard
from kt_ray.terminal import open_streams, screen_console

_GB = 1 << 30
RANDOM_FORMATS = ("bf16", "fp8", "int4", "int8", "mxfp4")  # kt_ray.tools.random_formats makes them


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m kt_ray.tools", description=__doc__.split("\n")[0])
    commands = top.add_subparsers(dest="command", required=True)

    one = commands.add_parser("convert", help="requantise the routed experts, or bring them back to BF16")
    one.add_argument("source", help="checkpoint directory")
    one.add_argument("out", help="new directory, or one that a stopped run of this command left")
    one.add_argument("--to", required=True, choices=("int8", "int4", "fp8", "mxfp4", "bf16"))
    one.add_argument("--group", type=_positive, help="columns per scale (int8: whole rows, int4: 32)")
    one.add_argument("--all-linear", action="store_true", help="also attention, shared experts, dense layers")
    _sizes(one)

    one = commands.add_parser("merge", help="add an adapter to its base, in the base's format")
    one.add_argument("base", help="checkpoint directory")
    one.add_argument("adapter", help="adapter directory")
    one.add_argument("out", help="new directory, or one that a stopped run of this command left")
    one.add_argument(
        "--dtype", choices=("same", "bf16"), default="same", help="bf16: dequantise every weight"
    )
    _sizes(one)

    one = commands.add_parser("export", help="write an adapter in another program's form")
    one.add_argument("adapter", help="adapter directory")
    one.add_argument("out", help="new directory")
    one.add_argument("--form", required=True, choices=("peft-fused", "peft-per-expert", "sglang-kt"))
    one.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    one.add_argument("--base", help="base model's directory, if not where the adapter says")

    one = commands.add_parser("inspect", help="what a checkpoint or an adapter contains")
    one.add_argument("path", help="directory")
    one.add_argument("--json", action="store_true", help="print JSON")

    one = commands.add_parser("random", help="a checkpoint with random weights at a model's real shapes")
    one.add_argument("out", help="new directory")
    one.add_argument("--model", required=True, help="an entry of conf/model with dimensions")
    one.add_argument("--format", choices=RANDOM_FORMATS, default="bf16", help="as the family releases it")
    one.add_argument("--layers", type=_positive, help="the first N decoder layers only")
    one.add_argument(
        "--sparse", action="store_true", help="no disk space: kt_ray makes values while it reads"
    )
    one.add_argument("--tokenizer", type=Path, help="a tokenizer's directory (default: the demo's)")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument(
        "--set",
        nargs="*",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="values of config.json, as JSON",
    )
    _shard_size(one)
    one.add_argument("--json", action="store_true", help="print the report as JSON")
    return top


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _gib(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")


def _shard_size(command: argparse.ArgumentParser) -> None:
    command.add_argument("--shard-gb", type=_gib, default=4.0, help="largest output file in GiB (default 4)")


def _sizes(command: argparse.ArgumentParser) -> None:
    _shard_size(command)
    command.add_argument(
        "--threads", type=_positive, default=4, help="weights computed at the same time (default 4)"
    )
    command.add_argument("--json", action="store_true", help="print the report as JSON")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    open_streams()
    arguments = parser().parse_args(argv)

    def run() -> int:
        code = _run(arguments)
        sys.stdout.flush()  # a full disk is told
        return code

    return guard(run)


def _run(arguments: argparse.Namespace) -> int:
    console = screen_console()
    command = arguments.command
    if command == "convert":
        from kt_ray.tools.convert import Options, convert
        from kt_ray.tools.convert import show as show_report

        options = Options(arguments.to, arguments.group, arguments.all_linear)
        report = convert(
            arguments.source, arguments.out, options, shard_bytes=_bytes(arguments), threads=arguments.threads
        )
    elif command == "merge":
        from kt_ray.tools.merge import merge
        from kt_ray.tools.merge import show as show_report

        report = merge(
            arguments.base,
            arguments.adapter,
            arguments.out,
            bf16=arguments.dtype == "bf16",
            shard_bytes=_bytes(arguments),
            threads=arguments.threads,
        )
    elif command == "export":
        import torch

        from kt_ray.tools.export import export, merged_by_peft

        dtype = torch.float32 if arguments.dtype == "float32" else torch.bfloat16
        written = export(arguments.adapter, arguments.out, arguments.form, dtype=dtype, base=arguments.base)
        for path, count in written.items():
            console.print(f"{path}: {count} pairs of matrices", markup=False, soft_wrap=True)
        if arguments.form == "peft-per-expert" and not merged_by_peft(arguments.out, arguments.base):
            text = "PEFT does not merge these keys and would leave the experts out: for servers only"
            console.print(text, soft_wrap=True)
        return 0
    elif command == "random":
        from kt_ray.tools.random_checkpoint import Options as RandomOptions
        from kt_ray.tools.random_checkpoint import random_checkpoint
        from kt_ray.tools.random_checkpoint import show as show_report

        a = arguments
        made = RandomOptions(a.format, a.layers, a.tokenizer, a.seed, a.sparse, tuple(a.set))
        report = random_checkpoint(a.model, a.out, made, shard_bytes=_bytes(a))
    else:
        from kt_ray.tools.inspect import inspect
        from kt_ray.tools.inspect import show as show_report

        report = inspect(arguments.path)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        show_report(report, console)
    return 0


def _bytes(arguments: argparse.Namespace) -> int:
    return max(1, int(arguments.shard_gb * _GB))


if __name__ == "__main__":
    sys.exit(main())
