"""Answers of the policy that trains, and their rewards: sessions of generation between optimizer steps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kt_ray.actors.cluster import ActorCluster
from kt_ray.data.prompts import Prompt
from kt_ray.data.row_types import Row
from kt_ray.disk import only_warned, write_atomic
from kt_ray.errors import UserError
from kt_ray.generate.generator import Answer, Generator
from kt_ray.generate.requests import Request, Sampling
from kt_ray.parse import parse_json
from kt_ray.placement.generation_memory import within_training
from kt_ray.rewards.reward import Completion, Reward
from kt_ray.runs.generation import PreparedGeneration, generation_of, generator_on
from kt_ray.runs.prepare import Prepared
from kt_ray.train.cluster_protocol import ActorLost, GivenUp
from kt_ray.train.rollouts import Rollout

_POLL = 0.5  # seconds between looks whether the run is to end
LOG = "rollouts.jsonl"  # in the run directory: the answers to each round's first prompt


def generation_for(prepared: Prepared) -> PreparedGeneration:
    """The same model as it answers in training.

    Raises:
        UserError: the family cannot generate.
    """
    model = replace(prepared, config=within_training(prepared.config))
    return generation_of(model, prepared.data.tokenizer)


def handed_in(generator: Generator, requests: Sequence[Request]) -> list[Answer]:
    """All at once: which answers share a step then depends on nothing but the requests.

    Raises:
        ActorLost: an actor was found dead when the session opened.
    """
    try:
        return generator.submit_all(requests)
    except UserError as error:
        if isinstance(generator.error, ActorLost):
            raise generator.error from error
        raise


def keep_before(step: int, log: Path) -> None:
    """Of a file of answers keep the whole lines of earlier steps: a resumed run draws the others again."""
    if not log.exists():
        return
    kept = []
    for line in log.read_bytes().splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            record = parse_json(line.decode()) if line.endswith(b"\n") else {}
            if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] < step:
                kept.append(line.decode())
    write_atomic(log, "".join(kept))


class PolicyRollouts:
    """`kt_ray.train.rollouts.Rollouts` on a started cluster.

    Args:
        prompts: by sample id.
        log: a file that some answers are appended to.
        first_step: what it has of this step or later is replaced.
    """

    def __init__(
        self,
        generation: PreparedGeneration,
        cluster: ActorCluster,
        prompts: Mapping[int, Prompt],
        reward: Reward,
        log: Path,
        first_step: int = 0,
    ) -> None:
        self._generation = generation
        self._cluster = cluster
        self._prompts = prompts
        self._reward = reward
        self._log = log
        self._replaced_from: int | None = first_step  # None = that is done

    def sample(self, asked: Sequence[tuple[Row, int]], step: int) -> list[Rollout]:
        requests = [self._request(row, temperature=1.0, seed=seed, logprobs=0) for row, seed in asked]
        rollouts, texts = self._answers([row for row, _ in asked], requests)
        first = asked[0][0].sample_id
        group = [i for i, (row, _) in enumerate(asked) if row.sample_id == first]
        with only_warned(f"{LOG} cannot be written; training goes on"):
            self._write(step, first, [(texts[i], rollouts[i]) for i in group])
        return rollouts

    def most_probable(self, prompts: Sequence[Row]) -> list[Rollout]:
        return self._answers(prompts, [self._request(row) for row in prompts])[0]

    def _request(self, row: Row, **sampling: float | None) -> Request:
        generate = self._generation.config.generate
        return Request(
            tuple(row.input_ids.tolist()),
            Sampling(
                max_new_tokens=generate.max_new_tokens,
                eos=self._generation.eos,
                **sampling,  # type: ignore[arg-type]
            ),
            stop=tuple(generate.stop),
        )

    def _answers(self, rows: Sequence[Row], requests: Sequence[Request]) -> tuple[list[Rollout], list[str]]:
        with generator_on(self._generation, self._cluster) as generator:
            answers = [self._wait(answer) for answer in handed_in(generator, requests)]
        completions = [self._completion(row, answer) for row, answer in zip(rows, answers, strict=True)]
        rewards = self._reward(completions, self._go_on)
        rollouts = [
            Rollout(
                np.array(answer.tokens, dtype=np.int64),
                np.array([token.logprob for token in answer.logprobs], dtype=np.float32),
                float(reward),
                answer.finish == "stop",
            )
            for answer, reward in zip(answers, rewards, strict=True)
        ]
        return rollouts, [answer.text for answer in answers]

    def _wait(self, answer: Answer) -> Answer:
        while True:
            try:
                return answer.result(_POLL)
            except TimeoutError:
                self._go_on()

    def _go_on(self) -> None:
        if reason := self._cluster.give_up():
            raise GivenUp(reason)

    def _completion(self, row: Row, answer: Answer) -> Completion:
        prompt = self._prompts[row.sample_id]
        if answer.finish not in ("stop", "length"):
            raise UserError(
                "an answer of the policy broke off",
                where=prompt.where,
                observed=answer.error or answer.finish,
                remedy="look at the weights and the adapter (python -m kt_ray.tools inspect), lower optim.lr",
            )
        finished = answer.finish == "stop"
        return Completion(prompt.text, answer.text, answer.tokens, finished, prompt.columns, prompt.opened)

    def _write(self, step: int, sample: int, group: Sequence[tuple[str, Rollout]]) -> None:
        answers = [
            {
                "text": text,
                "reward": None if np.isnan(rollout.reward) else rollout.reward,
                "tokens": len(rollout.ids),
                "finished": rollout.finished,
            }
            for text, rollout in group
        ]
        line = {"step": step, "prompt": self._prompts[sample].text, "answers": answers}
        if self._replaced_from is not None:
            keep_before(self._replaced_from, self._log)
            self._replaced_from = None
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
