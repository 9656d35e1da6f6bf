"""Runs side by side: which ones, what differs, what came of it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kt_ray.config.schema import OptimConfig, TrainerConfig
from kt_ray.errors import UserError
from kt_ray.modes.compare import show
from kt_ray.report.comparison import compare_runs, find_runs
from kt_ray.report.comparison_page import compare_page


@pytest.fixture
def sweep(tmp_path, make_run):
    """Runs sweep-0, -1, -2, -10 of growing rank and falling loss, and one of another name."""
    for job, rank, level in ((0, 4, 1.4), (1, 8, 1.1), (2, 16, 0.9), (10, 32, 0.8)):
        make_run(tmp_path, f"sweep-{job}", rank=rank, level=level)
    make_run(tmp_path, "other", eval_every=0)
    return tmp_path


def names(paths) -> list[str]:
    return [path.name for path in paths]


def test_which_runs_are_meant(sweep, monkeypatch):
    jobs = ["sweep-0", "sweep-1", "sweep-2", "sweep-10"]
    assert names(find_runs([], sweep)) == ["other", *jobs]
    assert names(find_runs(["sweep"], sweep)) == jobs
    assert names(find_runs(["sweep-?"], sweep)) == jobs[:3]
    assert names(find_runs(["other", str(sweep / "sweep-1"), "other"], sweep)) == ["other", "sweep-1"]
    assert names(find_runs([str(sweep)], sweep / "elsewhere")) == ["other", *jobs]
    monkeypatch.chdir(sweep)
    assert names(find_runs(["./sweep"], sweep / "elsewhere")) == jobs


def test_runs_whose_names_end_in_a_raised_digit(tmp_path, make_run):
    for name in ("grid-10²", "grid-2"):
        make_run(tmp_path, name, steps=2)
    assert names(find_runs([], tmp_path)) == ["grid-2", "grid-10²"]
    assert names(find_runs(["grid"], tmp_path)) == ["grid-2"]


def test_losses_have_the_unit_of_their_stage_and_grpo_has_none(tmp_path, make_run):
    for name, stage in (("a", "dpo"), ("b", "dpo"), ("c", "kto"), ("d", "sft")):
        make_run(tmp_path, name, steps=6, trainer=TrainerConfig(stage=stage))

    def page(*runs):
        return compare_page(compare_runs([tmp_path / run for run in runs]))

    assert "mean of a pair" in page("a", "b") and "nats per token" not in page("a", "b", "c", "d")
    file = tmp_path / "d" / "metrics.jsonl"
    file.write_text(file.read_text().replace('"lr"', '"policy_reward": 0.5, "lr"'))
    first, second = compare_runs([tmp_path / "a", tmp_path / "d"]).entries
    assert "loss" in first.figures and "loss" not in second.figures and second.figures["reward"] == 0.5


@pytest.mark.parametrize("entry", ["othr", "nothing-*", "/nonexistent"])
def test_names_that_are_no_runs_are_refused(sweep, entry):
    with pytest.raises(UserError, match="is no run and holds none") as caught:
        find_runs([entry], sweep)
    assert entry != "othr" or "did you mean other?" in str(caught.value)


def test_one_run_is_no_comparison(sweep):
    with pytest.raises(UserError, match="at least two runs"):
        compare_runs([sweep / "other"])


def test_differing_keys_beside_the_results(sweep):
    table = compare_runs(find_runs(["sweep"], sweep))
    assert table.differing == ("lora.rank", "lora.alpha") == table.inline
    assert table.headings()[:4] == ["run", "lora.rank", "lora.alpha", "steps"]
    assert [row[:2] for row in table.cells()] == [
        ["sweep-0", "4"],
        ["sweep-1", "8"],
        ["sweep-2", "16"],
        ["sweep-10", "32"],
    ]
    column = table.headings().index("held-out, best")
    assert {c for r, c in table.best() if r == 3} >= {column} and (0, column) not in table.best()
    text = table.markdown()
    assert f"**{table.cells()[3][column]}**" in text and "tokens/s" in text
    assert table.headings().index("tokens/s") not in {c for _, c in table.best()}  # all equal: none is best
    run = table.to_dict()["runs"][2]
    assert run["settings"] == {"lora.rank": 16, "lora.alpha": 32.0} and run["figures"]["steps"] == 60


def test_many_differing_keys_get_a_table_of_their_own(tmp_path, make_run):
    """With the runs' names as they are: brackets are neither a pattern nor markup."""
    make_run(tmp_path, "a")
    make_run(
        tmp_path,
        "b[i]",
        rank=16,
        seed=3,
        optim=OptimConfig(lr=0.5, schedule="constant"),
        trainer=TrainerConfig(max_steps=9),
    )
    table = compare_runs(find_runs(["a", "b[i]"], tmp_path))
    show(table, screen := Console(file=io.StringIO(), width=200))
    assert screen.file.getvalue().count("b[i]") == 2
    assert len(table.differing) == 6 and table.inline == () and table.headings()[1] == "steps"
    assert ["lora.rank", "8", "16"] in table.setting_rows() and "| seed | 0 | 3 |" in table.markdown()
    assert "What differs" in compare_page(table)


def test_order_by_a_figure_puts_runs_without_it_last(sweep):
    paths = find_runs([], sweep)
    by_loss = [entry.label for entry in compare_runs(paths, "eval_loss").entries]
    assert by_loss == ["sweep-10", "sweep-2", "sweep-1", "sweep-0", "other"]
    assert compare_runs(paths, "eval_loss").cells()[-1].count("–") == 2


@pytest.mark.parametrize("run", ["a", "b"])
def test_going_on_is_no_difference_but_where_a_run_began_is(tmp_path, make_run, run):
    resumed = TrainerConfig(resume=str(tmp_path / run / "checkpoints" / "step_000005"), restarts=3)
    make_run(tmp_path, "a")
    make_run(tmp_path, "b", trainer=resumed)
    table = compare_runs([tmp_path / "a", tmp_path / "b"])
    assert table.differing == (("trainer.resume",) if run == "a" else ())


def test_equal_names_and_equal_configurations(tmp_path, make_run):
    make_run(tmp_path / "x", "a")
    make_run(tmp_path / "y", "a")
    table = compare_runs([tmp_path / "x" / "a", tmp_path / "y" / "a"])
    assert [e.label for e in table.entries] == ["x/a", "y/a"] and table.differing == ()
    assert (
        "No configuration key differs" in table.markdown()
        and "No configuration key differs" in compare_page(table)
    )


def test_the_page_draws_every_run_and_loads_nothing(sweep):
    text = compare_page(compare_runs(find_runs([], sweep)))
    loss = text[text.index("Training loss") : text.index("Held-out loss</h3>")]
    assert loss.count('class="line') == 5 and "sweep-10" in loss
    assert (
        "<script" not in text and "http" not in text.replace("http-equiv", "") and 'class="num best"' in text
    )


def test_more_runs_than_colours_are_named(tmp_path, make_run):
    for number in range(10):
        make_run(tmp_path, f"r{number}", steps=6)
    text = compare_page(compare_runs(find_runs([], tmp_path)))
    assert "Curves of the first 8 runs" in text and "10 runs" in text
