"""Options of other programs on the command line: what they are called here, or why there is none."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from kt_ray.config.fields import closest, closest_key, fields, groups, joined, show
from kt_ray.config.files import HUB_NAME, option_groups, option_names
from kt_ray.config.limits import GENERATING, WORDS
from kt_ray.config.mapping import fits
from kt_ray.errors import UserError
from kt_ray.recipe.field_table import Field, field_table, names_elsewhere, programs
from kt_ray.recipe.llamafactory import read_field
from kt_ray.recipe.override_text import override
from kt_ray.recipe.reading import Reading, masked

# Groups of a training run: a name behind one of them (trainer.save_steps) is looked up without it.
_TRAINING = ("model", "rule", "data", "lora", "optim", "trainer", "preference", "tracking", "run", "training")
# Several fields of others are factors of these: none of them is the value.
_PRODUCTS = ("trainer.batch_size",)
_NEAR = 0.85  # how alike (difflib's ratio) a misspelled one must be
_ROWS = ("data.path", "data.eval_path")
_PATHS = ("model.path", *_ROWS)
# What a field alone decides, in the recipe of any program.
_CERTAIN = ("model", "model.path", "data.max_length", "lora.rank", "lora.alpha", "lora.dropout", "optim.lr")


class _Answer(NamedTuple):
    what: str  # of one option
    write: list[str]  # what to write in its place; [] = nothing
    remedy: str = ""  # where that does not say it


def refuse_peer_options(keys: Sequence[str]) -> None:
    """Answers the options of Hugging Face, PEFT, TRL, LLaMA-Factory, Axolotl and Unsloth all at once.

    Args:
        keys: KEY=VALUE arguments, no flags.

    Raises:
        UserError: there are some; with what to write instead.
    """
    mode = next((key.partition("=")[2] for key in keys if key.startswith("mode=")), "")
    found = {key: answer for key in keys if (answer := _answer(key, mode))}
    if not found:
        return
    answers = list(found.values())
    write = " ".join(text for answer in answers for text in answer.write)
    parts = [f"write {write}"] if write else []
    parts += dict.fromkeys(answer.remedy for answer in answers if answer.remedy)
    raise UserError(
        "; ".join(answer.what for answer in answers),
        observed=" ".join(masked(key.partition("=")[0].lstrip("-+~"), key) for key in found),
        remedy="; ".join(parts),
    )


def refuse_peer_recipe(reading: Reading) -> None:
    """Tells a recipe of another program from one of LLaMA-Factory, which has a model and a data set.

    Raises:
        UserError: it is one; with what to write for the fields of which that is certain.
    """
    if reading.given("model_name_or_path") and reading.given("dataset"):
        return
    fields = dict(_flat(reading.fields))
    known = {program: [name for name in names if name in fields] for program, names in programs().items()}
    program = max(known, key=lambda name: len(known[name]))
    if not known[program]:
        return
    write: dict[str, set[str]] = {}  # by option: those that two fields differ on are not certain
    for name, value in fields.items():
        last = "base_model" if name == "model" else name.rpartition(".")[2]
        if value is None:
            continue
        if key := next((key for key in _CERTAIN if joined(key) == joined(last)), None):
            write.setdefault(key, set()).add(_written(key, value))  # lora_rank
        elif last in (*names_elsewhere(), *field_table()) and (answer := _answer(override(last, value), "")):
            for text in answer.write:
                if (key := text.partition("=")[0]) in _CERTAIN:
                    write.setdefault(key, set()).add(text)
    certain = [text for texts in write.values() if len(texts) == 1 for text in texts]
    raise UserError(
        f"the recipe is one of {program}",
        where=str(reading.path),
        observed=f"its fields {', '.join(known[program])}",
        required="a training YAML of LLaMA-Factory",
        remedy=f"leave out recipe=, and write {' '.join([*certain, 'data.path=<rows>'])} and what else it "
        "says; FIELD=VALUE on the command line is answered with what that is called here",
    )


def _flat(fields: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, Any]]:
    """Fields of mappings as GROUP.FIELD."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{group}{name}.")
        else:
            yield f"{group}{name}", value


def _answer(argument: str, mode: str) -> _Answer | None:
    """About one KEY=VALUE; None = it is an option of kt_ray, or of nobody. `mode`: "" = none is given."""
    given, _, text = argument.lstrip("-+~").partition("=")
    name = given.partition("@")[0]
    if not name or name in (*fields(), *groups(), *option_groups()):
        return None  # our own names are checked, and spelled, elsewhere
    spelled = name.replace("-", "_")
    ours = {*groups(), *option_groups(), *map(joined, fields())}
    if joined(name) in ours and spelled not in names_elsewhere():  # model_name is no model.name elsewhere
        return None
    group, _, last = spelled.rpartition(".")
    if group and group not in _TRAINING:
        return None
    known = [*names_elsewhere(), *field_table()]
    whole = f"{group}_{last}"  # lora.target is lora_target
    found = next((word for word in (last, whole) if word in known), None)
    if found is None and closest_key(name) is None:
        found = closest(last, known, _NEAR)
    if found is None:
        return None
    meant, value = names_elsewhere().get(found, found), _value(text)
    if isinstance(value, str) and value and (answer := _of_adapter(name, meant, value, mode)):
        return answer
    if meant in fields():
        return _direct(name, [meant], value, "")
    return _of_field(name, meant, field_table()[meant], value)


def _of_adapter(name: str, meant: str, value: str, mode: str) -> _Answer | None:
    """About the directory of an adapter, which is asked, or trained further; None = it is none."""
    if name != "adapter" and meant != "adapter_name_or_path":
        return None
    if mode == "serve":
        asked = _written("serve.adapters", {"NAME": value})
        return _Answer(f"{name} is serve.adapters here", [], f"write {asked}")
    if mode in GENERATING:
        return _Answer(f"{name} is generate.adapter here", [_written("generate.adapter", value)])
    if name == "adapter" and ("/" in value or Path(value).is_dir()):  # Axolotl's is lora or qlora
        asked = f"to ask it, {_written('resume', value)} mode=chat or {_written('generate.adapter', value)}"
        return _Answer(
            f"{name} is generate.adapter here, or lora.adapter in training",
            [],
            f"{asked} with mode=chat or predict; to train it further, {_written('lora.adapter', value)}",
        )
    return None


def _of_field(name: str, meant: str, field: Field, value: Any) -> _Answer:
    if field.kind == "ignored" or (field.kind == "fixed" and (value is None or field.accepts(value))):
        return _Answer(f"{name} is no option here: {field.text}", [], f"leave out {name}")
    if field.kind == "fixed":
        return _Answer(f"{name}={show(value)} is not possible: {field.text}", [], f"leave out {name}")
    text = re.sub(r"^default [^;]*(; )?", "", field.text)  # LLaMA-Factory's default
    if meant == "stage" and value in WORDS["preference.loss"]:  # Axolotl's rl=simpo
        written = ["trainer.stage=dpo", f"preference.loss={value}"]
        return _Answer(f"{name} is trainer.stage and preference.loss here", written)
    if value is None:
        return _direct(name, list(field.keys), None, text)
    reading = read_field(meant, value)
    refused = any(refusal.field.startswith(f"{meant}=") for refusal in reading.refused)
    stated = [o for o in reading.overrides.values() if o.key in field.keys and f"{meant}=" in o.source]
    chosen = [o for o in stated if "(default)" not in o.source]
    if chosen and not refused:
        notes = "".join(f" ({o.note})" for o in chosen if o.note)
        if len(chosen) < len(stated):
            notes += f" ({text})"
        what = f"{name} is {' and '.join(o.key for o in chosen)} here{notes}"
        return _Answer(what, [_written(o.key, o.value) for o in chosen])
    ours = WORDS.get(field.keys[0], ()) if len(field.keys) == 1 else ()
    as_it_is = not (stated or refused) or value in ours or str(value)[:1] in ("/", ".", "~")
    return _direct(name, list(field.keys), value if as_it_is else None, text)


def _direct(name: str, keys: list[str], value: Any, text: str) -> _Answer:
    """The same value under our key, where that is what it means; else the keys with how they are set."""
    key = next((k for k in keys if k in _PATHS), keys[0])
    if key in _PATHS:
        same = isinstance(value, str) and ("/" in value or "." in value)
    else:
        same = value is not None and len(keys) == 1 and key in fields() and key not in _PRODUCTS
    if key in option_groups() and value in option_names(key):
        return _Answer(f"{name} is {key} here", [f"{key}={value}"])
    if same and key in _ROWS and HUB_NAME.fullmatch(value) and not Path(value).suffix:
        value = value if Path(value).exists() else f"hf://{value.removeprefix('hf://')}"
    if same and fits(key, value):
        return _Answer(f"{name} is {key} here", [_written(key, value)])
    how = f" ({text})" if text else ""
    return _Answer(f"{name} is {' and '.join(keys)} here{how}", [], f"set {' or '.join(keys)}")


def _value(text: str) -> Any:
    """A value as Hydra reads it; None = none is given, or several."""
    try:
        parsed = OverridesParser.create().parse_override(f"key={text}") if text else None
    except HydraException:
        return text
    if parsed is None or parsed.is_sweep_override():
        return None
    return parsed.value()


def _written(key: str, value: Any) -> str:
    """As one types it in a shell, with no more quotes than it takes."""
    bare = f"{key}={value}"
    plain = isinstance(value, str) and _value(value) == value and shlex.quote(bare) == bare
    return bare if plain else shlex.quote(override(key, value))
