"""Fields of Megatron-Core's configuration that a job passes through."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from grpo_operator.api.catalog.megatron.fields import VERSION, as_number, problem


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with numbers as such. Raises ValidationError with an entry for each refused field."""
    values = {name: as_number(name, value) for name, value in given.items()}
    errors = [_error(name, value) for name, value in values.items() if problem(name, value)]
    if errors:
        raise ValidationError.from_exception_data("megatron", errors)
    return values


def _error(name: str, value: Any) -> InitErrorDetails:
    kind = PydanticCustomError("megatron_field", "{problem}", {"problem": problem(name, value)})
    return InitErrorDetails(type=kind, loc=(name,), input=value)


MegatronFields = Annotated[
    dict[str, Any],
    Field(
        max_length=64,
        description=f"fields of Megatron-Core {VERSION}'s TransformerConfig by their names there, for what "
        "has no field of this API. They apply to policy, reference, critic and reward model. Sizes, number "
        "formats, architecture and other fields that grpo-operator sets are refused",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    ),
    AfterValidator(_checked),
]
