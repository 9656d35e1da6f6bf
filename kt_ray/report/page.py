"""report.html: one run on one page."""

from __future__ import annotations

import math
import shlex
from html import escape
from typing import Any

import yaml

from kt_ray.config.fields import show
from kt_ray.evaluate.answer_file import find_answers, holds_answers
from kt_ray.evaluate.table import Sample, measured, pick_samples
from kt_ray.report.charts import FEW, SERIES_COLOURS, Line, heat_map, heat_scale, line_chart, smoothed
from kt_ray.report.findings import findings
from kt_ray.report.html import boxed, card, page, section, table, tile
from kt_ray.runs.rundata import RunData
from kt_ray.tracking.progress import duration, size

_TERMS = (
    ("seconds_attention", "attention"),
    ("seconds_experts", "experts"),
    ("seconds_transport", "waiting while no experts compute"),
    ("seconds_optimizer", "optimizer"),
    ("policy_seconds_sampling", "sampling"),
)


def report_page(run: RunData, samples: int = 5) -> str:
    """The whole document, with so many predictions."""
    return page(
        f"{run.name} · kt_ray",
        [
            _header(run),
            _tiles(run),
            _remarks(run),
            _curves(run),
            _expert_load(run),
            _answers(run, samples),
            _actors(run),
            _settings(run),
            _environment(run),
            "<footer>Written by kt_ray mode=report from the files in the run directory.</footer>",
        ],
    )


def _header(run: RunData) -> str:
    settings, environment = run.settings(), run.environment
    facts = [
        f"{key} {settings[f'{key}.name']}" for key in ("model", "data", "rule") if settings.get(f"{key}.name")
    ]
    if environment.get("time"):
        facts.append(str(environment["time"])[:16].replace("T", " "))
    if environment.get("git_commit"):
        facts.append(f"commit {str(environment['git_commit'])[:10]}")
    text = f"<h1>{escape(run.name)}</h1><p class='soft'>{escape(' · '.join(facts))}</p>"
    if environment.get("argv"):
        text += f"<pre class='soft'>{escape(shlex.join(map(str, environment['argv'])))}</pre>"
    return text


def _tiles(run: RunData) -> str:
    f = run.figures()
    tiles = [tile("steps", f"{run.steps:,}", f"{f['tokens']:,.0f} tokens" if "tokens" in f else "")]
    name = "reward" if "reward" in f else "loss"
    if name in f:
        tiles.append(tile(f"training {name}", f"{f[name]:.3f}", f"from {f[f'first_{name}']:.3f}"))
    if held_out := f"eval_{name}" if f"eval_{name}" in f else "":
        before = f"from {f[f'{held_out}_before']:.3f}, " if f"{held_out}_before" in f else ""
        tiles.append(
            tile(f"held-out {name}", f"{f[held_out]:.3f}", f"{before}best {f[f'{held_out}_best']:.3f}")
        )
    if "tokens_per_s" in f:
        rate = f["tokens_per_s"]
        tiles.append(tile("tokens/s", f"{rate:,.{0 if rate >= 100 else 1}f}", "all steps but the first"))
    if "seconds" in f:
        a_step = f"{f['seconds_per_step']:.2f} s a step"
        tiles.append(tile("time in steps", duration(f["seconds"]), a_step))
    if "skipped" in f:
        tiles.append(tile("skipped steps", f"{f['skipped']:,.0f}"))
    if "host_bytes" in f:
        tiles.append(tile("host memory", size(int(f["host_bytes"])), "peak of all processes"))
    if "gpu_bytes" in f:
        tiles.append(tile("GPU memory", size(int(f["gpu_bytes"])), "peak of all devices"))
    if f.get("recoveries"):
        lost = f"{duration(f.get('seconds_lost', 0))} lost"
        tiles.append(tile("recoveries", f"{f['recoveries']:.0f}", lost))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _remarks(run: RunData) -> str:
    items = "".join(f'<li class="{f.level}">{escape(f.text)}</li>' for f in findings(run))
    if not run.records:
        text = '<p class="look">No step has been finished yet: metrics.jsonl is empty.</p>'
    elif not items:
        text = '<p class="soft">Nothing out of the ordinary in the figures.</p>'
    else:
        text = f'<ul class="remarks">{items}</ul>'
    return section("Remarks", text)


def _curves(run: RunData) -> str:
    loss, held_out = run.series("loss"), run.series("eval_loss")
    few = len(loss) < FEW
    curves = [
        Line("training" if few else "training, each step (pale)", loss, 0, faint=not few, dots=few),
        Line("training, smoothed", [] if few else smoothed(loss), 0),
        Line("held-out", held_out, 1, dots=len(held_out) <= 100),
    ]
    rewards = [
        Line("answers", run.series("policy_reward"), 0),
        Line("held-out", run.series("eval_reward"), 1, dots=True),
    ]
    total = Line("whole step", run.series("seconds"), len(_TERMS))
    terms = [Line(name, run.series(key), i) for i, (key, name) in enumerate(_TERMS)]
    busy = run.keys("busy_")[:SERIES_COLOURS]  # more curves than colours tell nothing
    actors = [Line(key.removeprefix("busy_"), run.series(key), i) for i, key in enumerate(busy)]
    imbalance = [
        Line("experts", run.series("expert_load_imbalance"), 0),
        Line("expert actors", run.series("actor_load_imbalance"), 1),
    ]

    def alone(key: str, colour: int) -> list[Line]:
        return [Line("", run.series(key), colour)]

    charts = [
        card("Reward", line_chart(rewards, "mean reward")),
        card("Tokens of an answer", line_chart(alone("policy_answer_tokens", 2), "tokens", from_zero=True)),
        card("Entropy", line_chart(alone("policy_entropy", 3), "nats per token", from_zero=True)),
        card("Loss", line_chart(curves, run.loss_unit)),
        card("Learning rate", line_chart(alone("lr", 0), "learning rate", from_zero=True)),
        card("Throughput", line_chart(alone("tokens_per_s", 2), "tokens/s", from_zero=True)),
        card("Gradient norm", line_chart(alone("grad_norm", 3), "norm", from_zero=True)),
        card("Time of a step", line_chart([total, *terms], "seconds", from_zero=True), _time_split(run)),
        card("Memory", line_chart(_memory(run), "GB", from_zero=True)),
        card("Who is busy", line_chart(actors, "share of the step", from_zero=True)),
        card("Expert load", line_chart(imbalance, "fullest over mean", from_zero=True)),
    ]
    return section("Curves", f'<div class="grid2">{"".join(charts)}</div>' if any(charts) else "")


def _time_split(run: RunData) -> str:
    """Mean shares of the step, in words: the terms overlap, so a pie would lie."""
    seconds = dict(run.series("seconds"))
    whole = sum(seconds.values())
    if whole <= 0:
        return ""
    shares = [
        f"{name} {sum(v for s, v in points if s in seconds) / whole:.0%}"
        for key, name in _TERMS
        if (points := run.series(key))
    ]
    text = f'<p class="soft">Share of all steps: {escape(", ".join(shares))}. They overlap.</p>'
    return text if shares else ""


def _memory(run: RunData) -> list[Line]:
    lines: list[Line] = []
    for prefix, kind in (("host_rss_bytes_", "host"), ("gpu_memory_bytes_", "GPU")):
        for key in run.keys(prefix):
            points = [(step, value / 1e9) for step, value in run.series(key)]
            lines.append(Line(f"{kind}: {key.removeprefix(prefix)}", points, len(lines)))
    return lines


def _expert_load(run: RunData) -> str:
    """Layer × expert, as a multiple of the layer's mean."""
    relative = {
        layer: [count * len(row) / sum(row) for count in row] for layer, row in run.load.items() if sum(row)
    }
    if not relative:
        text = "No checkpoint of this run holds a histogram (expert_load.json)."
        return section("Tokens per expert", f'<p class="soft">{text}</p>') if run.records else ""
    largest = max(max(row) for row in relative.values())
    top = float(min(10, max(2, math.ceil(largest))))
    drawn = heat_map(relative, top)
    unused = sum(value == 0 for row in relative.values() for value in row)
    note = (
        f"Tokens of each expert over the mean of its layer (1 = even), steps 1 to {run.load_step}. "
        f"Fullest: {largest:.1f} times the mean. Experts without a token: {unused}."
    )
    inner = f'<p class="soft">{escape(note)}</p>{heat_scale(top)}{drawn}'
    return section("Tokens per expert", boxed(inner))


def _answers(run: RunData, count: int) -> str:
    """The metrics of eval.json and some predictions, before and after."""
    parts = [_metrics(run.evaluation)] if run.evaluation else []
    base, adapter = find_answers(run.path) if holds_answers(run.path) else (None, None)
    if base and adapter and [r.prompt for r in base.rows] != [r.prompt for r in adapter.rows]:
        base = None  # of another data set; mode=eval says so
    parts += [_sample(sample) for sample in pick_samples(base, adapter, count)]
    if not parts:
        return ""
    if not run.evaluation:
        parts.insert(0, '<p class="soft">No metrics yet: mode=eval computes them.</p>')
    return section("Before and after", *parts)


def _metrics(evaluation: dict[str, Any]) -> str:
    lines = measured(*((evaluation.get(side) or {}).get("metrics", {}) for side in ("base", "adapter")))
    columns = ("base", "adapter", "change")
    colours = {True: "better", False: "worse", None: ""}
    classes = [["", "", "", colours[line.improved]] for line in lines]
    text = table(("metric", *columns), [line.texts(columns) for line in lines], classes=classes)
    return card(f"{evaluation.get('rows', '?')} answers, scores in percent", text) if lines else ""


def _sample(sample: Sample) -> str:
    texts = (("label", sample.label), ("base", sample.base), ("adapter", sample.adapter))
    columns = "".join(
        f'<div><h3>{name}</h3><div class="text">{escape(text)}</div></div>'
        for name, text in texts
        if text is not None
    )
    prompt = f'<h3>row {sample.row}</h3><div class="text">{escape(sample.prompt)}</div>'
    return f'<div class="card sample">{prompt}<div class="pair">{columns}</div></div>'


def _actors(run: RunData) -> str:
    """What each actor held, from env.json."""
    rows = []
    for actor in run.environment.get("actors") or []:
        layers = actor.get("layers")
        experts = f"{actor.get('experts', '?')} experts a layer"
        where = " ".join(str(actor[key]) for key in ("host", "device", "isa") if actor.get(key))
        weights, load = actor.get("weight_bytes"), actor.get("load_seconds")
        rows.append(
            [
                str(actor.get("actor", "?")),
                where,
                f"layers {layers[0]}–{layers[1] - 1}" if layers else experts,
                str(actor.get("threads", "–")),
                size(weights) if isinstance(weights, int) else "–",
                f"{load:.1f} s" if isinstance(load, int | float) else "–",
            ]
        )
    columns = ("actor", "where", "holds", "threads", "weights", "loaded in")
    return section("Who held what", boxed(table(columns, rows, numbers=False))) if rows else ""


def _settings(run: RunData) -> str:
    changed = [[key, show(value)] for key, value in run.changed_settings().items() if key != "model.config"]
    whole = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
    rest = f"<details><summary>all of config.yaml</summary><pre>{escape(whole)}</pre></details>"
    note = '<p class="soft">Keys that differ from their defaults</p>'
    return section("Configuration", boxed(f"{note}{table((), changed, numbers=False)}{rest}"))


def _environment(run: RunData) -> str:
    rows = []
    for key, value in run.environment.items():
        if key in ("actors", "argv", "pid") or value is None:
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{name} {version}" for name, version in value.items() if version)
        rows.append([key, size(value) if key == "memory_bytes" and isinstance(value, int) else str(value)])
    return section("Environment", boxed(table((), rows, numbers=False))) if rows else ""
