"""What torch reads once: our values where the user has none, before torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kt_ray import cli, torch_environment
from kt_ray.config.schema import Config

OURS = {name: value for ours, _ in torch_environment.GROUPS for name, value in ours.items()}


def test_our_values_where_the_user_has_none() -> None:
    environment = {"OMP_NUM_THREADS": "4"}
    torch_environment.apply(environment)
    assert environment == {"OMP_NUM_THREADS": "4", **OURS}
    assert OURS["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in OURS  # of the two names one


@pytest.mark.parametrize(
    ("name", "ours"), [(name, ours) for ours, names in torch_environment.GROUPS for name in names]
)
def test_any_of_the_users_keeps_ours_of_its_group_out(name: str, ours: dict[str, str]) -> None:
    """A policy of the user's with our count would be neither's, nor would two names of one setting."""
    environment = {name: "x"}
    torch_environment.apply(environment)
    assert environment == {name: "x"} | {key: value for key, value in OURS.items() if key not in ours}


def test_the_command_line_sets_them_before_torch() -> None:
    """No import of the command line brings torch, which reads them once."""
    code = "import sys, kt_ray.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_dispatch_sets_them_before_the_mode_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Mode:
        @staticmethod
        def run(config: object) -> int:
            order.append("run")
            return 0

    def imported(name: str) -> type[Mode]:
        order.append("import")
        return Mode

    monkeypatch.setattr(torch_environment, "apply", lambda: order.append("set"))
    monkeypatch.setattr("importlib.import_module", imported)
    assert cli.dispatch(Config(mode="plan")) == 0
    assert order == ["set", "import", "run"]
