"""mode=chat: talk to the model in the terminal.

/adapter on|off   who answers from now on; without a word, says who does
/reset            forget the conversation
/exit             or Ctrl-D; Ctrl-C ends an answer or clears the line, and twice in a row ends the chat
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from typing import TextIO

from kt_ray.config.schema import Config
from kt_ray.data.row_types import Turn
from kt_ray.errors import UserError
from kt_ray.generate.generator import Generator
from kt_ray.runs.generation import PreparedGeneration, generating, prepare_generation
from kt_ray.runs.start_cluster import Ended
from kt_ray.terminal import visible

HELP = "/adapter on|off, /reset, /exit (Ctrl-C ends an answer)"


def run(config: Config) -> int:
    """Until /exit or the end of the input. Returns the exit code."""
    generation = prepare_generation(config)
    with generating(generation, f"{config.model.name}-chat") as generator:
        Chat(generation, generator, sys.stdout).run(_reader(sys.stdin))
    return 0


def _reader(source: TextIO) -> Callable[[], str | None]:
    """Lines that a person types, with line editing on a terminal; None = the end.

    There Ctrl-C clears the line, and a second one in a row is the end. Bytes that are no text, as of a
    terminal with another encoding, are each read as one character.
    """
    if isinstance(source, io.TextIOWrapper):
        source.reconfigure(errors="replace")
    if source.isatty():
        import readline  # noqa: F401  (input() edits lines and keeps a history with it)

    interrupted = False  # the line before this one

    def read() -> str | None:
        nonlocal interrupted
        if not source.isatty():
            line = source.readline()
            return line.rstrip("\n") if line else None
        try:
            line = input("> ")
        except EOFError:
            return None
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Ended):
                raise
            if interrupted:
                return None
            interrupted = True
            print("\nCtrl-C again or Ctrl-D ends the chat")
            return ""
        interrupted = False
        return line

    return read


class Chat:
    """One conversation.

    Args:
        generation: model, tokenizer and settings.
        generator: that answers.
        out: where answers go.

    Attributes:
        messages: so far. adapter: whether it takes part.
    """

    def __init__(self, generation: PreparedGeneration, generator: Generator, out: TextIO) -> None:
        self.generation = generation
        self.generator = generator
        self.out = out
        self.adapter = generation.adapter is not None
        self.messages: list[Turn] = []
        self._turns = 0
        self.reset()

    def reset(self) -> None:
        """Only the system prompt is left."""
        system = self.generation.config.generate.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def run(self, read: Callable[[], str | None]) -> None:
        """Answer line after line."""
        self._say(f"{self._who()} answers. {HELP}")
        while (line := read()) is not None:
            line = line.strip()
            if line == "/exit":
                return
            if line.startswith("/"):
                self.command(line)
            elif line:
                self.ask(line)

    def command(self, line: str) -> None:
        """/adapter and /reset."""
        name, _, value = line.partition(" ")
        value = value.strip()
        if name == "/reset":
            self.reset()
            self._say("the conversation is forgotten")
        elif name == "/adapter" and value in ("", "on", "off"):
            if value == "on" and self.generation.adapter is None:
                self._say("there is no adapter: start with generate.adapter=<directory>")
                return
            self.adapter = self.adapter if not value else value == "on"
            self._say(f"{self._who()} answers")
        else:
            self._say(f"unknown command {line}: {HELP}")

    def ask(self, text: str) -> None:
        """One question and its answer, streamed."""
        messages: tuple[Turn, ...] = (*self.messages, {"role": "user", "content": text})
        seed = self.generation.config.seed + self._turns
        self._turns += 1
        try:
            prompt = self.generation.prompt(messages)
            request = self.generation.request(prompt, "this conversation", adapter=self.adapter, seed=seed)
        except UserError as error:
            self._say(f"{error.line()} (/reset begins anew)")
            return
        start = time.monotonic()
        answer = self.generator.submit(request)
        first = 0.0
        try:
            for piece in answer:
                first = first or time.monotonic() - start
                self.out.write(visible(piece.text))
                self.out.flush()
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Ended):
                raise
            answer.cancel()
            answer.result()
        seconds = time.monotonic() - start
        rate = (len(answer.tokens) - 1) / max(seconds - first, 1e-9)
        self._say(
            f"\n[{len(answer.tokens)} tokens, first after {first:.2f} s, "
            f"then {rate:.1f} per s, {answer.finish}{f': {answer.error}' if answer.error else ''}]"
        )
        if answer.text.strip():
            opened = "<think>" if self.generation.encoder.opens_thought(prompt) else ""
            self.messages = [*messages, {"role": "assistant", "content": opened + answer.text}]

    def _who(self) -> str:
        return f"adapter {self.generation.adapter}" if self.adapter else "the base model"

    def _say(self, line: str) -> None:
        self.out.write(visible(line) + "\n")
        self.out.flush()
