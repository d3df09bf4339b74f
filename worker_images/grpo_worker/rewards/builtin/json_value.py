"""JSON: does the answer fit a schema, or equal a value?"""

import json
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from grpo_worker.rewards.builtin import GroundTruthError
from grpo_worker.rewards.builtin.fenced import last_block

_THOUGHT = "</think>"
# Keywords of a schema that demand nothing.
_REMARKS = frozenset(
    {
        "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
        "format",
    }
)  # fmt: skip
# Only the drafts of JSON Schema: without a registry of its own, a validator fetches what a $ref names.
_REGISTRY: Registry[Any] = Registry()
_DEMANDS = frozenset(Draft202012Validator.VALIDATORS) - _REMARKS


def compute_score(solution_str: str, ground_truth: Any, timeout_seconds: float) -> float:
    """Give 1 for an answer, or its last block of code, that is JSON and fits the ground truth, else 0.

    The ground truth is a JSON Schema, or else a value to equal. A value that reads like a schema can be
    given as ``{"const": value}``.
    """
    validator = _validator(_value(ground_truth))
    text = solution_str.rpartition(_THOUGHT)[2]
    for candidate in (text, last_block(text, ("json",))):
        try:
            answer = json.loads(candidate or "")
        except (ValueError, RecursionError):  # RecursionError: nested without end
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
            f"ground_truth={ground_truth!r:.200} is no JSON ({error}): give a JSON Schema or a value as JSON"
        ) from error


def _validator(value: Any) -> Any:
    if isinstance(value, dict) and "$schema" in value:
        kind = validator_for(value)
        try:
            kind.check_schema(value)
        except SchemaError as error:
            raise GroundTruthError(
                f"ground_truth is no JSON Schema: {error.json_path}: {error.message}"
            ) from error
        return kind(value, registry=_REGISTRY)
    return Draft202012Validator(value if _is_schema(value) else {"const": value}, registry=_REGISTRY)


def _is_schema(value: Any) -> bool:
    """Without ``$schema``: has it a schema's keywords, some that demand something, and no others?"""
    if not isinstance(value, dict) or not value.keys() & _DEMANDS or value.keys() - _DEMANDS - _REMARKS:
        return False
    try:
        Draft202012Validator.check_schema(value)
    except SchemaError:
        return False
    return True
