"""Held-out rows as questions: the prompt before the answer, and the options of a multiple-choice question."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile

from kt_ray.batch import IGNORE
from kt_ray.config.schema import Config
from kt_ray.data.held_out_split import nothing_held_out
from kt_ray.data.load import read_split
from kt_ray.data.prompts import as_prompts, with_answer
from kt_ray.data.row_types import Conversation, Turn
from kt_ray.errors import UserError
from kt_ray.evaluate.answer_file import AnswerFile, AnswerRow
from kt_ray.evaluate.choice import option_answers, without_thinking
from kt_ray.evaluate.scores import choice_labels
from kt_ray.generate.detokenize import TextStream
from kt_ray.generate.generator import Answer
from kt_ray.generate.requests import Request, Sampling
from kt_ray.runs.generation import PreparedGeneration


@dataclass(frozen=True)
class Options:
    """The options of one question, as tokens."""

    prompt: tuple[int, ...]  # token ids up to where the answers differ
    tokens: dict[str, int]  # letter -> the token id there

    def request(self, adapter: bool) -> Request:
        """One step of generation that returns the options' log-probabilities."""
        sampling = Sampling(max_new_tokens=1, logprobs=0, candidates=tuple(self.tokens.values()))
        return Request(self.prompt, sampling, adapter)

    def logits(self, answer: Answer) -> dict[str, float]:
        """Letter -> log-probability, from the answer to `request`, which has not failed."""
        by_id = dict(answer.logprobs[0].top)
        return {letter: by_id[token] for letter, token in self.tokens.items()}


@dataclass(frozen=True)
class Question:
    """One row to answer."""

    id: int  # index of the row in its source
    prompt: str  # its text as the model sees it
    messages: tuple[Turn, ...]  # the same before the template
    label: str  # the answer that the row has
    ids: tuple[int, ...]  # token ids of the prompt
    where: str  # file and line
    options: Options | None = None  # of a multiple-choice question


def questions_of(generation: PreparedGeneration) -> list[Question]:
    """The rows that `generate` names, checked.

    Raises:
        UserError: a row does not fit the model's context; eval.choice=on and a label is no option; the
            first token does not tell the options apart.
    """
    rows = held_out_rows(generation.config)
    config = generation.config.eval
    texts = [_label(generation, row) for row in rows]
    labels = AnswerFile("the held-out rows", tuple(AnswerRow("", "", text) for text in texts))
    is_choice = bool(rows) and choice_labels(labels, config.choice, config.letters) is not None
    options = [_options(generation, row) if is_choice else None for row in rows]
    return [_question(generation, *each) for each in zip(rows, texts, options, strict=True)]


def held_out_rows(config: Config) -> list[Conversation]:
    """The rows that generate.split names, as training sees them.

    The label of a preference pair is the better answer, a prompt's its column `answer`; rows with an unwanted
    answer (KTO) are left out.

    Raises:
        UserError: there are none, or rows without a question.
    """
    prompts = config.trainer.stage == "grpo"
    parts, _, held, _ = read_split(as_prompts(config.data) if prompts else config.data, config.seed)
    if config.generate.split == "eval" and not held:
        count = sum(len(part.rows) for part in parts)
        raise nothing_held_out(config.data, count, "generate.split=eval", "generate.split=all")
    rows = held if config.generate.split == "eval" else [row for part in parts for row in part.rows]
    raw_text = next((row for row in rows if row.text is not None), None)
    if raw_text is not None:
        none = "set eval.after_training=0 to train without questions, or " * (config.mode == "train")
        raise UserError(
            "raw text asks nothing that could be answered",
            where=raw_text.where,
            required="rows with a question and an answer",
            remedy=f"{none}name such rows in data.path, or set data.format if the format was not meant",
        )
    answered = map(with_answer, rows) if prompts else rows
    return [row for row in answered if row.label is not False][: config.generate.limit]


def _question(
    generation: PreparedGeneration, row: Conversation, label: str, options: Options | None
) -> Question:
    messages = row.messages[:-1]
    ids = generation.prompt(messages, row.tools, row.where)
    generation.request(ids, row.where, adapter=False, seed=0)  # refused now, not after hours
    prompt = generation.encoder.render(messages, prompt=True, tools=row.tools)
    return Question(row.sample_id, prompt, messages, label, ids, row.where, options)


def _label(generation: PreparedGeneration, row: Conversation) -> str:
    """The row's answer; one that calls tools as the model would write it."""
    before, last = row.messages[:-1], row.messages[-1]
    if not last.get("tool_calls"):
        return last["content"]
    text = _trained(generation, row)
    if last.get("reasoning_content") and "</think>" not in text:  # the template marks thoughts otherwise
        unthought = Turn(role="assistant", content=last["content"], tool_calls=last["tool_calls"])
        text = _trained(generation, replace(row, messages=(*before, unthought)))
    return without_thinking(text).strip()


def _trained(generation: PreparedGeneration, row: Conversation) -> str:
    """The text of a row's last answer as it is trained, thoughts included."""
    _, labels = generation.encoder.encode(row)
    text = TextStream(generation.tokenizer, skip=generation.eos)
    trained = list(reversed(labels.tolist()))
    answer = takewhile(lambda label: label != IGNORE, dropwhile(lambda label: label == IGNORE, trained))
    return "".join([*map(text.add, reversed([*answer])), text.end()])


def _options(generation: PreparedGeneration, row: Conversation) -> Options:
    before, last = row.messages[:-1], row.messages[-1]
    answers = option_answers(last["content"], generation.config.eval.letters)
    ids: dict[str, list[int]] = {}  # as training sees the row with each answer
    for letter, text in answers.items():
        # Not with the row's own thoughts, which may name the right one.
        turns = (*before, Turn(role="assistant", content=text))
        try:
            encoded, _ = generation.encoder.encode(replace(row, messages=turns))
        except UserError:  # a template whose prompt opens a thought, and which writes none without one
            turns = (*before, Turn(role="assistant", content=text, reasoning_content="\n"))
            encoded, _ = generation.encoder.encode(replace(row, messages=turns))
        ids[letter] = encoded.tolist()
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*ids.values(), strict=False))
    prompt = tuple(tokens[0] for tokens in same)
    tokens = {letter: of_row[len(prompt)] for letter, of_row in ids.items() if len(of_row) > len(prompt)}
    if len(set(tokens.values())) < len(answers) or not prompt:
        raise UserError(
            "the options of a multiple-choice question cannot be told apart by their first token",
            where=row.where,
            observed={letter: list(of_row[len(prompt) :][:4]) for letter, of_row in ids.items()},
            required="another token for each option",
            remedy="set eval.choice=off: the generated answers are then compared as text",
        )
    return Options(prompt, tokens)
