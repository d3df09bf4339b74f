"""Order to export a checkpoint of a job, as the operator passes it to the program."""

import re

from pydantic import Field, ValidationError, field_validator

from grpo_operator.api.base import Model, Name, Path
from grpo_operator.api.errors import describe
from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_operator.api.v1alpha1.model import ModelSpec
from grpo_worker.megatron.export.config import Quantization

_OF_JOBS = re.compile(r"step-\d{8,}")  # names of the exports that jobs write by themselves


class ExportOrder(Model):
    """Checkpoint to export, and form and place of the export.

    ``folder``: of the job, where this pod has the store. ``store``, ``model``: ``checkpoint.store`` and
    ``model`` of its spec. ``name``: of the directory below ``export`` in the job's folder.
    """

    folder: Path = Field(pattern=r"^/.+$")
    store: StoreSpec
    model: ModelSpec
    step: int = Field(ge=0)
    quantization: Quantization = "none"
    name: Name

    @field_validator("name")
    @classmethod
    def _not_of_a_job(cls, name: str) -> str:
        if _OF_JOBS.fullmatch(name):
            raise ValueError(
                "exports that the job writes by itself have such names, and it would replace this one: "
                "choose another name, such as step-100"
            )
        return name

    @classmethod
    def parse(cls, text: str) -> "ExportOrder":
        """Return the order in JSON, which a newer release may have written.

        Raises ValueError that names each wrong field and its value.
        """
        try:
            return cls.model_validate_json(text, extra="allow")
        except ValidationError as error:
            raise ValueError(describe(error, "request")) from None
