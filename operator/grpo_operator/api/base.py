"""Shared parts of the API models: naming, bounds, CEL rules, enumerations."""

from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

GROUP = "rl.grpo.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
LONGEST_NAME = 40  # characters of what users create: names of pods and services derive from it


class Model(BaseModel):
    """Base of every API object: camelCase on the wire, unknown keys refused, immutable.

    ``cel`` holds (rule, message) pairs that become ``x-kubernetes-validations`` in the CRD;
    Python validators repeat them so that the command line and the controller agree.
    """

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)
    cel: ClassVar[tuple[tuple[str, str], ...]] = ()

    def wire(self) -> dict[str, Any]:
        """The object as JSON-compatible data with camelCase keys, unset values left out."""
        return self.model_dump(by_alias=True, mode="json", exclude_none=True)


Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
ShortString = Annotated[str, Field(min_length=1, max_length=253)]
Path = Annotated[str, Field(min_length=1, max_length=1024)]


class Device(StrEnum):
    """Where a process computes. ``cpu`` needs no GPU node and uses gloo."""

    CUDA = "cuda"
    CPU = "cpu"


class Resources(Model):
    """Requests of one container; limits equal requests for memory and GPUs."""

    cpu: str = Field("1", pattern=r"^[0-9]+m?$|^[0-9]+\.[0-9]+$", max_length=16, description="CPU cores")
    memory: str = Field(
        "2Gi", pattern=r"^[0-9]+(Ki|Mi|Gi|Ti)?$", max_length=16, description="bytes of memory"
    )
