"""mode=doctor: is this machine ready for this configuration, and how fast is it? Pass, warn or fail."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config
from kt_ray.doctor import machine_checks as machine
from kt_ray.doctor import measure_rates as doctor_rates
from kt_ray.doctor import software_checks as software
from kt_ray.doctor.check import FAIL, PASS, WARN, Check, failed
from kt_ray.errors import UserError, refusal
from kt_ray.hardware.describe import cpu_isas, cpu_name, this_host
from kt_ray.hardware.machine import Hardware
from kt_ray.hardware.rate_files import NOMINAL
from kt_ray.hardware.wizard import write_own
from kt_ray.modes.plan import model_dims
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.remedies import shortage
from kt_ray.placement.render import counted
from kt_ray.runs.known_load import known_load
from kt_ray.terminal import screen_console
from kt_ray.timing.choose import choose_plan

_STYLES = {PASS: "green", WARN: "yellow", FAIL: "red"}
_WIDTH = 120  # where output is no terminal


def run(config: Config) -> int:
    """Examine this machine, print one line per check, measure and store its rates, write hardware.yaml.

    Nothing is measured with plan.rates=nominal. Returns 1 when a check fails, else 0.
    """
    checks = examine(config)
    console = screen_console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    table = Table("", "check", "found", "what to do", box=SIMPLE_HEAD, pad_edge=False)
    for check in checks:
        table.add_row(f"[{_STYLES[check.status]}]{check.status}[/]", *map(escape, check[1:]))
    console.print(table)
    counts = Counter(check.status for check in checks)
    console.print(f"{counts[PASS]} pass, {counts[WARN]} warn, {counts[FAIL]} fail")
    hardware = this_host()
    rates = None
    try:
        rates = _measure(config, hardware, console) if config.plan.rates != NOMINAL else None
    finally:  # also where the rates cannot be stored
        console.print(write_own(hardware, cpu_name(), rates), markup=False, soft_wrap=True)
    return 1 if counts[FAIL] else 0


def _measure(config: Config, hardware: Hardware, console: Console) -> Path | None:
    """Measure this machine's rates, show and store them. Returns their file.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        dims = model_dims(config.model)
    except (UserError, OSError):  # a check has said so; its shape is then not among those measured
        dims = None
    try:
        import kt_ray.native._native  # noqa: F401
    except ImportError:
        console.print("rates not measured: the native engine is not built", markup=False)
        return None

    doctor_rates.require_place(config, hardware)
    console.print("measuring this machine takes about 3 minutes, longer beside other programs", markup=False)

    def say(text: str) -> None:
        console.print(f"measuring: {text}", markup=False, soft_wrap=True)

    rates = doctor_rates.measure_rates(config, hardware, dims, say)
    for line in doctor_rates.show(rates, hardware.sockets[0].cores):
        console.print(line, markup=False, soft_wrap=True)
    path = doctor_rates.store(config, hardware, rates)
    console.print(f"rates stored in {path}: mode=plan predicts with them", markup=False, soft_wrap=True)
    return path


def examine(config: Config) -> list[Check]:
    """All checks, cheap ones first. A check that breaks is itself reported as failed."""
    hardware = this_host()
    plan, plan_check = _plan(config, hardware)
    checks: list[Callable[[], Check]] = [
        software.python,
        partial(machine.cpu, hardware),
        partial(machine.amx, hardware, config.rule),
        partial(machine.numa, hardware),
        machine.affinity,
        partial(machine.memory, hardware, plan),
        machine.swap,
        machine.huge_pages,
        partial(machine.shared_memory, plan, config.cluster),
        partial(software.gpus, hardware, config.rule, plan),
        partial(software.native, cpu_isas(), config.rule),
        *software.packages(config),
        software.threads_environment,
        machine.open_files,
        partial(software.ray_cluster, config.cluster),
        partial(software.ray_access, config.cluster),
        partial(software.hosts, config.cluster, config.rule),
        partial(machine.disk, config, plan),
        partial(software.model, config.model),
        lambda: plan_check,
    ]
    return [_guarded(check) for check in checks]


def _guarded(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # the doctor must finish its round
        name = getattr(check, "func", check).__name__.replace("_", " ")
        return _failed(name, error)


def _failed(name: str, error: Exception) -> Check:
    refused = refusal(error)
    if refused is not None:
        return failed(name, f"{refused.what} ({refused.where or refused.observed})", refused.remedy)
    return failed(name, f"{type(error).__name__}: {error}", "report this as a bug, with this output")


def _plan(config: Config, hardware: Hardware) -> tuple[Plan | None, Check]:
    """The plan of this configuration on this host, and whether it holds."""
    try:
        dims = model_dims(config.model)
        # A file that plan.rates names may be the one that is about to be written.
        exists = config.plan.rates in ("auto", NOMINAL) or Path(config.plan.rates).is_file()
        if not exists:
            config = with_keys(config, {"plan.rates": NOMINAL})
        plan = choose_plan(dims, config, hardware, known_load(config, dims))
    except UserError as error:
        fault = error.what + (f" ({error.observed}; required {error.required})" if error.observed else "")
        return None, failed("plan", fault, error.remedy)
    except OSError as error:
        return None, _failed("plan", error)
    summary = (
        f"{counted(len(plan.workers), 'attention worker')}, {counted(len(plan.experts), 'expert actor')}"
    )
    if plan.fits:
        return plan, Check(PASS, "plan", f"{summary}: fits", "")
    return plan, failed(
        "plan", f"{summary}: {shortage(plan)}", "run the same command with mode=plan: it says what would fit"
    )
