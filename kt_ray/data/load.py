"""From a configuration to tokenised training and held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from kt_ray.config.schema import Config, DataConfig
from kt_ray.data.formats import conversations
from kt_ray.data.readers import read_rows
from kt_ray.data.report import DataReport, SplitReport
from kt_ray.data.split import split
from kt_ray.data.template import ChatEncoder, check_vocabulary, load_tokenizer
from kt_ray.data.types import Conversation, Dataset, Row
from kt_ray.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class DataBundle:
    """Everything the driver needs of the data.

    Attributes:
        train: training rows in source order.
        eval: held-out rows in source order (empty = no evaluation).
        tokenizer: with the chat template that was used set on it.
        report: what was cut and dropped.
        pad_id: an id to fill padding with.
    """

    train: Dataset
    eval: Dataset
    tokenizer: PreTrainedTokenizerFast
    report: DataReport
    pad_id: int


def load_data(config: Config, model_dir: str, seed: int) -> DataBundle:
    """Read, split and tokenise as `config.data` says.

    Args:
        config: the run's configuration (data and model.tokenizer / model.chat_template are read).
        model_dir: checkpoint directory; its tokenizer is used unless model.tokenizer names another.
        seed: decides which rows are held out.

    Raises:
        UserError: any fault in files, rows, tokenizer or template, with file and line.
    """
    data = config.data
    rows = list(islice(conversations(read_rows(_source(data)), data.format, data.system), _limit(data)))
    notes: list[str] = []
    if data.eval_path is None:
        train, held = split(rows, data.eval_fraction, seed)
    else:
        train = rows
        held = list(conversations(read_rows(data.eval_path, "data.eval_path"), data.format, data.system))
        known = {row.prompt_key for row in train}
        shared = sum(row.prompt_key in known for row in held)
        if shared:
            notes.append(f"{shared} of {len(held)} held-out rows ask a question that training rows ask too")

    tokenizer = load_tokenizer(
        config.model.tokenizer or model_dir, "model.tokenizer" if config.model.tokenizer else "model.path"
    )
    encoder = ChatEncoder(tokenizer, config.model.chat_template)
    report = DataReport(data.max_length)
    train_rows = encode_rows(train, encoder, data, report.train)
    eval_rows: Dataset = []
    if held:
        report.eval = SplitReport()
        eval_rows = encode_rows(held, encoder, data, report.eval)
    report.notes = notes + encoder.notes
    largest = max((int(row.input_ids.max()) for row in (*train_rows, *eval_rows)), default=0)
    check_vocabulary(largest, model_dir)
    pad: Any = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return DataBundle(train_rows, eval_rows, tokenizer, report, int(pad or 0))


def encode_rows(
    rows: Sequence[Conversation], encoder: ChatEncoder, data: DataConfig, report: SplitReport
) -> Dataset:
    """Tokenise, cut to data.max_length, and count into `report`.

    Raises:
        UserError: a row without a trained token before cutting, or nothing left after it.
    """
    if data.max_length < 2:
        raise UserError(
            "data.max_length is too small",
            where="data.max_length",
            observed=data.max_length,
            required="at least 2 tokens",
            remedy="set data.max_length=512",
        )
    if data.overflow not in ("truncate", "drop"):
        raise UserError(
            "unknown way to treat long rows",
            where="data.overflow",
            observed=data.overflow,
            required="truncate or drop",
            remedy="set data.overflow=truncate",
        )
    kept: Dataset = []
    for conversation in rows:
        ids, labels = encoder.encode(conversation)
        full = Row(ids, labels, conversation.sample_id)
        if full.trained == 0:
            raise UserError(
                "no token of the row is trained",
                where=conversation.where,
                observed=f"{len(ids)} tokens, all masked",
                required="an answer of at least one token",
                remedy="fill or delete that row, or check the chat template with mode=preview",
            )
        row = Row(ids[: data.max_length], labels[: data.max_length], conversation.sample_id)
        over = len(ids) > data.max_length
        report.source_rows += 1
        report.longest = max(report.longest, len(ids))
        if (over and data.overflow == "drop") or row.trained == 0:
            report.dropped_long += over and data.overflow == "drop"
            report.dropped_no_answer += data.overflow != "drop"
            report.tokens_lost += len(ids)
            report.trained_lost += full.trained
            continue
        report.rows += 1
        report.truncated += over
        report.tokens += len(row.input_ids)
        report.trained += row.trained
        report.tokens_lost += len(ids) - len(row.input_ids)
        report.trained_lost += full.trained - row.trained
        kept.append(row)
    if rows and not kept:
        raise UserError(
            "no row is left after cutting",
            where="data.max_length",
            observed=f"{data.max_length} tokens; all {report.source_rows} rows dropped",
            required=f"{report.longest} tokens for the longest row",
            remedy=f"set data.max_length={report.longest}",
        )
    return kept


def _source(data: DataConfig) -> str | list[str]:
    if data.path is not None:
        return data.path
    if data.builtin == "demo":
        from kt_ray.demo.recipes import persona_path

        return str(persona_path())
    raise UserError(
        "no training data is named" if data.builtin is None else "no such built-in data set",
        where="data.path" if data.builtin is None else "data.builtin",
        observed=data.builtin,
        required="a .jsonl, .json or .parquet file, or data.builtin=demo",
        remedy="set data.path=<file>, or take data=demo",
    )


def _limit(data: DataConfig) -> int | None:
    if data.limit is not None and data.limit < 1:
        raise UserError(
            "data.limit must be at least 1",
            where="data.limit",
            observed=data.limit,
            required="a number of rows, or null for all",
            remedy="set data.limit=null",
        )
    return data.limit
