"""A chat template that counts its own steps: nested loops over a short text would run for years.

The count is written into the template's source, behind the head of every loop and macro and into a loop's own
condition, so that whoever renders it keeps to it. The rendering of a template that stays within its steps
does not change. Steps are bounded and not the work of one: a number that is squared in every turn, or a text
that is doubled, can still take the time and the memory of whoever renders it.
"""

from __future__ import annotations

import secrets

from kt_ray.errors import UserError

# Turns of loops and calls of macros in one rendering: long chats need thousands. No range in jinja2's sandbox
# is longer (MAX_RANGE).
STEPS = 100_000
TOO_MANY = f"the chat template takes more than {STEPS} steps"
_NAME = f"steps_{secrets.token_hex(8)}"  # no template can know it, and set it back
# `first` takes the next element off a generator; when none is left it gives an undefined value, which is
# false. Ten times as fast as a number in a namespace, which the sandbox would check at every step.
_NEXT = f"({_NAME} | first or {_NAME}_refuse('{TOO_MANY}'))"
# The template itself may give `raise_exception` to something else.
_START = f"{{% set {_NAME} = range(1, {STEPS} + 1) | select %}}{{% set {_NAME}_refuse = raise_exception +%}}"
_COUNT = f"%}}{{% if {_NEXT} %}}{{% endif "


def bounded(template: str, source: str) -> str:
    """The template, refusing to go beyond STEPS.

    Args:
        source: where it comes from, for the message.

    Raises:
        UserError: it is no Jinja template, or holds a power (9 ** 9 ** 9), which no bound could end.
    """
    from jinja2 import Environment, TemplateSyntaxError

    parts: list[str] = []
    head, before, counted, line = "", "", False, 1
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    try:
        # (line, kind, text), whose texts make up the source, but for whitespace that a dash eats
        for number, kind, text in environment.lex(template):
            # Put back, for the dash to eat again: lines keep their numbers, and a text's brace stays apart.
            if kind.endswith("_begin") and (number > line or before.endswith("{")):
                parts.append("\n" * (number - line) or " ")
            parts.append(text)
            line = number + text.count("\n")
            if kind == "block_begin":
                head = "?"
            elif head == "?" and kind == "name":
                head = text
            elif head == "for" and text == "if":
                parts[-1] = f"if {_NEXT} and"
            elif kind == "block_end":
                if head in ("for", "macro"):
                    counted = True
                    parts[-1] = _COUNT + text  # a dash that eats the whitespace behind stays the last
                head = ""
            elif text == "**" and before not in ("(", ","):
                raise UserError(
                    "the chat template computes a power",
                    where=source,
                    observed="**",
                    required="text, loops and conditions",
                    remedy="write the number itself, or choose another template",
                )
            if kind != "whitespace":
                before = text
    except TemplateSyntaxError as error:
        raise broken(source, f"line {error.lineno}: {error.message}") from error
    if not counted:
        return template
    return _START + "".join(parts)  # its plus keeps a line break that the template begins with


def broken(source: str, observed: object) -> UserError:
    """A template that renders nothing, whatever it is given."""
    return UserError(
        "the chat template is broken",
        where=source,
        observed=observed,
        required="a Jinja template that renders a question and an answer",
        remedy="correct it, name a template in data.template, or give model.chat_template another file",
    )
