"""Turn source rows of a known format into conversations, and refuse what is none of them.

FORMATS shows the keys of each; "prompts" is what trainer.stage=grpo reads rows as. `detect` goes by keys
alone; a row whose keys fit two formats is refused, not guessed: the wrong guess would train on the wrong text
without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.turns import (
    FILL,
    MEDIA,
    OPENAI,
    SHAREGPT,
    answer_of,
    bad_row,
    decoded,
    is_there,
    keys_of,
    kind,
    missing,
    refuse_turns,
    require_answer,
    role_of,
    tools_of,
    turn,
    turns,
    unread_keys,
    wrong,
)
from kt_ray.errors import UserError

# What a row of each format looks like, for messages and documentation.
FORMATS: dict[str, str] = {
    "alpaca": '{"instruction": …, "output": …[, "input", "system", "history"]}',
    "sharegpt": '{"conversations": [{"from": …, "value": …}, …][, "system", "tools"]}',
    "messages": '{"messages": [{"role": …, "content": …}, …][, "tools"]}',
    "prompt_completion": '{"prompt": …, "completion": …}',
    "preference": '{"chosen": …, "rejected": …, "prompt" or "messages" or "instruction": …}',
    "kto": '{"label": true or false, "prompt": …, "completion": …} (or messages)',
    "text": '{"text": …}',
    "prompts": '{"prompt": … (or messages, conversations, instruction)[, "answer", …]}',
}
# Columns that other programs train with, and why kt_ray does not: a row that has something there is refused,
# unless data.columns hides it. TRL hands the last one to the chat template.
UNREAD = dict.fromkeys(MEDIA, "only text is trained")
UNREAD |= {"chat_template_kwargs": "a chat template writes all rows alike"}
# ms-swift's names of a pair's other answer, or of all its turns
_REJECTED = ("rejected_response", "rejected_messages")
_BETTER = ("messages", "conversations", "output", "completion")  # where the better one is
UNREAD |= dict.fromkeys(_REJECTED, "a pair is read as chosen and rejected")
# Columns that data.columns may name. "answer" is what rewards read; "role" and "content" are the keys inside
# a list of turns.
COLUMNS = (
    *("instruction", "input", "output", "system", "history", "messages", "conversations", "tools"),
    *("prompt", "completion", "chosen", "rejected", "label", "text", "answer", "role", "content"),
    *UNREAD,
)
_QUESTIONS = ("prompt", "completion", "text", "chosen", "rejected")
_LIST_OF = {"messages": "messages", "sharegpt": "conversations"}  # format: key of its turns
_LISTS = (*_LIST_OF.values(), "history")
_PROMPTS = ("prompt", *_LISTS, "instruction", "input")
# Keys that a format reads, beside system and tools; a reward reads any column of prompts.
_READ: dict[str, tuple[str, ...]] = {
    "alpaca": ("instruction", "input", "output", "history"),
    "sharegpt": ("conversations",),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "preference": (*_PROMPTS, "chosen", "rejected"),
    "kto": (*_PROMPTS, "completion", "output", "label", "kto_tag"),
}
_TURNS = {*_LIST_OF.values(), "prompt", "completion", "chosen", "rejected"}  # which may be lists of turns


class UnclearVerdict(UserError):
    """What a label means, here and in other rows, is not known: such rows are not bad ones."""


class Parser:
    """Rows to conversations, one after the other.

    Args:
        format: "auto" (the first row decides, the rest must agree) or one of FORMATS.
        system: system prompt of rows that have none; None = none.
        columns: column of the files for each name of COLUMNS that is called otherwise there; None = it is
            not read, though the files have it.

    Attributes:
        format: as given, or as the first row decided.
        unread: columns, and keys of turns, that hold something and are not read, in the order in which they
            came.
    """

    def __init__(
        self, format: str = "auto", system: str | None = None, columns: Mapping[str, str | None] | None = None
    ) -> None:
        self.format = format
        self.guessed = format == "auto"
        self._first = ""  # the row that decided
        self.unread: dict[str, None] = {}
        self.system = system
        self.hidden = {name for name, column in (columns or {}).items() if column is None}
        self.columns = {name: column for name, column in (columns or {}).items() if column is not None}
        for name in columns or {}:
            if name not in COLUMNS:
                raise UserError(
                    "unknown column name",
                    where=f"data.columns.{name}",
                    required="one of " + ", ".join(COLUMNS),
                    remedy="write data.columns={instruction: <your column>, …}",
                )

    def __call__(self, row: Any, where: str, sample_id: int) -> Conversation:
        """The conversation of one row.

        Raises:
            UserError: the row is not of the format, or its keys fit several; the message names it.
        """
        if not isinstance(row, dict):
            raise UserError(
                "a row is not an object",
                where=where,
                observed=kind(row),
                required=" or ".join(FORMATS.values()) if self.format == "auto" else FORMATS[self.format],
                remedy="write every row as a JSON object",
            )
        given, row = row, self._renamed(row, where)
        if self.guessed:
            formats = detect(row)
            if "kto" in formats and _counted(row) and len(formats) > 1:
                others = [name for name in formats if name != "kto"]
                raise UnclearVerdict(
                    "the row fits several data formats",
                    where=where,
                    observed=f"{keys_of(row)}, label {row['label']}",
                    required=f"one of {', '.join(formats)}",
                    remedy="set data.format=kto if label says whether the answer is wanted, else "
                    f"data.format={' or '.join(others)}",
                )
            if len(formats) > 1:
                raise UserError(
                    "the row fits several data formats",
                    where=where,
                    observed=keys_of(row),
                    required=f"one of {', '.join(formats)}",
                    remedy=f"set data.format={formats[0]} (or {', '.join(formats[1:])})",
                )
            if self.format == "auto":
                empty = next((key for key in _QUESTIONS if row.get(key) == ""), None)
                if not formats and empty is not None:
                    what = "question" if empty == "prompt" else empty
                    raise bad_row(f"the {what} is empty", f"{where}, {empty}", "''", "text", FILL)
                if not formats:
                    raise UserError(
                        "unknown data format",
                        where=where,
                        observed=keys_of(row),
                        required=" or ".join(f"{name} {shape}" for name, shape in FORMATS.items()),
                        remedy="name the columns in data.columns (data.columns={instruction: question, "
                        "output: answer}), rename the keys, or convert the file to one of these formats",
                    )
                self.format, self._first = formats[0], where
            elif formats and self.format not in formats:
                raise UserError(
                    "the row has another format than the first one",
                    where=where,
                    observed=f"{formats[0]} ({keys_of(row)})",
                    required=f"{self.format}, as {self._first} has it",
                    remedy=f"set data.format={self.format} or data.format={formats[0]}, whichever all rows "
                    "are meant to be, or name files of one format each in data.sources",
                )
        if self.format != "prompts":
            known = ("text",) if self.format == "text" else (*_READ[self.format], "system", "tools")
            new = (name for name, value in row.items() if name not in known and is_there(value))
            self.unread |= dict.fromkeys(new)
            for name in known:
                if name in _TURNS:
                    self.unread |= dict.fromkeys(unread_keys(row.get(name), name))
        if self.format == "text":
            return Conversation((), sample_id, where, text=_raw(row, where))
        seen = next((name for name in UNREAD if is_there(row.get(name))), None)
        if seen and not (self.format in ("prompts", "preference") and seen in _REJECTED):
            what = f"the row has {seen}: {UNREAD[seen]}"
            remedy = f"delete that row; data.columns={{{seen}:null}} trains such rows without them"
            if seen in _REJECTED:
                better = next((name for name in _BETTER if is_there(row.get(name))), "messages")
                better = self.columns.get(better, better)
                remedy = f"read pairs with data.columns={{chosen:{better},rejected:{seen}}}, "
                remedy += f"or answers alone with data.columns={{{seen}:null}}"
            raise bad_row(what, where, kind(row[seen]), "a row of text alone", remedy)
        tools = tools_of(row.get("tools"), where)
        if self.format == "prompts":
            messages = tuple(_with_system(_open_prompt(row, where), self.system))
            asked = row["prompt"] if isinstance(row.get("prompt"), str) else ""
            read = {**given, "answer": row["answer"]} if "answer" in self.columns else given
            return Conversation(messages, sample_id, where, tools, columns=read, asked=asked)
        label = _label(row, where) if self.format == "kto" else None
        chosen, *rejected = (
            tuple(_with_system(messages, self.system)) for messages in _PARSE[self.format](row, where)
        )
        first = chosen[0]["content"].strip()
        if (_own_system(row, where) or first).strip() != first:
            self.unread["system, where turns begin with another one"] = None
        return Conversation(chosen, sample_id, where, tools, rejected[0] if rejected else None, label)

    def _renamed(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """The row under this project's names, lists decoded where a file keeps them as JSON text."""
        inner: dict[str, str] = {n: self.columns[n] for n in ("role", "content") if n in self.columns}
        outer = {name: column for name, column in self.columns.items() if name not in inner}
        result = {k: value for k, value in row.items() if k not in outer.values() and k not in self.hidden}
        for name, column in outer.items():
            if column not in row:
                raise UserError(
                    "a column named in data.columns is not in the row",
                    where=where,
                    observed=keys_of(row),
                    required=f"{column}, for {name}",
                    remedy="correct data.columns",
                )
            result[name] = row[column]
        pairs = (name for name in ("chosen", "rejected") if outer.get(name) in (*_LISTS, _REJECTED[1]))
        for name in (*_LISTS, *pairs):
            value = result.get(name)
            if isinstance(value, str) and value.lstrip().startswith("["):
                result[name] = decoded(value, where, name)
        if inner:
            for name in _TURNS & result.keys():
                result[name] = _inner_keys(result[name], inner)
        return result


def detect(row: Mapping[str, Any]) -> list[str]:
    """The formats that the keys of a row fit: one, or the row is unknown (none) or ambiguous."""

    def has(*names: str) -> bool:
        return all(row.get(name) not in (None, "") for name in names)

    plain = [
        name
        for name, fits in (
            ("messages", has("messages")),
            ("sharegpt", has("conversations")),
            ("alpaca", "instruction" in row or "output" in row),
            ("prompt_completion", has("prompt", "completion")),
            ("text", isinstance(row.get("text"), str) and has("text")),
        )
        if fits
    ]
    judged, counted = verdict(row) is not None, _counted(row)
    if has("chosen", "rejected"):
        # the rest of the row is the prompt, unless it holds an answer of its own
        answered = [
            name
            for name in plain
            if name in ("prompt_completion", "text")
            or (name == "alpaca" and has("output"))
            or (name in ("messages", "sharegpt") and role_of(row.get(_LIST_OF[name]), -1) == "assistant")
        ]
        return ["preference", *answered, *(["kto"] if judged and not counted else [])]
    if judged and plain and plain != ["text"]:
        return ["kto"] if len(plain) == 1 and not counted else ["kto", *plain]
    return plain


def _counted(row: Mapping[str, Any]) -> bool:
    """Whether a row's label is a verdict or numbers something else, which nothing tells."""
    label = row.get("label")
    return label in (0, 1, "0", "1") and not isinstance(label, bool)


def verdict(row: Mapping[str, Any]) -> bool | None:
    """true or false of a KTO row, also as 1 or 0; None = none."""
    value = row.get("label", row.get("kto_tag"))
    if isinstance(value, str):  # csv has no booleans
        return {"true": True, "1": True, "false": False, "0": False}.get(value.lower())
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def _inner_keys(given: Any, inner: Mapping[str, str]) -> Any:
    names = {column: name for name, column in inner.items()}
    if isinstance(given, dict):
        return {names.get(key, key): value for key, value in given.items()}
    return [_inner_keys(part, inner) for part in given] if isinstance(given, list) else given


def _with_system(messages: list[Turn], system: str | None) -> list[Turn]:
    if system and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, Turn(role="system", content=system))
    return messages


def _alpaca(row: dict[str, Any], where: str) -> list[list[Turn]]:
    if "instruction" not in row and "input" not in row:
        raise missing("instruction", row, where, FORMATS["alpaca"])
    if "output" not in row:
        raise missing("output", row, where, FORMATS["alpaca"])
    question = _alpaca_prompt(row, where)
    return [[*question, turn("assistant", _text(row, "output", where), where, "output")]]


def _alpaca_prompt(row: dict[str, Any], where: str) -> list[Turn]:
    instruction = _text(row, "instruction", where, optional=True)
    extra = _text(row, "input", where, optional=True)
    question = "\n".join(part for part in (instruction, extra) if part.strip())
    if not question.strip():
        observed = "instruction and input without text"
        raise bad_row("the question is empty", where, observed, "text in one of them", FILL)
    messages = _system(row, where)
    history = row.get("history")
    if not (history is None or isinstance(history, list)):
        raise wrong("history", history, where, "a list of [user, assistant] pairs")
    for number, pair in enumerate(history or (), start=1):
        place = f"history[{number}]"
        strings = isinstance(pair, list) and all(isinstance(text, str) for text in pair)
        if not (strings and len(pair) == 2):
            raise wrong(place, pair, where, "a [user, assistant] pair of strings")
        messages += [turn("user", pair[0], where, place), turn("assistant", pair[1], where, place)]
    return [*messages, turn("user", question, where, "instruction")]


def _chat(row: dict[str, Any], where: str, format: str) -> list[list[Turn]]:
    name = _LIST_OF[format]
    if row.get(name) is None:
        raise missing(name, row, where, FORMATS[format])
    messages = _turns_with_system(row, where, name)
    require_answer(messages, where)
    return [messages]


def _turns_with_system(row: dict[str, Any], where: str, name: str) -> list[Turn]:
    given = row[name]
    first = given[0] if isinstance(given, list) and given else None
    keys = SHAREGPT if name == "conversations" else OPENAI
    if isinstance(first, dict) and "from" not in first and "role" in first:
        keys = OPENAI  # "conversations" of role and content are common
    return _with_system(turns(given, where, name, keys), _own_system(row, where))


def _answered(row: dict[str, Any], prompt: list[Turn], where: str, name: str) -> list[Turn]:
    """The row's prompt with the answer under `name`, which may hold the prompt itself."""
    messages = _with_system(answer_of(row[name], prompt, where, name), _own_system(row, where))
    if role_of(row[name], 0) in ("system", "user"):
        _hold_prompt(messages, row, where, name)
    return messages


def _hold_prompt(messages: list[Turn], row: dict[str, Any], where: str, name: str) -> None:
    """Refuse a prompt that the conversation under `name` beside it lacks: nobody would miss it. One that says
    the whole conversation in one text is held by it. White space is not compared: files differ in it."""
    asked = [_packed(message["content"]) for message in messages[:-1]]
    last = next(_packed(turn["content"]) for turn in reversed(messages) if turn["role"] == "user")
    for key in _PROMPTS:
        for text in _asked(row.get(key)):
            packed = _packed(text)
            if last in packed or any(packed in turn for turn in asked):
                continue
            hide = f"{key}:null" if name in ("chosen", "rejected") else f"conversations:{name},{key}:null"
            raise bad_row(
                f"{name} is a conversation of its own, without what {key} of the row says",
                where,
                kind(text),
                f"the whole conversation in {name}, or its answer alone",
                f"write the prompt into the conversation; data.columns={{{hide}}} trains without it",
            )


def _packed(text: str) -> str:
    return "".join(text.split())


def _asked(value: Any) -> list[str]:
    """The texts of a prompt, from whichever kind of value holds it, but for answers."""
    texts = []
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, dict):
            asks = role_of([part], 0) in ("system", "user")
            part = part.get("content", part.get("value")) if asks else None
        elif isinstance(part, list):  # of history
            part = part[0] if part else None
        texts += [part.strip()] if isinstance(part, str) and part.strip() else []
    return texts


def _own_system(row: dict[str, Any], where: str) -> str | None:
    own = _text(row, "system", where) if is_there(row.get("system")) else ""
    return own if own.strip() else None


def _prompt_of(row: dict[str, Any], where: str, format: str) -> list[Turn]:
    """The turns before the answer, from whichever keys the row has them under."""
    for name in _LIST_OF.values():
        if row.get(name) is not None:
            return _turns_with_system(row, where, name)
    if isinstance(row.get("prompt"), list):
        return _turns_with_system(row, where, "prompt")
    if row.get("prompt") is None:
        if "instruction" in row or "input" in row:
            return _alpaca_prompt(row, where)
        raise missing("prompt", row, where, FORMATS[format])
    prompt = _text(row, "prompt", where)
    refuse_turns(prompt, where, "prompt")
    return [*_system(row, where), turn("user", prompt, where, "prompt")]


def _open_prompt(row: dict[str, Any], where: str) -> list[Turn]:
    """The turns before the answer to come; an answer that the row has is left out."""
    messages = _prompt_of(row, where, "prompts")
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise bad_row("the prompt asks nothing", where, keys_of(row), "a turn of the user", FILL)
    return messages


def _prompt_completion(row: dict[str, Any], where: str) -> list[list[Turn]]:
    for key in ("completion", "prompt"):
        if row.get(key) is None:
            raise missing(key, row, where, FORMATS["prompt_completion"])
    prompt = _prompt_of({k: v for k, v in row.items() if k not in _LISTS}, where, "prompt_completion")
    return [_answered(row, prompt, where, "completion")]


def _preference(row: dict[str, Any], where: str) -> list[list[Turn]]:
    """The conversation with the chosen answer, and with the rejected one."""
    for key in ("chosen", "rejected"):
        if row.get(key) is None:
            raise missing(key, row, where, FORMATS["preference"])
    whole = [key for key in ("chosen", "rejected") if role_of(row[key], 0) in ("system", "user")]
    prompt: list[Turn] = []
    if len(whole) == 1 and not any(is_there(row.get(key)) for key in _PROMPTS):
        prompt = _answered(row, [], where, whole[0])[:-1]
    elif len(whole) < 2:
        prompt = _prompt_of(row, where, "preference")
    chosen, rejected = (_answered(row, prompt, where, key) for key in ("chosen", "rejected"))
    if chosen == rejected:
        observed = repr(chosen[-1]["content"][:60])
        raise bad_row("chosen and rejected are the same", where, observed, "two different answers")
    shared = next(
        (i for i, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other),
        min(len(chosen), len(rejected)),
    )
    if any(message["role"] == "user" for message in chosen[shared:]):
        observed = f"they differ from message {shared + 1} on"
        required = "one prompt, two answers"
        raise bad_row("chosen and rejected answer different questions", where, observed, required)
    return [chosen, rejected]


def _kto(row: dict[str, Any], where: str) -> list[list[Turn]]:
    if row.get("completion") is not None:
        return [_answered(row, _prompt_of(row, where, "kto"), where, "completion")]
    if row.get("output") is not None:
        return [_answered(row, _alpaca_prompt(row, where), where, "output")]
    messages = _prompt_of(row, where, "kto")
    require_answer(messages, where)
    return [messages]


def _label(row: dict[str, Any], where: str) -> bool:
    label = verdict(row)
    if label is None:
        given = row.get("label", row.get("kto_tag"))
        if given is None:
            raise missing("label", row, where, FORMATS["kto"])
        raise wrong("label", given, where, "true or false")
    return label


def _raw(row: dict[str, Any], where: str) -> str:
    if "text" not in row:
        raise missing("text", row, where, FORMATS["text"])
    text = _text(row, "text", where)
    if not text.strip():
        raise bad_row("the text is empty", where, repr(text[:20]), "text", FILL)
    return text


# Each gives a row's conversation, checked; of a preference pair the chosen and the rejected one.
_PARSE: dict[str, Callable[[dict[str, Any], str], list[list[Turn]]]] = {
    "alpaca": _alpaca,
    "sharegpt": partial(_chat, format="sharegpt"),
    "messages": partial(_chat, format="messages"),
    "prompt_completion": _prompt_completion,
    "preference": _preference,
    "kto": _kto,
}


def _system(row: dict[str, Any], where: str) -> list[Turn]:
    return _with_system([], _own_system(row, where))


def _text(row: dict[str, Any], key: str, where: str, *, optional: bool = False) -> str:
    value = row.get(key)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise wrong(key, value, where, "a string")
    return value
