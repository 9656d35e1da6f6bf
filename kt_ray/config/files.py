"""Where conf/ is and what it offers. No Hydra: file names only."""

from __future__ import annotations

import re
from pathlib import Path

from kt_ray.config.fields import groups
from kt_ray.errors import UserError


def conf_dir(package: Path | None = None) -> Path:
    """The directory of YAML files: kt_ray/conf in an installed wheel, else conf/ beside the package.

    Args:
        package: directory of the kt_ray package; None = where this module was imported from.

    Raises:
        UserError: neither exists.
    """
    package = package or Path(__file__).resolve().parents[1]
    candidates = (package / "conf", package.parent / "conf")
    for candidate in candidates:
        if (candidate / "config.yaml").is_file():
            return candidate
    raise UserError(
        "the configuration files are missing",
        where=" and ".join(str(c) for c in candidates),
        required="a directory with config.yaml",
        remedy="pip install --force-reinstall kt_ray, or run from a complete source tree",
    )


def builtin_data(name: str) -> Path:
    """The rows that data.builtin=NAME stands for: a file of the package."""
    return Path(__file__).resolve().parents[1] / {"demo": "demo/assets/persona.jsonl"}[name]


def option_groups() -> list[str]:
    """The groups of conf/ that an option can be chosen for (conf/hardware holds files for plan.hardware)."""
    return sorted(p.name for p in conf_dir().iterdir() if p.is_dir() and p.name in {*groups(), "experiment"})


def option_names(group: str) -> list[str]:
    """The options of a group: the YAML files in conf/<group>."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


# A model as the Hugging Face hub names it; as a value of `model` also without hf://.
HUB_NAME = re.compile(r"(hf://)?(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
WIZARD = "wizard"  # plan.hardware: ask


def is_hardware_path(given: str) -> bool:
    """Whether plan.hardware is a file, not the name of a host."""
    return "/" in given or given.endswith((".yaml", ".yml")) or Path(given).is_file()


def hardware_file(name: str) -> Path | None:
    """The file of conf/hardware that `name` stands for ("laptop_16gb"), or None."""
    path = conf_dir() / "hardware" / f"{name}.yaml"
    return path if path.is_file() else None
