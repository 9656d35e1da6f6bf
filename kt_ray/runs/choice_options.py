"""The options of multiple-choice questions as tokens: what the model would say next for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from kt_ray.data.row_types import Conversation
from kt_ray.errors import UserError
from kt_ray.evaluate.choice import option_answers
from kt_ray.evaluate.predictions import Prediction, Predictions
from kt_ray.evaluate.scores import choice_labels
from kt_ray.generate.generator import Answer
from kt_ray.generate.requests import Request, Sampling
from kt_ray.runs.generation import Setup


@dataclass(frozen=True)
class Options:
    """One question's options.

    Attributes:
        prompt: token ids up to where the answers differ.
        tokens: letter -> token id that stands there.
    """

    prompt: tuple[int, ...]
    tokens: dict[str, int]

    def request(self, adapter: bool) -> Request:
        """One step of generation that tells the options' log-probabilities."""
        sampling = Sampling(max_new_tokens=1, logprobs=0, candidates=tuple(self.tokens.values()))
        return Request(self.prompt, sampling, adapter)

    def logits(self, answer: Answer) -> dict[str, float]:
        """Letter -> log-probability, of the request's answer.

        Raises:
            UserError: the model's logits are not finite.
        """
        if not answer.logprobs:
            raise UserError(
                "the options of a multiple-choice question have no probabilities",
                observed=answer.error or answer.finish,
                remedy="look at the weights and the adapter (python -m kt_ray.tools inspect), or set "
                "eval.choice=off",
            )
        by_id = dict(answer.logprobs[0].top)
        return {letter: by_id[token] for letter, token in self.tokens.items()}


def options_of(made: Setup, rows: Sequence[Conversation]) -> list[Options | None]:
    """The options of every row; None for all of them where the labels are no options.

    Which letters there are, and whether labels are options, is up to eval.choice and eval.letters.

    Raises:
        UserError: eval.choice=on and a label that is no option; options that no token tells apart.
    """
    config = made.config.eval
    labels = tuple(Prediction("", "", row.messages[-1]["content"]) for row in rows)
    if not labels or not choice_labels(
        Predictions("the held-out rows", labels), config.choice, config.letters
    ):
        return [None] * len(rows)
    return [_options(made, row) for row in rows]


def _options(made: Setup, row: Conversation) -> Options:
    before, last = row.messages[:-1], row.messages[-1]
    answers = option_answers(last["content"], made.config.eval.letters)
    ids = {
        letter: _tokens(made, replace(row, messages=(*before, {**last, "content": text})))
        for letter, text in answers.items()
    }
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*ids.values(), strict=False))
    prompt = tuple(tokens[0] for tokens in same)
    tokens = {letter: found[len(prompt)] for letter, found in ids.items() if len(found) > len(prompt)}
    if len(set(tokens.values())) < len(answers) or not prompt:
        raise UserError(
            "the options of a multiple-choice question cannot be told apart by their first token",
            where=row.where,
            observed={letter: list(found[len(prompt) :][:4]) for letter, found in ids.items()},
            required="another token for each option",
            remedy="set eval.choice=off: the generated answers are then compared as text",
        )
    return Options(prompt, tokens)


def _tokens(made: Setup, row: Conversation) -> list[int]:
    """As training sees the row."""
    ids, _ = made.encoder.encode(row)
    return [int(token) for token in ids]
