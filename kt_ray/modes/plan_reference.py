"""What mode=plan shows with plan.reference=true: the reference system's schedule on the same machine."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kt_ray.config.schema import Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.machine import Hardware
from kt_ray.hardware.rate_files import rates_for
from kt_ray.placement.reference_schedule import reference_table


def show_reference(console: Console, config: Config, dims: ModelDims, hardware: Hardware) -> None:
    """Print the terms of a step under the reference's schedule, and what is published beside it."""
    title, rows, notes = reference_table(dims, config, hardware, rates_for(config, hardware))
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("term")
    table.add_column("seconds", justify="right")
    table.add_column("source")
    for name, seconds, source in rows[:-1]:
        table.add_row(escape(name), seconds, escape(source))
    table.add_section()
    table.add_row(*rows[-1], style="bold")
    console.print(table)
    for note in notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
