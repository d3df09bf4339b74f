"""A request to export a checkpoint as a model, as written in the annotation ``rl.grpo.dev/export``."""

from pydantic import Field, ValidationError

from grpo_operator.api.base import Model, Name
from grpo_operator.api.errors import describe
from grpo_operator.api.names import EXPORT_ANNOTATION
from grpo_operator.api.v1alpha1.checkpoint import ExportQuantization

LONGEST_REQUEST = 253  # characters of the annotation
_GRAMMAR = "write FIELD=VALUE ..., such as 'step=100' or 'step=100 quantization=fp8-block128 name=final'"


class ExportRequest(Model):
    """The checkpoint to export, and the form of the export.

    ``step``: of the checkpoint; None: the newest. ``name``: of the directory below ``export/``; None: made of
    the step and the quantization. ``at``: any text, by which a request differs from the one before.
    """

    from_text = True
    step: int | None = Field(None, ge=0)
    quantization: ExportQuantization = "none"
    name: Name | None = None
    at: str = ""

    def directory(self, step: int) -> str:
        """Return the name of the directory below ``export/``. ``step``: of the checkpoint."""
        suffix = "" if self.quantization == "none" else f"-{self.quantization}"
        return self.name or f"checkpoint-{step}{suffix}"


def parse_request(text: str) -> ExportRequest:
    """Read the annotation's value. Raises ValueError that names the field, its value and the grammar."""
    if len(text) > LONGEST_REQUEST:
        raise ValueError(
            f"{EXPORT_ANNOTATION}: the value has more than {LONGEST_REQUEST} characters: shorten it"
        )
    fields: dict[str, str] = {}
    for word in text.split():
        name, has_value, value = word.partition("=")
        if not has_value or name in fields:
            problem = "is given twice" if name in fields else "has no value"
            raise ValueError(f"{EXPORT_ANNOTATION}: {name!r} {problem}: {_GRAMMAR}")
        fields[name] = value
    if not fields:
        raise ValueError(f"{EXPORT_ANNOTATION}: the value is empty: {_GRAMMAR}")
    try:
        return ExportRequest.model_validate(fields)
    except ValidationError as error:
        raise ValueError(describe(error, EXPORT_ANNOTATION)) from None


def request_text(step: int | None, quantization: str, name: str, at: str) -> str:
    """Return the annotation's value. Raises ValueError as ``parse_request`` does."""
    fields = {"step": step, "quantization": quantization, "name": name or None, "at": at}
    text = " ".join(f"{field}={value}" for field, value in fields.items() if value is not None)
    parse_request(text)
    return text
