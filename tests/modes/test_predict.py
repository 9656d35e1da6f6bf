"""mode=predict and mode=chat on a tiny model, end to end from the command line."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import queue
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kt_ray import cli
from kt_ray.config.mapping import with_keys
from kt_ray.errors import UserError
from kt_ray.generate.generator import Answer, Generator
from kt_ray.generate.requests import Request, Token
from kt_ray.generate.sampling import RowSampler
from kt_ray.hardware.describe import this_host
from kt_ray.modes.chat import Chat
from kt_ray.runs import answering
from kt_ray.runs.generation import generating, prepare_generation
from kt_ray.runs.held_out_loss import HeldOut, measure
from kt_ray.runs.questions import Options, Question, held_out_rows, questions_of
from tests.helpers.composing import compose
from tests.helpers.hf_reference import build_chat_checkpoint, build_checkpoint
from tests.helpers.random_adapter import random_adapter

SMALL = [
    "cluster=local",
    "tracking.plot=false",
    "model.dtype=float32",
    "rule.worker_threads=1",
    "tracking.progress=false",
]
SHORT = ["generate.max_new_tokens=12", "data.limit=60", "data.eval_fraction=0.2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = build_chat_checkpoint(tmp_path_factory.mktemp("model"))
    yield path


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(model: Path, *overrides: str) -> int:
    return cli.main(
        ["mode=predict", "data=demo", f"model.path={model}", "run.name=p", *SMALL, *SHORT, *overrides]
    )


def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs/p/predictions.jsonl").read_text().splitlines()]


def test_predictions_go_on_where_they_stopped(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(model) == 0
    whole = sorted(lines(), key=lambda row: row["id"])
    assert len(whole) >= 8 and len({row["id"] for row in whole}) == len(whole)
    assert all(row["prompt"] and row["label"] and 1 <= row["tokens"] <= 12 for row in whole)
    assert "tokens/s" in capsys.readouterr().out

    # as if the run had been killed in the middle of a line, and of a character
    text = Path("runs/p/predictions.jsonl").read_bytes().splitlines(keepends=True)
    Path("runs/p/predictions.jsonl").write_bytes(b"".join(text[:3]) + text[3][:20] + "猫".encode()[:2])
    asked: list[Any] = []
    submit = Generator.submit
    monkeypatch.setattr(
        Generator, "submit", lambda self, request, *to: asked.append(request) or submit(self, request, *to)
    )
    assert run(model) == 0
    assert len(asked) == len(whole) - 3
    assert sorted(lines(), key=lambda row: row["id"]) == whole

    asked.clear()
    assert run(model) == 0 and not asked  # nothing is left to do


class Slow:
    """A generator whose first question is answered after all others; the base's answers come last."""

    def __init__(self, rows: int, path: Path) -> None:
        self.rows, self.path = rows, path
        self.asked: list[Answer] = []
        self.written: list[int] = []  # lines there when the first question's last answer ends

    def submit(self, request: Request, listener: Any = None) -> Answer:
        answer = Answer(len(self.asked), request, None, lambda: None, listener)
        self.asked.append(answer)
        if len(self.asked) == 2 * self.rows:
            threading.Thread(target=self._work).start()
        return answer

    def _work(self) -> None:
        first, *others = self.asked
        first.take(Token(0, 5, finish="length"))  # the adapter's answer to the first question
        for answer in others[1:]:
            answer.take(Token(answer.number, 5, finish="length"))
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and len(self.path.read_text().splitlines()) < self.rows - 1:
            time.sleep(0.01)
        self.written.append(len(self.path.read_text().splitlines()))
        others[0].take(Token(1, 5, finish="length"))


def test_a_slow_answer_holds_no_other_row_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["mode=predict", "data=demo", f"model.path={model}", *SMALL, *SHORT, "generate.limit=3"])
    generation = prepare_generation(config)
    monkeypatch.setattr(answering, "sides", lambda generation: ("adapter", "base"))
    looked: list[int] = []
    get = queue.SimpleQueue.get

    class Counted(queue.SimpleQueue):  # type: ignore[type-arg]
        def get(self, *args: Any, **options: Any) -> Any:
            looked.append(1)
            return get(self, *args, **options)

    monkeypatch.setattr(answering.queue, "SimpleQueue", Counted)
    job = answering.AnswerJob(generation, questions_of(generation), Path(), frozenset())
    path = job.path
    path.touch()
    slow = Slow(3, path)
    tokens = answering._answer(job, slow)  # type: ignore[arg-type]
    assert slow.written == [2] and tokens == 6 and len(path.read_text().splitlines()) == 3
    # Once for each answer at most (fewer if the row is complete before its pieces are taken): no busy loop.
    assert len(looked) in range(1, 7)


def test_the_end_of_the_session_ends_it(model: Path) -> None:
    class Broken(Slow):
        def _work(self) -> None:
            for answer in self.asked:
                answer.fail(UserError("an actor died"))

    config = compose(["mode=predict", "data=demo", f"model.path={model}", *SMALL, *SHORT, "generate.limit=4"])
    generation = prepare_generation(config)
    job = answering.AnswerJob(generation, questions_of(generation), Path(), frozenset())
    with pytest.raises(UserError, match="an actor died"):
        answering._answer(job, Broken(2, job.path))  # type: ignore[arg-type]


def test_a_full_disk_is_told_as_one(model: Path) -> None:
    class Quick(Slow):
        def _work(self) -> None:
            for answer in self.asked:
                answer.take(Token(answer.number, 5, finish="length"))

    config = compose(["mode=predict", "data=demo", f"model.path={model}", *SMALL, *SHORT, "generate.limit=4"])
    generation = prepare_generation(config)
    job = answering.AnswerJob(generation, questions_of(generation), Path(), frozenset())
    job.path.symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"predictions cannot be written.*No space left.*it continues"):
        answering._answer(job, Quick(2, job.path))  # type: ignore[arg-type]
    held_out = HeldOut(generation, Path("nowhere/losses.json"), {}, [], {})
    with pytest.raises(UserError, match=r"losses cannot be written.*it continues"):
        measure(held_out, "base", None, itertools.count())  # type: ignore[arg-type]


def test_a_row_that_went_wrong_says_why(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = RowSampler.next

    def fails_once(self: RowSampler, logits: Any) -> Any:
        if self.number == 1:
            raise ValueError("no such setting")
        return choose(self, logits)

    monkeypatch.setattr(RowSampler, "next", fails_once)
    assert run(model, "generate.limit=3", "generate.repetition_penalty=1.2") == 0
    rows = lines()
    assert sorted(row["finish"] == "error" for row in rows) == [False, False, True]
    assert [row["error"] for row in rows if "error" in row] == ["ValueError: no such setting"]
    assert "ended with an error: ValueError: no such setting" in capsys.readouterr().out
    # the table says so, and the same command asks again
    assert cli.main(["mode=eval", "run.name=p"]) == 0
    assert "1 of the rows ended with an error" in capsys.readouterr().out
    assert "1 of the rows ended with an error" in Path("runs/p/eval.md").read_text()
    monkeypatch.setattr(RowSampler, "next", choose)
    good = [row for row in rows if "error" not in row]
    assert run(model, "generate.limit=3", "generate.repetition_penalty=1.2") == 0
    assert "3 rows, 2 of them answered already" in capsys.readouterr().out
    again = lines()
    assert len(again) == 3 and again[:2] == good and not any("error" in row for row in again)
    assert cli.main(["mode=eval", "run.name=p"]) == 0
    assert "with an error" not in capsys.readouterr().out


def test_options_without_probabilities_end_their_row_alone(tmp_path: Path) -> None:
    question = Question(3, "q", (), "A", (1,), "row 4", Options((1,), {"A": 5, "B": 6}))
    answer: Any = SimpleNamespace(text="A", finish="stop", tokens=[5, 2], error="", logprobs=[])
    failed: Any = SimpleNamespace(text="", finish="error", tokens=[], error="not finite", logprobs=[])
    answering._write(tmp_path / "predictions.jsonl", question, [answer], [failed])
    row = json.loads((tmp_path / "predictions.jsonl").read_text())
    assert row["error"] == "not finite" and "option_logits" not in row and row["predict"] == "A"


def test_predictions_of_another_program_are_not_deleted(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/p").mkdir(parents=True)
    file, theirs = Path("runs/p/predictions.jsonl"), '{"prompt": "a", "predict": "b", "label": "c"}\n'
    file.write_text(theirs)
    assert run(model, "generate.limit=1") == 2
    assert "another program" in capsys.readouterr().err and file.read_text() == theirs
    assert run(model, "generate.limit=1", "run.overwrite=true") == 0
    assert len(lines()) == 1 and lines()[0]["label"] != "c"


def test_other_settings_are_not_gone_on_with(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "generate.limit=2") == 0
    before = lines()
    assert run(model, "generate.limit=2", "generate.repetition_penalty=1.5") == 2
    error = capsys.readouterr().err
    assert "repetition_penalty" in error and "run.overwrite=true" in error and lines() == before
    assert run(model, "generate.limit=2", "generate.temperature=0.5") == 2
    assert (
        "found temperature=0.0; required temperature=0.5" in capsys.readouterr().err
    )  # not seed, which follows
    # As the configuration of a run that was resumed asks for it: nothing is resumed here.
    again = ("generate.repetition_penalty=1.5", "run.overwrite=true", "trainer.resume=latest")
    assert run(model, "generate.limit=2", *again) == 0
    assert len(lines()) == 2 and lines() != before


def test_a_command_that_failed_before_its_first_answer_stops_no_other(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the wrong model, or of a machine that ran out of memory while it loaded."""

    def fails(*_: Any) -> int:
        raise UserError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr("kt_ray.modes.predict.answer", fails)
        assert run(model, "generate.limit=2") == 2
    assert "no memory" in capsys.readouterr().err and Path("runs/p/predictions.json").exists()
    assert run(model, "generate.limit=2", "generate.repetition_penalty=1.5") == 0
    assert len(lines()) == 2


def test_an_adapter_of_another_model_is_refused_by_its_base(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is loaded or written: as where model.path is left out, and the demo would answer."""
    other = build_checkpoint(tmp_path / "other", "qwen3_moe")
    foreign = random_adapter(other, tmp_path / "foreign", ("q_proj",), rank=3, alpha=6.0, experts=False)
    for mode in ("predict", "chat"):
        assert run(model, f"mode={mode}", f"generate.adapter={foreign}") == 2
        error = capsys.readouterr().err
        assert "the adapter does not fit this model" in error and "as its base: set model.path" in error
    assert not Path("runs/p").exists()


def test_the_date_of_a_template_stays_that_of_the_answers(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("dated.jinja").write_text(
        "{{ strftime_now('%Y-%m-%d') }}\n{% for m in messages %}"
        "{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    template = "model.chat_template=dated.jinja"
    assert run(model, template, "generate.limit=1", "data.date=2024-02-03") == 0
    assert run(model, template, "generate.limit=2") == 0  # on a later day
    assert "2 rows, 1 of them answered already" in capsys.readouterr().out
    assert [row["prompt"][:10] for row in lines()] == ["2024-02-03"] * 2
    assert run(model, template, "generate.limit=2", "data.date=2024-02-04") == 2
    assert "date=2024-02-03" in capsys.readouterr().err
    assert run(model, template, "generate.limit=1", "run.overwrite=true") == 0
    assert lines()[0]["prompt"][:10] != "2024-02-03"


def test_all_that_lines_depend_on_is_a_setting(model: Path) -> None:
    generation = prepare_generation(
        compose(["mode=predict", "data=demo", f"model.path={model}", *SMALL, *SHORT])
    )
    row = questions_of(generation)[0]
    chosen = dataclasses.replace(row, options=Options(row.ids, {"A": 5, "B": 6}))
    experts = dataclasses.replace(generation.config.rule.experts, backend="AMXINT4")
    config = dataclasses.replace(
        generation.config, rule=dataclasses.replace(generation.config.rule, experts=experts)
    )
    cases = [
        (generation, row),
        (generation, dataclasses.replace(row, label="another answer")),
        (generation, chosen),
        (generation, dataclasses.replace(row, options=Options(row.ids, {"A": 5, "B": 7}))),
        (dataclasses.replace(generation, eos=(*generation.eos, 7)), row),
        (dataclasses.replace(generation, config=config), row),
        (dataclasses.replace(generation, plan=dataclasses.replace(generation.plan, dtype="bfloat16")), row),
        (
            dataclasses.replace(generation, config=with_keys(config, {"model.attn_implementation": "eager"})),
            row,
        ),
    ]
    found = [json.dumps(answering._settings(m, [question])) for m, question in cases]
    assert len(set(found)) == len(cases)


def test_answers_of_another_precision_are_not_gone_on_with(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, "generate.limit=1") == 0
    assert run(model, "generate.limit=2", "model.dtype=bfloat16") == 2
    assert "dtype=float32" in capsys.readouterr().err
    settings = Path("runs/p/predictions.json")
    earlier = json.loads(settings.read_text())
    for name in ("date", "dtype", "attn_implementation", "latent_keys"):  # a version that did not know them
        del earlier[name]
    earlier["model"] = earlier["model"][:64]  # nor the second half of a fingerprint
    settings.write_text(json.dumps(earlier))
    assert run(model, "generate.limit=2") == 0
    assert "2 rows, 1 of them answered already" in capsys.readouterr().out


def test_before_and_after_an_adapter(model: Path) -> None:
    train = [
        "trainer.max_steps=2",
        "trainer.batch_size=4",
        "optim.lr=0.05",
        "trainer.eval_every=0",
        "run.name=t",
    ]
    assert cli.main(["data=demo", f"model.path={model}", *SMALL, *SHORT[1:], *train]) == 0
    assert run(model, "generate.limit=4", "generate.answer=both", "generate.adapter=runs/t") == 0
    both = sorted(lines(), key=lambda row: row["id"])
    assert any(row["predict"] != row["base"] for row in both)
    assert run(model, "generate.limit=4", "run.name=p2") == 0
    base = [json.loads(line) for line in Path("runs/p2/predictions.jsonl").read_text().splitlines()]
    assert [row["base"] for row in both] == [r["predict"] for r in sorted(base, key=lambda row: row["id"])]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("generate.answer=both", "needs an adapter"),
        ("generate.adapter=nowhere", "not an adapter directory"),
        ("generate.max_new_tokens=600", "longer than the model's context"),
        ("data.eval_fraction=0", "needs held-out rows"),
    ],
)
def test_what_cannot_be_is_refused(
    model: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, override) == 2
    error = capsys.readouterr().err
    assert message in error and "To fix" in error and not Path("runs").exists()


@pytest.mark.parametrize(
    ("wide", "remedy"),
    [
        ("generate.cache_tokens=1000000", "generate.cache_tokens=auto"),
        ("generate.batch_size=8192", r"generate\.batch_size=\d+"),
        ("generate.batch_size=8", None),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    model: Path,
    wide: str,
    remedy: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the remedy the plan fits."""
    host, common = this_host(), ["mode=predict", "data=demo", f"model.path={model}", *SMALL, *SHORT]
    (budget,) = prepare_generation(compose([*common, wide])).plan.budgets
    caches = budget.items["caches"]
    memory = budget.total - caches + caches // 3 if remedy else budget.total // 1000
    sockets = tuple(dataclasses.replace(socket, memory_bytes=memory) for socket in host.sockets[:1])
    monkeypatch.setattr("kt_ray.runs.prepare.this_host", lambda: dataclasses.replace(host, sockets=sockets))
    monkeypatch.setattr("kt_ray.actors.local_cluster.LocalCluster.start", lambda _: pytest.fail("started"))
    assert run(model, wide) == 2
    error = capsys.readouterr().err
    assert "caches do not fit" in error and "GB needed" in error
    assert not Path("runs/p/predictions.jsonl").exists()
    found = re.search(r"To fix: set (\S+) \(", error)
    if remedy is None:
        assert found is None and "nothing tried makes it fit" in error
        return
    assert found is not None and re.fullmatch(remedy, found[1])
    assert prepare_generation(compose([*common, wide, found[1]])).plan.fits


def test_a_question_longer_than_the_caches_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, "generate.cache_tokens=13") == 2
    error = capsys.readouterr().err
    assert "longer than the key-value caches" in error and "generate.cache_tokens=" in error


def test_a_chat(model: Path) -> None:
    config = compose(
        [
            *("mode=chat", f"model.path={model}", "data=demo", *SMALL),
            *("generate.max_new_tokens=8", "generate.system=Be"),
        ]
    )
    generation, out = prepare_generation(config), io.StringIO()
    script = iter(
        ["hello", "/adapter on", "/adapter", "again", "/nothing", "", "/reset", "hello", "/exit", "not read"]
    )
    with generating(generation, "chat") as generator:
        chat = Chat(generation, generator, out)
        chat.run(lambda: next(script, None))
        roles = [message["role"] for message in chat.messages]
        answered = chat.messages[-1]["content"] if len(roles) == 3 else ""
        rows = list(held_out_rows(config))
    text = out.getvalue()
    assert "the base model answers" in text and "there is no adapter" in text and "unknown command" in text
    assert text.count("[8 tokens") + text.count(", stop]") >= 3 and "forgotten" in text
    assert roles[0] == "system" and (not answered or text.count(answered) >= 2)  # greedy: the same again
    assert next(script) == "not read" and rows
