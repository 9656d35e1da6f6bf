"""The reward of JSON that has the form which its row asks for."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import jsonschema
import regex
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry, Resource, Specification
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, specification_with

from kt_ray.errors import UserError
from kt_ray.evaluate.choice import without_thinking
from kt_ray.parse import finds, parse_json
from kt_ray.rewards.answer_text import last_block
from kt_ray.rewards.verifiers import NO_REWARD, Verifier, shown


class JsonSchema(Verifier):
    """1 where the text, or its last fenced JSON block, parses and satisfies the schema."""

    name = "json_schema"
    required = "a JSON schema, as an object or as text; references stay inside of it"

    def check_answer(self, answer: Any) -> None:
        try:
            validator = _validator(answer)
            kind, schema = type(validator), validator.schema
            kind.check_schema(schema, format_checker=_formats(kind.FORMAT_CHECKER))
            specification = specification_with(kind.META_SCHEMA["$schema"], default=DRAFT202012)
            root = specification.create_resource(schema)
            # The library searches for unevaluated ones with re.
            module = re if '"unevaluatedProperties"' in json.dumps(schema) else regex
            _check(root, Registry().resolver_with_root(root), specification, set(), module.compile)
            validator.is_valid(None)
        except jsonschema.SchemaError as error:
            raise ValueError(f"no schema: {error.message[:200]} at {error.json_path}") from error
        except RecursionError as error:
            raise ValueError("a schema that refers to itself without end") from error
        except (AttributeError, TypeError) as error:  # what a reference leads to was not checked as one
            raise ValueError("a reference to what is no schema") from error

    def score(self, text: str, answer: Any) -> float:
        text = without_thinking(text)
        block = last_block(text, "json")
        try:
            value = json.loads(text if block is None else block, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return 0.0
        try:
            return float(_validator(answer).is_valid(value))
        except (RecursionError, OverflowError):
            return 0.0
        except (UserError, regex.error):  # a pattern took too long
            return NO_REWARD


def _validator(schema: Any) -> Validator:
    """For a schema as an object or as text. Raises ValueError: it is neither."""
    if isinstance(schema, str):
        schema = parse_json(schema, unique=True)
    names = [schema.get(key, "") for key in ("$schema", "$id")] if isinstance(schema, dict) else []
    if not isinstance(schema, dict | bool) or not all(isinstance(name, str) for name in names):
        raise ValueError(shown(schema))
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    # The library's search has no time limit, and an empty registry keeps references from the network.
    own = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "multipleOf": _multiple_of,
    }
    return extend(kind, own)(schema, registry=Registry())


def _formats(known: jsonschema.FormatChecker) -> jsonschema.FormatChecker:
    r"""The library's, but patterns are those of `finds`, which knows \p{L}."""
    checker = copy.copy(known)
    checker.checkers = {
        **known.checkers,
        "regex": (_is_pattern, (regex.error, RecursionError, OverflowError)),
    }
    return checker


def _is_pattern(value: object) -> bool:
    return not isinstance(value, str) or bool(regex.compile(value))


def _multiple_of(
    validator: Validator, step: Any, instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    """By the digits as they are written: as a binary fraction 19.99 is no multiple of 0.01."""
    if validator.is_type(instance, "number"):
        try:
            whole = Fraction(str(instance)) % Fraction(str(step)) == 0
        except ValueError:  # infinite
            whole = False
        if not whole:
            yield jsonschema.ValidationError(f"{instance!r} is not a multiple of {step!r}")


def _pattern(
    validator: Validator, pattern: str, instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, str) and not finds(pattern, instance, where="pattern"):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Validator, patterns: dict[str, Any], instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, dict):
        for pattern, inner in patterns.items():
            for name, value in instance.items():
                if finds(pattern, name, where="patternProperties"):
                    yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional_properties(
    validator: Validator, inner: Any, instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, dict):
        named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, value in instance.items():
            known = name in named or any(finds(one, name, where="patternProperties") for one in patterns)
            if not known:
                yield from validator.descend(value, inner, path=name)


def _check(
    schema: Resource[Any],
    resolver: Any,
    specification: Specification[Any],
    seen: set[int],
    compiled: Callable[[str], object],
) -> None:
    """Follows every reference that validation may follow: a name of its own ($id) changes what they mean.

    Raises:
        ValueError: one leads to nothing inside of the schema; a name in patternProperties is no pattern.
    """
    if id(schema.contents) in seen:
        return
    seen.add(id(schema.contents))
    named = schema.contents.get("patternProperties") if isinstance(schema.contents, dict) else None
    for pattern in named if isinstance(named, dict) else ():
        try:
            compiled(pattern)
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            raise ValueError(f"no schema: the name {pattern!r} in patternProperties: {error}") from error
    keys = ("$ref", "$dynamicRef") if isinstance(schema.contents, dict) else ()
    for reference in (schema.contents[key] for key in keys if isinstance(schema.contents.get(key), str)):
        try:
            found = resolver.lookup(reference)
        except Unresolvable as error:
            raise ValueError(f"a reference to nothing inside of it: {reference}") from error
        _check(specification.create_resource(found.contents), found.resolver, specification, seen, compiled)
    for inner in schema.subresources():
        _check(inner, resolver.in_subresource(inner), specification, seen, compiled)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
