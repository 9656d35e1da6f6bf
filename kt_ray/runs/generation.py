"""A model that is to generate: checked with its adapter, its tokenizer, and what ends an answer.

mode=predict, eval, chat and serve begin here; a training run that answers questions at its end as well.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kt_ray.actors.cluster import ActorCluster
from kt_ray.adapter.from_peft import AdapterReader, adapter_directory, settings_of, state_of
from kt_ray.adapter.peft_config import TEMPLATE
from kt_ray.config.schema import Config, LoraConfig, ModelConfig
from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.template import ChatEncoder
from kt_ray.data.tokenizer_files import load_tokenizer
from kt_ray.errors import UserError
from kt_ray.generate.generator import Generator
from kt_ray.generate.requests import Request, Sampling
from kt_ray.hardware.rate_files import rates_for
from kt_ray.model.caches import can_join
from kt_ray.model.family import read_family
from kt_ray.parse import check_shape, read_json, read_text
from kt_ray.placement.generation_memory import generates, room
from kt_ray.runs.prepare import PreparedModel, model_directory, prepare_model
from kt_ray.runs.start_cluster import started
from kt_ray.timing.sampling_seconds import joins_calls
from kt_ray.tracking.console import say
from kt_ray.train.cluster_protocol import ActorLost

logger = logging.getLogger(__name__)

_HOUR = 3600.0  # seconds
NO_LORA = LoraConfig(target_modules="none", experts=False)


@dataclass(frozen=True)
class PreparedGeneration(PreparedModel):
    """A checked model that can generate; its configuration has the adapter's LoRA settings."""

    encoder: ChatEncoder  # tokenizer and chat template
    eos: tuple[int, ...]  # token ids that end an answer
    adapter: str | None = None  # adapter directory, or None
    # name -> adapter directory, where requests name one
    adapters: Mapping[str, str] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Any:
        return self.encoder.tokenizer

    @property
    def context(self) -> int | None:
        """Tokens that the model was made for; None = it does not say."""
        return self.plan.dims.context or None

    @property
    def cache_tokens(self) -> int:
        """Tokens that one replica's caches have room for."""
        return room(self.plan.dims, self.config)

    def session(self, max_rows: int) -> dict[str, Any]:
        """Settings of a session of generation with so many rows in a replica (see SessionSpec)."""
        config, plan = self.config, self.plan
        # Rows of a training's round are divided; elsewhere every replica may be full.
        rows = max_rows if generates(config) or config.trainings else math.ceil(max_rows / plan.replicas)
        joined = plan.replicas > 1 and joins_calls(
            plan, config, rates_for(config, plan.hardware), rows=rows, context=config.data.max_length
        )
        return {
            "max_rows": max_rows,
            "prefill_tokens": config.generate.prefill_tokens,
            "cache_tokens": self.cache_tokens,
            "joined": joined,
        }

    def prompt(
        self,
        messages: tuple[Turn, ...],
        tools: tuple[dict[str, Any], ...] | None = None,
        where: str = "this conversation",
    ) -> tuple[int, ...]:
        """Token ids of a conversation with the header of the answer to come; `where` is for the error."""
        return tuple(self.encoder.prompt_ids(messages, tools=tools, where=where))

    def request(self, prompt: tuple[int, ...], where: str, *, adapter: bool, seed: int) -> Request:
        """A request under the settings of `generate`.

        Args:
            where: whose prompt it is, for the error.

        Raises:
            UserError: prompt and answer are longer than the model's context, or than the caches.
        """
        generate = self.config.generate
        total = len(prompt) + generate.max_new_tokens
        if self.context is not None and total > self.context:
            whose, limit = "model's context", self.context
            remedy = "lower generate.max_new_tokens or shorten the prompt"
        else:
            whose, limit = "key-value caches", self.cache_tokens
            remedy = f"set generate.cache_tokens={total} or more"
        if total > limit:
            raise UserError(
                f"prompt and answer are longer than the {whose}",
                where=where,
                observed=f"{len(prompt)} tokens and generate.max_new_tokens={generate.max_new_tokens}",
                required=f"at most {limit} tokens together",
                remedy=remedy,
            )
        sampling = Sampling(
            max_new_tokens=generate.max_new_tokens,
            min_new_tokens=generate.min_new_tokens,
            temperature=generate.temperature,
            top_p=generate.top_p,
            top_k=generate.top_k,
            min_p=generate.min_p,
            repetition_penalty=generate.repetition_penalty,
            seed=seed,
            eos=self.eos,
        )
        return Request(prompt, sampling, adapter, tuple(generate.stop))


def prepare_generation(config: Config, adapters: Mapping[str, str] | None = None) -> PreparedGeneration:
    """Check model, adapters, hardware and plan, cheapest first.

    Args:
        adapters: name -> adapter directory or run, for requests that name one.

    Raises:
        UserError: the first fault.
    """
    model_dir = model_directory(config)
    adapter, readers = None, list[AdapterReader]()
    if config.generate.adapter is not None:
        adapter = adapter_directory(config.generate.adapter)
        readers = [AdapterReader(adapter, model_dir).checked]
    directories = {name: adapter_directory(path, "serve.adapters") for name, path in (adapters or {}).items()}
    if directories:
        readers = [AdapterReader(path, model_dir).checked for path in directories.values()]
    lora = settings_of(readers) if readers else NO_LORA
    model = prepare_model(replace(config, lora=lora), training=False, adapters=readers)
    tokenizer = load_tokenizer(
        config.model.tokenizer or model_dir, "model.tokenizer" if config.model.tokenizer else "model.path"
    )
    named = [adapter] if adapter is not None else list(directories.values())
    config = replace(model.config, model=_with_template(model.config, tokenizer, named))
    return generation_of(replace(model, config=config), tokenizer, adapter, directories)


def _with_template(config: Config, tokenizer: Any, adapters: Sequence[str]) -> ModelConfig:
    """The model's options with the chat template that its adapters were trained with.

    A template that the user names stays, and the tokenizer's own where adapters differ.
    """
    model = config.model
    if model.chat_template is not None or config.data.template is not None:
        return model
    files = [Path(adapter) / TEMPLATE for adapter in adapters]
    files = [file for file in files if file.is_file()]
    texts = {read_text(file, "the adapter's chat template", f"delete {file}") for file in files}
    if not texts or [*texts] == [tokenizer.chat_template]:
        return model
    if len(texts) > 1:
        listed = ", ".join(map(str, files))
        say(f"note: the adapters' chat templates differ, so the tokenizer's is used: {listed}")
        return model
    say(f"chat template: the adapter's ({files[0]})")
    return replace(model, chat_template=str(files[0]))


def generation_of(
    model: PreparedModel,
    tokenizer: Any,
    adapter: str | None = None,
    adapters: Mapping[str, str] | None = None,
) -> PreparedGeneration:
    """The same model with what generation needs besides.

    Raises:
        UserError: the family cannot generate.
    """
    can_join(read_family(model.model_dir).config)  # refuses a family without a cache
    config = model.config
    encoder = ChatEncoder(
        tokenizer,
        config.model.chat_template,
        name=config.data.template,
        date=config.data.date,
        train_on=config.data.train_on,
    )
    shared = {name: getattr(model, name) for name in PreparedModel.__dataclass_fields__}
    return PreparedGeneration(
        **shared,
        encoder=encoder,
        eos=_end_tokens(model.model_dir, encoder),
        adapter=adapter,
        adapters=adapters or {},
    )


def _end_tokens(model_dir: str, encoder: ChatEncoder) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's, those of generation_config.json, and what training taught:
    what the chat template puts behind an answer, or begins the next turn with."""
    tokens: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir) / name
        if path.is_file():
            remedy = f"download {name} again, or delete its eos_token_id"
            stated = read_json(path, name, remedy).get("eos_token_id")
            listed = stated if isinstance(stated, list) else [] if stated is None else [stated]
            tokens.update(check_shape(listed, [int], path, name, remedy, "eos_token_id"))
    if encoder.tokenizer.eos_token_id is not None:
        tokens.add(int(encoder.tokenizer.eos_token_id))
    last = _last_of_answer(encoder)
    # Solar-Open's ends messages, thoughts among them; of its answers another's message is the end, too.
    if last is not None and not (tokens and encoder.ends_thoughts(last)):
        tokens.add(last)
    tokens.update(encoder.tokenizer.added_tokens_encoder[token] for token in encoder.openings.values())
    return tuple(sorted(tokens))


def _last_of_answer(encoder: ChatEncoder) -> int | None:
    """The special token that the template ends an answer with; None = there is none."""
    special = encoder.tokenizer.added_tokens_decoder
    turns: tuple[Turn, ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    system: Turn = {"role": "system", "content": "c"}  # some want one
    for messages in (turns, (system, *turns)):
        with contextlib.suppress(UserError):
            ids, labels = encoder.encode(Conversation(messages, 0, "a conversation of two turns"))
            last = next(
                (int(i) for i, label in zip(ids[::-1], labels[::-1], strict=True) if label >= 0), None
            )
            return last if last in special else None
        # Where the generation prompt opens a thought, the answer cannot be located without one.
        with contextlib.suppress(UserError):
            text = encoder.render(messages).rstrip()
            ids = encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
            return int(ids[-1]) if ids and ids[-1] in special else None
    return None


@contextlib.contextmanager
def generating(generation: PreparedGeneration, name: str) -> Iterator[Generator]:
    """A generator on a started cluster with the adapter loaded; both end with the block.

    Args:
        name: names the Ray namespace.
    """
    with started(generation, name) as cluster:
        load_adapters(generation, cluster)
        with generator_on(generation, cluster) as generator:
            yield generator


def load_adapters(generation: PreparedGeneration, cluster: ActorCluster) -> None:
    """The actors read the adapter, or all that requests will name, if there are any."""

    def load() -> list[str]:
        lines = []
        if generation.adapter is not None:
            count = cluster.load_adapter(generation.adapter)
            lines.append(f"adapter: {generation.adapter}, {count} tensors")
        if generation.adapters:
            count = cluster.load_adapters(generation.adapters)
            lines.append(f"adapters: {', '.join(generation.adapters)}, {count} tensors")
        return lines

    for line in cluster.at_start(load):
        say(line)


def _adapter_states(generation: PreparedGeneration) -> dict[str, object]:
    """See `state_of`; None = the files are not there. By directory."""
    states: dict[str, object] = {}
    for directory in generation.adapters.values():
        states[directory] = None
        with contextlib.suppress(OSError):
            states[directory] = state_of(directory)
    return states


class Revivals:
    """Brings a cluster that serves back after an actor died: `trainer.recoveries` times an hour at most.

    Args:
        restore: on actors with initial LoRA, makes the state that requests rely on; None = loads adapters.
    """

    def __init__(
        self,
        generation: PreparedGeneration,
        cluster: ActorCluster,
        restore: Callable[[], None] | None = None,
    ) -> None:
        self._generation = generation
        self._cluster = cluster
        self._restore = restore or self.load_adapters
        self._adapters = _adapter_states(generation)
        self._limit = generation.config.trainer.recoveries
        self._begun: list[float] = []  # of those in the last hour, on the monotonic clock

    def load_adapters(self) -> None:
        """Those that requests name, as they were when this was made.

        Raises:
            UserError: one has been written anew, before or while it is read.
        """
        self._check_adapters()
        load_adapters(self._generation, self._cluster)
        self._check_adapters()

    def _check_adapters(self) -> None:
        for directory, state in _adapter_states(self._generation).items():
            if state != self._adapters[directory]:
                raise UserError(
                    "an adapter has changed since the server began",
                    where=directory,
                    observed="no adapter" if state is None else "files that were written anew",
                    required="the files that it began with: an actor that is started again reads them again",
                    remedy="start the server again: it then answers with the adapter as it is now",
                )

    def bring_back(self, error: BaseException) -> None:
        """After a session of generation that an error ended: all actors run, with what requests name.

        Raises:
            UserError: it cannot be done, or was done too often; an adapter is another by now.
        """
        begin = time.monotonic()
        while True:
            self._begun = [before for before in self._begun if before > time.monotonic() - _HOUR]
            if len(self._begun) >= self._limit:
                raise self._given_up(error) from error
            self._begun.append(time.monotonic())
            # Of a death the line below says all; other errors are faults to report.
            level = logging.INFO if isinstance(error, ActorLost) else logging.WARNING
            logger.log(level, "generation has ended", exc_info=error)
            number = f"recovery {len(self._begun)} of {self._limit} in an hour"
            say(f"{_what(error)}: starting it again ({number})")
            try:
                self._bring_back(error)
            except ActorLost as another:
                error = another
                continue
            say(f"back after {time.monotonic() - begin:.1f} s")
            return

    def _bring_back(self, error: BaseException) -> None:
        if not isinstance(error, ActorLost):
            self._cluster.discard()  # what the session left in the actors' mailboxes
            return
        self._cluster.recover()
        self._cluster.restart()  # a new actor's LoRA may be any; adapters follow
        self._restore()

    def _given_up(self, error: BaseException) -> UserError:
        return UserError(
            f"{_what(error)}, and all recoveries are used up",
            observed=error.observed if isinstance(error, UserError) else error,
            required=f"at most {self._limit} an hour (trainer.recoveries)",
            remedy="look for the kernel's out-of-memory killer (dmesg) and at the actors' logs, compare "
            "mode=plan with the memory that is free, then start the server again",
        )


def _what(error: BaseException) -> str:
    return error.what if isinstance(error, UserError) else f"generation has ended: {type(error).__name__}"


def generator_on(generation: PreparedGeneration, cluster: ActorCluster) -> Generator:
    """A session of generation under the settings of `generate`; close it, or use it in a `with`."""
    session = generation.session(generation.config.generate.batch_size)
    return Generator(cluster, generation.tokenizer, **session)
