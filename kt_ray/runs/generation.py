"""What predict, eval and chat share: a checked configuration, a started cluster, a generator."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kt_ray.actors.cluster import ActorCluster
from kt_ray.actors.local_cluster import LocalCluster
from kt_ray.actors.specs import actor_specs
from kt_ray.checkpoint import check_content, check_non_experts
from kt_ray.config.schema import Config, LoraConfig
from kt_ray.data.template import ChatEncoder, load_tokenizer
from kt_ray.data.row_types import Conversation, Turn
from kt_ray.demo import resolve_model_dir
from kt_ray.errors import UserError
from kt_ray.adapter.from_peft import AdapterReader, adapter_directory, settings_of
from kt_ray.generate.generator import Generator
from kt_ray.generate.requests import Request, Sampling
from kt_ray.model.build import build_on_meta
from kt_ray.model.caches import can_join
from kt_ray.model.family import read_family
from kt_ray.runs.prepare import Prepared, _check_formulas, _check_isa, _meta_spec, open_checkpoint
from kt_ray.native import ExpertFormula
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.placement.generation_memory import room
from kt_ray.hardware.describe import this_host
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.tracking.progress import LoadProgress

NO_LORA = LoraConfig(target_modules="none", experts=False)


@dataclass(frozen=True)
class Setup:
    """A checked configuration: nothing in it needs an actor.

    Attributes:
        config: with the LoRA settings of the adapter.
        model_dir: resolved Hugging Face directory. fingerprint: of its weights.
        adapter: adapter directory, or None.
        adapters: name -> adapter directory, where requests name one.
        encoder: tokenizer and chat template. eos: token ids that end an answer.
        context: tokens that the model was made for; None = it does not say.
    """

    config: Config
    model_dir: str
    fingerprint: str
    plan: Plan
    formulas: Mapping[int, ExpertFormula]
    root: str
    adapter: str | None
    encoder: ChatEncoder
    eos: tuple[int, ...]
    context: int | None
    adapters: Mapping[str, str] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Any:
        return self.encoder.tokenizer

    @property
    def cache_tokens(self) -> int:
        """Tokens that one replica's caches have room for."""
        return room(self.plan.dims, self.config)

    def prompt(
        self, messages: tuple[Turn, ...], tools: tuple[dict[str, Any], ...] | None = None
    ) -> tuple[int, ...]:
        """Token ids of a conversation with the header of the answer to come."""
        text = self.encoder.render(messages, prompt=True, tools=tools)
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def request(self, prompt: tuple[int, ...], where: str, *, adapter: bool, seed: int) -> Request:
        """A request under the settings of `generate`.

        Raises:
            UserError: prompt and answer are longer than the model's context, or than the caches; `where`
                says whose.
        """
        generate = self.config.generate
        total = len(prompt) + generate.max_new_tokens
        if self.context is not None and total > self.context:
            raise UserError(
                "prompt and answer are longer than the model's context",
                where=where,
                observed=f"{len(prompt)} tokens and generate.max_new_tokens={generate.max_new_tokens}",
                required=f"at most {self.context} tokens together",
                remedy="lower generate.max_new_tokens or shorten the prompt",
            )
        if total > self.cache_tokens:
            raise UserError(
                "prompt and answer are longer than the key-value caches",
                where=where,
                observed=f"{len(prompt)} tokens and generate.max_new_tokens={generate.max_new_tokens}",
                required=f"at most {self.cache_tokens} tokens together",
                remedy=f"set generate.cache_tokens={total} or more",
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


def setup(config: Config, named: Mapping[str, str] | None = None) -> Setup:
    """Check model, adapters, hardware and plan, cheapest first.

    Args:
        named: adapters that requests will name -> what the user calls their directory.

    Raises:
        UserError: the first fault.
    """
    model_dir = os.path.abspath(resolve_model_dir(config.model))
    dims = dims_from_dir(model_dir)
    adapter, lora = None, NO_LORA
    if config.generate.adapter is not None:
        adapter = adapter_directory(config.generate.adapter)
        lora = AdapterReader(adapter, model_dir).config
    adapters = {name: adapter_directory(path, "serve.adapters") for name, path in (named or {}).items()}
    if adapters:
        lora = settings_of([AdapterReader(directory, model_dir) for directory in adapters.values()])
    config = replace(config, lora=lora)
    hardware = this_host()
    plan = make_plan(dims, config, hardware)
    _check_isa(config)
    index, layout, gguf, stored = open_checkpoint(config, model_dir, dims)
    if stored != dims:
        plan = make_plan(stored, config, hardware)
    _check_fits(plan, config)
    tokenizer = load_tokenizer(
        config.model.tokenizer or model_dir, "model.tokenizer" if config.model.tokenizer else "model.path"
    )
    encoder = ChatEncoder(
        tokenizer, config.model.chat_template, name=config.data.template, date=config.data.date
    )
    whole = build_on_meta(_meta_spec(config, dims, model_dir))
    _check_formulas(layout, whole.formulas)
    check_non_experts(index, whole.causal, layout=layout)
    check_content(index)
    can_join(whole.base.config)  # refuses a family without a cache
    return Setup(
        config=config,
        model_dir=model_dir,
        fingerprint=index.fingerprint if gguf is None else f"{index.fingerprint} {gguf.fingerprint}",
        plan=plan,
        formulas=whole.formulas,
        root=whole.root,
        adapter=adapter,
        encoder=encoder,
        eos=_ends(model_dir, encoder),
        context=dims.context or None,
        adapters=adapters,
    )


def _check_fits(plan: Plan, config: Config) -> None:
    """Refuse before Ray starts what would not fit, with how many tokens of cache would."""
    for budget in plan.budgets:
        if budget.fits:
            continue
        caches = sum(line.bytes for line in budget.lines if line.item == "caches")
        left = budget.capacity - (budget.total - caches)
        tokens = room(plan.dims, config)
        fewer = int(tokens * left / caches) if caches and left > 0 else 0
        largest = sorted(budget.lines, key=lambda line: -line.bytes)[:4]
        raise UserError(
            "the model and its key-value caches do not fit",
            where=budget.device,
            observed=f"{budget.total / 1e9:.1f} GB needed: "
            + ", ".join(f"{line.item} {line.bytes / 1e9:.1f}" for line in largest),
            required=f"at most {budget.capacity / 1e9:.1f} GB",
            remedy=f"set generate.cache_tokens={fewer} (now {tokens})"
            if fewer
            else "lower generate.prefill_tokens and generate.batch_size, or take a rule with more memory "
            "(mode=plan shows all of them)",
        )


def setup_of(prepared: Prepared, config: Config) -> Setup:
    """The same for a model that a training run has checked already, with the LoRA that it trains.

    Args:
        prepared: the training run.
        config: its configuration with the `generate` part to use.

    Raises:
        UserError: the family cannot generate.
    """
    text = read_family(prepared.model_dir).config
    can_join(text)
    encoder = ChatEncoder(
        prepared.data.tokenizer, config.model.chat_template, name=config.data.template, date=config.data.date
    )
    context = getattr(text, "max_position_embeddings", None)
    return Setup(
        config=config,
        model_dir=prepared.model_dir,
        fingerprint=prepared.fingerprint,
        plan=prepared.plan,
        formulas=prepared.formulas,
        root=prepared.root,
        adapter=None,
        encoder=encoder,
        eos=_ends(prepared.model_dir, encoder),
        context=context if isinstance(context, int) and context > 0 else None,
    )


def _ends(model_dir: str, encoder: ChatEncoder) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's, those of generation_config.json, and what the chat template
    puts behind an answer, which is what training taught."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir) / name
        if path.is_file():
            stated = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found.update(stated if isinstance(stated, list) else [stated] if isinstance(stated, int) else [])
    if encoder.tokenizer.eos_token_id is not None:
        found.add(int(encoder.tokenizer.eos_token_id))
    messages: tuple[Turn, ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    ids, labels = encoder.encode(Conversation(messages, 0, "a conversation of two turns"))
    last = next(
        (int(token) for token, label in zip(ids[::-1], labels[::-1], strict=True) if label >= 0), None
    )
    if last is not None and last in encoder.tokenizer.added_tokens_decoder:
        found.add(last)
    return tuple(sorted(found))


@contextlib.contextmanager
def generating(made: Setup, name: str) -> Iterator[Generator]:
    """A generator on a started cluster with the adapter loaded; both end with the block.

    Args:
        made: what `setup` found.
        name: names the Ray namespace.
    """
    with started(made, name) as cluster:
        take_adapter(made, cluster)
        with generator_on(made, cluster) as generator:
            yield generator


@contextlib.contextmanager
def started(made: Setup, name: str, connected: Callable[[], None] | None = None) -> Iterator[ActorCluster]:
    """A started cluster whose LoRA is still without effect: the base model. It ends with the block.

    `connected`: called when Ray is there, before anything is started on it.
    """
    from kt_ray.modes.train import _say

    config = made.config
    progress = LoadProgress(live=config.tracking.progress)
    cluster = _cluster(made, name, progress)
    try:
        for line in cluster.connect():
            _say(line)
        if connected is not None:
            connected()
        with progress:
            cluster.start()
        yield cluster
    finally:
        cluster.shutdown()


def take_adapter(made: Setup, cluster: ActorCluster) -> None:
    """The actors read the adapter, or all that requests will name, if there are any."""
    from kt_ray.modes.train import _say

    if made.adapter is not None:
        count = cluster.load_adapter(made.adapter)
        _say(f"adapter: {made.adapter}, {count} tensors")
    if made.adapters:
        count = cluster.load_adapters(made.adapters)
        _say(f"adapters: {', '.join(made.adapters)}, {count} tensors")


def generator_on(made: Setup, cluster: ActorCluster) -> Generator:
    """A session of generation under the settings of `generate`; close it, or use it in a `with`."""
    generate = made.config.generate
    return Generator(
        cluster,
        made.tokenizer,
        max_rows=generate.batch_size,
        prefill_tokens=generate.prefill_tokens,
        cache_tokens=made.cache_tokens,
    )


def _cluster(made: Setup, name: str, progress: LoadProgress) -> ActorCluster:
    config = made.config
    specs = actor_specs(made.plan, config, made.model_dir, made.formulas, made.root)

    def note(actor: str, layer: int, done: int, total: int) -> None:
        progress.update(actor, done, total, layer)

    if config.cluster.name == "local":
        return LocalCluster(made.plan, specs, note)
    from kt_ray.actors.ray.ray_cluster import RayCluster

    return RayCluster(made.plan, specs, config.cluster, config.rule.ray, name, note)
