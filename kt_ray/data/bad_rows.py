"""Rows that cannot be trained on: told all at once, or left out and counted."""

from __future__ import annotations

from kt_ray.errors import UserError

_SHOWN = 20  # rows that a message names
_SKIP = "data.bad_rows=skip leaves such rows out"


class BadRows:
    """The faults of a data set's rows.

    Args:
        skip: leave bad rows out; else they are an error, of all of them.
    """

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self._faults: list[UserError] = []

    def add(self, fault: UserError) -> None:
        """One more row, which is left out."""
        self._faults.append(fault)

    def settle(self, kept: int, name: str) -> str:
        """What was left out of the `kept` other rows of a data set, for the user; "" = nothing.

        Raises:
            UserError: there are bad rows and they are not to be left out, or there are no others.
        """
        if not self._faults:
            return ""
        first, count = self._faults[0], len(self._faults)
        if not kept and (self.skip or count > 1):
            raise first  # the same in each: what mends the first one mends them
        some = f"{count:,} of {kept + count:,} rows"
        if self.skip:
            return f"{name}: {some} left out (data.bad_rows=skip): {self._listed()}"
        remedy = f"{first.remedy}; {_SKIP}" if count == 1 else f"correct or delete these rows; {_SKIP}"
        if count == 1:
            raise type(first)(
                first.what, where=first.where, observed=first.observed, required=first.required, remedy=remedy
            )
        alike = first.observed and all(fault.what == first.what for fault in self._faults)
        raise UserError(
            f"{some} of {name} are bad: {self._listed()}",
            observed=f"{first.observed} (the first)" if alike else None,
            remedy=remedy,
        )

    def _listed(self) -> str:
        """The first rows, by what is wrong with them."""
        by_fault: dict[str, list[str]] = {}
        for fault in self._faults[:_SHOWN]:
            place = fault.where.rpartition("/")[2]  # rows.jsonl, line 3
            by_fault.setdefault(fault.what, []).append(place.partition(", ")[2] or place)
        text = "; ".join(f"{what} ({', '.join(places)})" for what, places in by_fault.items())
        more = len(self._faults) - _SHOWN
        return f"{text}; and {more:,} more" if more > 0 else text
