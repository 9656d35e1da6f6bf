"""What a run shows when it has trained: held-out questions answered by base and adapter, and their scores.

The actors that trained answer them, so nothing is loaded again; the files are those of mode=predict
(predictions.jsonl, predictions.json) and mode=eval (eval.md, eval.json), in the run directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kt_ray.actors.cluster import ActorCluster
from kt_ray.data.template import ChatEncoder
from kt_ray.errors import UserError
from kt_ray.evaluate.predictions import find_answers
from kt_ray.evaluate.table import Comparison, spread
from kt_ray.generate.generator import Generator
from kt_ray.model.build import build_on_meta
from kt_ray.model.caches import can_join
from kt_ray.modes.eval import evaluate, losses_of_run, write
from kt_ray.modes.generation import Setup, ends_of
from kt_ray.modes.predict import ROWS, Question, answer_all, open_predictions, question_of, settings_of
from kt_ray.modes.prepare import Prepared, meta_spec
from kt_ray.rundir import RunDir


@dataclass(frozen=True)
class Story:
    """Questions that are ready to be asked when training ends."""

    setup: Setup
    questions: Sequence[Question]


def prepare_story(prepared: Prepared, rundir: RunDir | None = None) -> Story | None:
    """Questions for eval.after_training; None = none were asked for. Needs no actor.

    Raises:
        UserError: no held-out rows, rows without a question, a prompt beyond the model's context, or a model
            that cannot generate.
    """
    config = prepared.config
    count = config.eval.after_training
    if not count:
        return None
    rows = prepared.data.eval_conversations
    if not rows:
        raise UserError(
            "there are no held-out rows to answer after training",
            where="eval.after_training",
            observed=count,
            required="data.eval_path, or data.eval_fraction above 0",
            remedy="set eval.after_training=0, or hold rows out",
        )
    generate = replace(config.generate, answer="both", split="eval", adapter=None)
    encoder = ChatEncoder(
        prepared.data.tokenizer,
        config.model.chat_template,
        name=config.data.template,
        train_on=config.data.train_on,
    )
    whole = build_on_meta(meta_spec(config, prepared.plan.dims, prepared.model_dir)).base.config
    can_join(whole)  # refuses a family without a cache
    context = getattr(whole, "max_position_embeddings", None)
    setup = Setup(
        config=replace(config, generate=generate),
        model_dir=prepared.model_dir,
        fingerprint=prepared.fingerprint,
        plan=prepared.plan,
        formulas=prepared.formulas,
        root=prepared.root,
        adapter=None if rundir is None else str(rundir.adapter),
        encoder=encoder,
        eos=ends_of(prepared.model_dir, encoder),
        context=context if isinstance(context, int) and context > 0 else None,
    )
    return Story(setup, [question_of(setup, rows[i]) for i in spread(len(rows), count)])


def tell_story(story: Story, rundir: RunDir, cluster: ActorCluster) -> Comparison:
    """Answer the questions on a cluster that has trained; write and return the comparison.

    A run that was resumed answers again: its adapter is another one.
    """
    made = replace(story.setup, adapter=str(rundir.adapter))
    generate = made.config.generate
    open_predictions(rundir.path, settings_of(made, list(story.questions)), overwrite=True)
    with Generator(
        cluster, made.tokenizer, max_rows=generate.batch_size, prefill_tokens=generate.prefill_tokens
    ) as generator:
        answer_all(made, generator, list(story.questions), rundir.path / ROWS)
    base, adapter = find_answers(rundir.path)
    result = evaluate(made.config, base, adapter, losses_of_run(rundir.path))
    write(result, rundir.path)
    return result
