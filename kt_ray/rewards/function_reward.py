"""A reward function of the user's, with the signature of those that trl's GRPOTrainer takes."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from kt_ray.errors import UserError
from kt_ray.parse import read_text
from kt_ray.rewards.completion import Completion, go_on
from kt_ray.terminal import shortened

# What trl passes beside the columns, and what a column may therefore not be called.
_OURS = ("prompts", "completions", "completion_ids")
_NOT_PASSED = (*_OURS, "prompt", "completion")


class FunctionReward:
    """`function(prompts, completions, completion_ids, **columns)` of a Python file, called once per batch.

    Args:
        path: the file; it may import modules beside it.
        function: its name there; a coroutine function is awaited, always in the same event loop.

    Raises:
        UserError: no such file or function, or the file or the signature cannot be used.
    """

    def __init__(self, path: Path, function: str) -> None:
        self.name = function
        self._path = path
        self._where = f"{path}:{function}"
        self._folder = path.resolve().parent
        self._before: AbstractSet[str] | None = None  # modules, if the folder became one that Python looks in
        self._runner = asyncio.Runner()
        _open.add(self)
        try:
            self._function = self._loaded()
            parameters = self._parameters()
        except BaseException:
            self.close()
            raise
        self._every_column = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = {p.name for p in named}
        self._needed = [p.name for p in named if p.default is p.empty and p.name not in _OURS]

    def check_row(self, row: Mapping[str, Any], where: str) -> None:
        absent = [name for name in self._needed if name not in row or name in _NOT_PASSED]
        if absent:
            columns = [name for name in row if name not in _NOT_PASSED]
            raise UserError(
                f"the reward function {self._where} takes an argument that is no column of the data",
                where=where,
                observed=f"the columns {', '.join(columns) or 'none'}",
                required=", ".join(absent),
                remedy=f"add the column, or give the argument a default; {', '.join(_OURS)} are always there",
            )

    def __call__(self, completions: Sequence[Completion], waiting: Callable[[], None] = go_on) -> np.ndarray:
        arguments = self._arguments(completions)
        try:
            result = self._function(**arguments)
            if inspect.isawaitable(result):
                result = self._runner.run(_awaited(result))
            others = str | bytes | Mapping | AbstractSet  # the last has no order
            is_list = isinstance(result, Iterable) and not isinstance(result, others)
            values = list(result) if is_list else None
        except BaseException as error:  # asyncio's CancelledError is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            raise self._raised("failed", error, f"{len(completions)} samples") from error
        if values is None or len(values) != len(completions):
            size = f"of {len(values)}" if values is not None else str(result)[:80]
            required = f"a list of {len(completions)}, one reward per sample"
            raise self._returned(f"{type(result).__name__} {size}", required)
        return np.array(
            [self._reward(value, number, completions[number]) for number, value in enumerate(values)],
            dtype=np.float64,
        )

    def close(self) -> None:
        """The next job of this process may have modules of the same names beside its file."""
        self._runner.close()
        _open.discard(self)
        before, self._before = self._before, None
        if before is None:
            return
        for other in _open:
            if other._folder == self._folder:  # which still imports from there, and forgets when it closes
                other._before = before
                return
        new = {top for name in sys.modules if (top := name.partition(".")[0]) not in before}
        own = {top for top in new if _home(sys.modules.get(top)) == self._folder}
        for name in [name for name in sys.modules if name.partition(".")[0] in own]:
            del sys.modules[name]
        with suppress(ValueError):  # the file may have changed it
            sys.path.remove(str(self._folder))

    def _loaded(self) -> Callable[..., Any]:
        remedy = "correct the file, or set another reward="
        what, other = "the file of the reward function", "set reward=file.py or reward=file.py:function"
        read_text(self._path, what, other)
        if str(self._folder) not in sys.path:
            self._before = set(sys.modules)
            sys.path.append(str(self._folder))  # last: no module beside it hides one of the library
        spec = importlib.util.spec_from_file_location(f"reward_{self._path.stem}", self._path.resolve())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and pickle look there
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise self._raised("cannot be imported", error, "the import") from error
        function = getattr(module, self.name, None)
        if not callable(function):
            own = ((n, f) for n, f in vars(module).items() if inspect.isfunction(f))
            found = [n for n, f in own if f.__module__ == spec.name]
            raise UserError(
                f"the file of the reward function has no function {self.name}",
                where=str(self._path),
                observed=", ".join(found) or "no function",
                remedy=f"set reward={self._path}:<function>" if found else remedy,
            )
        return function

    def _parameters(self) -> list[inspect.Parameter]:
        try:
            parameters = list(inspect.signature(self._function).parameters.values())
        except (TypeError, ValueError):  # written in C
            parameters = []
        wrong = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if wrong or not parameters:
            raise UserError(
                f"the reward function {self._where} cannot be called",
                observed=f"the arguments {', '.join(wrong)} without a name" if wrong else "no arguments",
                required="keyword arguments: prompts, completions, completion_ids and columns of the data",
                remedy=f"write def {self.name}(completions, **columns)",
            )
        return parameters

    def _arguments(self, completions: Sequence[Completion]) -> dict[str, list[Any]]:
        """Copies: a function may change what it is given, and prompts and columns serve the whole run."""
        arguments: dict[str, list[Any]] = {
            "prompts": [c.prompt for c in completions],
            "completions": [
                c.text if isinstance(c.prompt, str) else [{"role": "assistant", "content": c.text}]
                for c in completions
            ],
            "completion_ids": [list(c.ids) for c in completions],
        }
        columns = dict.fromkeys(name for c in completions for name in c.row if name not in _NOT_PASSED)
        arguments |= {name: [c.row.get(name) for c in completions] for name in columns}
        return {
            name: [copy.deepcopy(value) for value in values]
            for name, values in arguments.items()
            if self._every_column or name in self._names
        }

    def _reward(self, value: Any, number: int, completion: Completion) -> float:
        if value is None:
            return math.nan
        reward = math.nan
        # A text has no __float__, but numpy's has; an array of one element has one.
        if hasattr(value, "__float__") and not isinstance(value, str) and getattr(value, "ndim", 0) == 0:
            with suppress(Exception):  # of any library: symbols of sympy and dates of numpy have one, too
                reward = float(value)
        if not math.isfinite(reward):
            answer = shortened(completion.text, 80)
            raise self._returned(
                f"{type(value).__name__} {str(value)[:80]} for sample {number}, the answer {answer!r}",
                "a finite number, or None for no reward",
            )
        return reward

    def _returned(self, observed: str, required: str) -> UserError:
        return UserError(
            "a reward function returned what is no reward",
            where=self._where,
            observed=observed,
            required=required,
            remedy="correct the function",
        )

    def _raised(self, what: str, error: BaseException, during: str) -> UserError:
        own = str(self._path.resolve())
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == own]
        if isinstance(error, SyntaxError) and error.filename == own:
            lines = [error.lineno]
        return UserError(
            f"a reward function {what}",
            where=f"{self._where}, line {lines[-1]}" if lines else self._where,
            observed=f"{type(error).__name__}: {shortened(str(error), 300)} during {during}",
            remedy="correct the function",
        )


def _home(module: Any) -> Path | None:
    """The directory in which Python found a module or package that it imported by its own name."""
    spec = getattr(module, "__spec__", None)
    places = [*(getattr(spec, "submodule_search_locations", None) or ()), getattr(spec, "origin", None)]
    return Path(places[0]).parent if isinstance(places[0], str) else None


_open: WeakSet[FunctionReward] = WeakSet()


async def _awaited(result: Any) -> Any:
    return await result
