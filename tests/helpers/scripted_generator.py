"""A generator that says what the test wants, and what is served with it. No model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kt_ray.generate.generator import Answer
from kt_ray.generate.requests import Request, Token
from kt_ray.serve.access import digest
from kt_ray.serve.completions import Served

KEY = "a key"
CONTEXT = 64


class Scripted:
    """A generator whose answers come when the test says so.

    Attributes:
        asked: requests so far. cancelled: their numbers.
    """

    def __init__(self, tokenizer: Any, says: str = "one two three") -> None:
        self.tokenizer = tokenizer
        self.says = tokenizer(says, add_special_tokens=False)["input_ids"]
        self.error: BaseException | None = None
        self.asked: list[Request] = []
        self.answers: list[Answer] = []
        self.cancelled: list[int] = []
        self.waits = False  # answers stop before their last token

    def submit_all(self, requests: Sequence[Request], listeners: Sequence[Any]) -> list[Answer]:
        return list(map(self.submit, requests, listeners))

    def submit(self, request: Request, listener: Any = None) -> Answer:
        number = len(self.asked)
        self.asked.append(request)
        answer = Answer(number, request, self.tokenizer, lambda: self._cancel(number), listener)
        self.answers.append(answer)
        ids = self.says[: request.sampling.max_new_tokens]
        for place, token in enumerate(ids):
            last = place == len(ids) - 1
            if not (last and self.waits):
                answer.take(Token(number, token, -0.5, ((token, -0.5),), "length" if last else ""))
        return answer

    def close(self) -> None:
        """Nothing runs."""

    def _cancel(self, number: int) -> None:
        self.cancelled.append(number)
        self.answers[number].take(Token(number, -1, finish="cancelled"))


def served(**changes: Any) -> Served:
    settings: dict[str, Any] = {
        "name": "base",
        "adapters": ("neko",),
        "tokenizer": "",
        "template": None,
        "template_name": None,
        "date": None,
        "eos": (1,),
        "context": CONTEXT,
        "max_tokens": None,
        "running": 2,
        "max_queue": 1,
        "session": {},
        "max_body": 2000,
        "key": digest(KEY),
        "fingerprint": "0123456789abcdef",
        "created": 7,
    }
    return Served(**{**settings, **changes})
