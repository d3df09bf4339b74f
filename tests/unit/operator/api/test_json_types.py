"""Numbers and truth values have the types that the CRDs ask for."""

from typing import Any

import pytest
from pydantic import ValidationError

from grpo_operator.api.base import Model
from grpo_operator.api.errors import describe
from grpo_operator.api.json_types import number_fields
from grpo_operator.api.v1alpha1.export_request import ExportRequest
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.profile_request import parse_request
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec

_NUMBERS = {"integer", "number", "boolean"}


class _Given(Model):
    """One field of each kind."""

    whole: int = 1
    real: float | None = None
    truth: bool = False
    several: list[int] = []
    named: dict[str, int] = {}
    text: str = ""


@pytest.mark.parametrize(
    "given",
    [
        {"whole": 2}, {"whole": 2.0}, {"real": 1}, {"real": 0.5}, {"real": None}, {"truth": True},
        {"several": [1, 2]}, {"named": {"a": 1}}, {"text": "2"},
    ],
)  # fmt: skip
def test_values_of_the_type_are_accepted(given: dict[str, Any]) -> None:
    assert getattr(_Given.model_validate(given), next(iter(given))) == next(iter(given.values()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"whole": "2"}, "spec.whole: must be an integer, not a text: write 2 without quotes (got '2')"),
        ({"whole": "two"}, "spec.whole: must be an integer, not a text (got 'two')"),
        ({"whole": True}, "spec.whole: must be an integer (got True)"),
        ({"real": "1e-6"}, "spec.real: must be a number, not a text: write 1e-6 without quotes (got '1e-6')"),
        ({"real": False}, "spec.real: must be a number (got False)"),
        ({"truth": "true"}, "spec.truth: must be true or false, not a text: write true without quotes"),
        ({"truth": 1}, "spec.truth: must be true or false (got 1)"),
        ({"several": [1, "2"]}, "spec.several.1: must be an integer, not a text"),
        ({"named": {"a": "1"}}, "spec.named.a: must be an integer, not a text"),
        ({"whole": 2.5}, "spec.whole: Input should be a valid integer"),
    ],
)
def test_other_values_are_refused_with_a_remedy(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        _Given.model_validate(given)
    assert message in describe(refused.value)


def test_all_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(ValidationError) as refused:
        _Given.model_validate({"whole": "2", "real": "3"})
    assert [error["loc"] for error in refused.value.errors()] == [("whole",), ("real",)]


def test_the_name_in_python_counts_too() -> None:
    with pytest.raises(ValidationError, match="must be an integer"):
        GRPOJobSpec.model_validate({"total_steps": "2"})


def test_requests_in_annotations_are_texts() -> None:
    assert parse_request("torch steps=3 ranks=0,1").of_ranks == (0, 1)
    assert ExportRequest.model_validate({"step": "7"}).step == 7


def _models(root: type[Model]) -> set[type[Model]]:
    """Return a model and those of its fields, at every level."""
    inner: set[type[Model]] = {root}
    for field in root.model_fields.values():
        for candidate in _types(field.annotation):
            inner |= _models(candidate)
    return inner


def _types(annotation: Any) -> list[type[Model]]:
    if isinstance(annotation, type) and issubclass(annotation, Model):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in _types(part)]


def _kinds(schema: dict[str, Any]) -> set[str]:
    """Return the JSON types in a field's schema, but not those of models in it."""
    parts = [*schema.get("anyOf", []), *([schema["items"]] if "items" in schema else [])]
    others = schema.get("additionalProperties")
    parts += [others] if isinstance(others, dict) else []
    return {schema.get("type", "")}.union(*map(_kinds, parts))


@pytest.mark.parametrize("root", [GRPOJobSpec, RolloutPoolSpec])
def test_every_number_of_the_crd_is_checked(root: type[Model]) -> None:
    models = _models(root)
    assert len(models) > 10
    for model in models:
        properties = model.model_json_schema(by_alias=True)["properties"]
        numbers = {name for name, schema in properties.items() if _kinds(schema) & _NUMBERS}
        assert numbers <= number_fields(model).keys(), model
