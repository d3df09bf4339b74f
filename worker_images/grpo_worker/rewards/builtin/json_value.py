"""Verifier of JSON answers by a schema or an expected value."""

import json
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from grpo_worker.rewards.builtin import GroundTruthError
from grpo_worker.rewards.builtin.fenced import last_block

_THOUGHT_END = "</think>"
# Keywords of a schema that do not restrict values.
_ANNOTATIONS = frozenset(
    {
        "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
        "format",
    }
)  # fmt: skip
# Without an explicit registry a validator would download the schemas that a $ref names.
_REGISTRY: Registry[Any] = Registry()
_CONSTRAINTS = frozenset(Draft202012Validator.VALIDATORS) - _ANNOTATIONS


def compute_score(solution_str: str, ground_truth: Any, timeout_seconds: float) -> float:
    """Return 1 if the answer, or its last code block, is JSON and fits the ground truth, else 0.

    The ground truth is a JSON Schema or the expected value. A value that looks like a schema can be given as
    ``{"const": value}``.
    """
    validator = _validator(_value(ground_truth))
    text = solution_str.rpartition(_THOUGHT_END)[2]
    for candidate in (text, last_block(text, ("json",))):
        try:
            answer = json.loads(candidate or "")
        except (ValueError, RecursionError):  # RecursionError: nested too deeply
            continue
        try:
            return float(validator.is_valid(answer))
        except Unresolvable as error:
            raise GroundTruthError(
                f"ground_truth: $ref={error.ref!r:.200} does not resolve: put the definition into $defs"
            ) from error
    return 0.0


def _value(ground_truth: Any) -> Any:
    if not isinstance(ground_truth, str):
        return ground_truth
    try:
        return json.loads(ground_truth)
    except ValueError as error:
        raise GroundTruthError(
            f"ground_truth={ground_truth!r:.200} is not JSON ({error}): give a JSON Schema or a value as JSON"
        ) from error


def _validator(value: Any) -> Any:
    if isinstance(value, dict) and "$schema" in value:
        kind = validator_for(value)
        try:
            kind.check_schema(value)
        except SchemaError as error:
            raise GroundTruthError(
                f"ground_truth is not a valid JSON Schema: {error.json_path}: {error.message}"
            ) from error
        return kind(value, registry=_REGISTRY)
    return Draft202012Validator(value if _is_schema(value) else {"const": value}, registry=_REGISTRY)


def _is_schema(value: Any) -> bool:
    """Return whether a value without ``$schema`` is a schema.

    A schema has only a schema's keywords, and at least one of them restricts values.
    """
    if not isinstance(value, dict) or not value.keys() & _CONSTRAINTS:
        return False
    if value.keys() - _CONSTRAINTS - _ANNOTATIONS:
        return False
    try:
        Draft202012Validator.check_schema(value)
    except SchemaError:
        return False
    return True
