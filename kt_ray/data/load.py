"""From a configuration to tokenised training and held-out rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import count
from typing import TYPE_CHECKING, Any

from kt_ray.config.schema import Config, DataConfig
from kt_ray.data.batches import flat
from kt_ray.data.cache import TokenCache
from kt_ray.data.chat_template import dated
from kt_ray.data.encode_rows import Encoded, Samples, encode_rows
from kt_ray.data.held_out_split import as_split, same_prompt, split
from kt_ray.data.pack_rows import pack
from kt_ray.data.prompts import Prompt, RowCheck, as_prompts, encode_prompts
from kt_ray.data.row_types import KINDS, Conversation
from kt_ray.data.sources import SourceRows, eval_source, left_out, read_sources, sources_of, weighted
from kt_ray.data.template import ChatEncoder
from kt_ray.data.token_counts import DataReport, SplitReport
from kt_ray.data.tokenizer_files import check_vocabulary, load_tokenizer, vocabulary_of
from kt_ray.disk import cache_root
from kt_ray.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_KIND_NAMES = {
    "sft": "answers or text to learn",
    "pairs": "preference pairs (chosen and rejected)",
    "kto": "answers with a verdict (kto)",
    "prompts": "prompts",
}


@dataclass(frozen=True)
class DataBundle:
    """Everything the driver needs of the data."""

    train: Any  # training rows (or pairs) in source order, packed with data.packing
    eval: Any  # held-out rows (or pairs) in source order (empty = no evaluation), never packed
    tokenizer: PreTrainedTokenizerFast  # with the chat template that was used set on it
    report: DataReport  # what was cut and dropped
    pad_id: int  # an id to fill padding with
    # "sft", "pairs" (train and eval hold Pair instead of Row), "kto" (rows have signs) or "prompts" (rows end
    # where the answer begins, and nothing in them is trained)
    kind: str = "sft"
    prompts: Mapping[int, Prompt] = field(default_factory=dict)  # of kind "prompts", by sample id
    dated: bool = False  # whether the template writes the date (data.date)


def load_data(
    config: Config,
    model_dir: str,
    seed: int,
    kinds: Sequence[str] = KINDS,
    cache: TokenCache | None = None,
    check: RowCheck | None = None,
) -> DataBundle:
    """Read, split and tokenise as `config.data` says.

    Args:
        config: the run's configuration.
        model_dir: checkpoint directory; its tokenizer is used unless model.tokenizer names another.
        seed: decides which rows are held out, and how they are packed.
        kinds: of rows that the caller can use, of kt_ray.data.row_types.KINDS.
        cache: of tokenised rows; None = the default place, as large as data.cache_gb says.
        check: of the rows of prompts.

    Raises:
        UserError: any fault in files, rows, tokenizer or template, with file and line.
    """
    data = as_split(config)
    if config.trainer.stage == "grpo":
        data = as_prompts(data)
    parts, train, held_out, notes = read_split(data, seed)
    rows = sum(len(part.rows) for part in parts)
    everything = [*train, *held_out]
    kind = _kind(everything, kinds, data)

    tokenizer = load_tokenizer(
        config.model.tokenizer or model_dir, "model.tokenizer" if config.model.tokenizer else "model.path"
    )
    encoder = ChatEncoder(
        tokenizer,
        config.model.chat_template,
        name=data.template,
        date=data.date or date.today().isoformat(),
        train_on=data.train_on,
    )
    report = DataReport(data.max_length, template=encoder.source, sources=[part.line() for part in parts])
    samples = _mixed(parts, train, rows, seed)
    eval_samples = [(row, row.sample_id) for row in held_out]
    prompts: dict[int, Prompt] = {}
    if kind == "prompts":
        report.max_length = longest = data.max_length - config.generate.max_new_tokens
        if data.eval_path is not None:  # numbered from 0, too: prompts are found by their numbers
            first = 1 + max(sample for _, sample in samples)
            eval_samples = [(row, first + sample) for row, sample in eval_samples]

        def encode(samples: Samples, report: SplitReport) -> list[Any]:
            found = encode_prompts(samples, encoder, longest, report, data.bad_rows == "skip", check)
            prompts.update(found)
            return [prompt.row for prompt in found.values()]
    else:
        encoded = Encoded(everything, encoder, cache or TokenCache(cache_root() / "tokens", data.cache_gb))
        report.cached = encoded.cached
        spare = count(1 + max(sample for _, sample in (*samples, *eval_samples)))

        def encode(samples: Samples, report: SplitReport) -> list[Any]:
            return encode_rows(samples, encoded, data, report, spare, config.trainer.stage == "pt")

    train_rows = encode(samples, report.train)
    eval_rows = []
    if held_out:
        report.eval = SplitReport()
        eval_rows = encode(eval_samples, report.eval)
    rows_of_both, _ = flat([*train_rows, *eval_rows])
    check_vocabulary(max((int(row.input_ids.max()) for row in rows_of_both), default=0), model_dir)
    if data.packing:
        report.packed_from = len(train_rows)
        train_rows = pack(train_rows, data.max_length, seed, data.shuffle)
        report.packed_to = len(train_rows)
    report.notes = notes + encoder.notes
    vocabulary = vocabulary_of(model_dir)
    # Any id fills padding, which is masked, but for one that the embedding does not have.
    ids = (i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
    pad: Any = next(i for i in ids if vocabulary is None or i < vocabulary or i == 0)
    return DataBundle(
        train=train_rows,
        eval=eval_rows,
        tokenizer=tokenizer,
        report=report,
        pad_id=int(pad),
        kind=kind,
        prompts=prompts,
        dated=dated(encoder.template),
    )


def read_split(
    data: DataConfig, seed: int
) -> tuple[list[SourceRows], list[Conversation], list[Conversation], list[str]]:
    """The rows as they are in their files: (by source, training rows, held-out rows, notes).

    Raises:
        UserError: a fault of a file or row.
    """
    skip = data.bad_rows == "skip"
    parts = read_sources(sources_of(data), data.limit, skip)
    rows = [row for part in parts for row in part.rows]
    notes = [*left_out(data), *(note for part in parts for note in part.notes())]
    if data.eval_path is None:
        train, held_out = split(rows, data.eval_fraction, seed)
        return parts, train, held_out, notes
    (other,) = read_sources([eval_source(data)], skip_bad=skip)
    prompts = {same_prompt(row.prompt_key) for row in rows}
    shared = sum(same_prompt(row.prompt_key) in prompts for row in other.rows)
    notes += other.notes()
    if shared:
        notes.append(f"{shared} of {len(other.rows)} held-out rows ask a question that training rows ask too")
    return parts, rows, other.rows, notes


def _mixed(parts: Sequence[SourceRows], train: Sequence[Conversation], total: int, seed: int) -> Samples:
    """The training rows of an epoch with their sample ids; of one source with weight 1, as they are."""
    if len(parts) == 1 and parts[0].source.weight == 1:
        return [(row, row.sample_id) for row in train]
    kept = {row.sample_id for row in train}
    return weighted(
        [(part.source.weight, [row for row in part.rows if row.sample_id in kept]) for part in parts],
        total,
        seed,
    )


def _kind(rows: Sequence[Conversation], kinds: Sequence[str], data: DataConfig) -> str:
    """The one kind of all rows."""
    kind = rows[0].kind
    other = next((row for row in rows if row.kind != kind), None)
    if other is not None:
        raise UserError(
            "held-out rows are of another kind than training rows",
            where=other.where,
            observed=_KIND_NAMES[other.kind],
            required=_KIND_NAMES[kind],
            remedy="correct data.eval_path",
        )
    if kind not in kinds:
        raise UserError(
            "the rows are not what this run trains on",
            where=rows[0].where,
            observed=_KIND_NAMES[kind],
            required=" or ".join(_KIND_NAMES[name] for name in kinds),
            remedy="name rows of that kind in data.path, or set data.format if the format was not meant",
        )
    if data.packing and kind != "sft":
        raise UserError(
            "rows of this kind cannot be packed: their losses are per row",
            where="data.packing=true",
            observed=_KIND_NAMES[kind],
            required=_KIND_NAMES["sft"],
            remedy="set data.packing=false",
        )
    return kind
