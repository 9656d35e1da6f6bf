"""The one error that a user can cause, and how it reads.

Every message answers four questions: what is wrong, where (file, key, layer, socket), what was
observed against what is required, and which command or key mends it. Ray carries exceptions
between processes by pickling them, so `UserError` rebuilds itself from its fields.
"""

from __future__ import annotations


class UserError(Exception):
    """Bad input from outside: configuration, files, hardware, data.

    Args:
        what: the fault in one clause, no trailing full stop ("lora.rank must be at least 1").
        where: file, key, layer, socket or line the fault sits in ("" when `what` says it).
        observed: the value found (any object; shown with `str`).
        required: what would have been accepted.
        remedy: the command or key that mends it, as an imperative.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        observed: object = None,
        required: object = None,
        remedy: str = "",
    ) -> None:
        self.what = what
        self.where = where
        self.observed = None if observed is None else str(observed)
        self.required = None if required is None else str(required)
        self.remedy = remedy
        super().__init__(self.line())

    def line(self) -> str:
        """The whole message on one line."""
        parts = [self.what]
        if self.where:
            parts.append(f"at {self.where}")
        if self.observed is not None:
            parts.append(f"found {self.observed}")
        if self.required is not None:
            parts.append(f"required {self.required}")
        text = "; ".join(parts)
        if self.remedy:
            text += f". To fix: {self.remedy}"
        return " ".join(text.split())

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.observed, self.required, self.remedy))


class BadStep(UserError):
    """A training step that must not be applied: its loss or gradients are not finite, or far too large."""


def _rebuild(
    cls: type[UserError],
    what: str,
    where: str,
    observed: str | None,
    required: str | None,
    remedy: str,
) -> UserError:
    return cls(what, where=where, observed=observed, required=required, remedy=remedy)
