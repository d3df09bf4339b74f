"""Base class, common field types and constants of the API models."""

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from grpo_operator.api.json_types import check_numbers, number_fields
from grpo_operator.api.rules import Rule, UpdateRule
from grpo_operator.api.unknown_fields import with_unknown

GROUP = "rl.grpo.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
LONGEST_MESSAGE = 1024  # characters in a status; longer messages of pods are cut
LONGEST_NAME = 40  # characters in metadata.name of a GRPOJob: names of pods and services derive from it


class Model(BaseModel):
    """Base of every API object: camelCase in manifests, unknown fields refused, immutable.

    ``rules`` and ``update_rules`` become ``x-kubernetes-validations`` in the CRD. ``rules`` are also
    checked whenever a model is built, so that the API server, the command line and the controller
    accept the same specs. For the same reason texts are no numbers, unless ``from_text`` is set: then the
    fields come from a text. ``object_rules`` of a spec are update rules over the whole object with its
    status.
    """

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)
    rules: ClassVar[tuple[Rule[Any], ...]] = ()
    update_rules: ClassVar[tuple[UpdateRule, ...]] = ()
    object_rules: ClassVar[tuple[UpdateRule, ...]] = ()
    from_text: ClassVar[bool] = False
    _numbers: ClassVar[dict[str, type]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls._numbers = {} if cls.from_text else number_fields(cls)

    @model_validator(mode="before")
    @classmethod
    def _check_numbers(cls, data: Any) -> Any:
        if isinstance(data, dict):
            check_numbers(data, cls._numbers)
        return data

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if errors := [rule.error(self) for rule in self.rules if not rule.holds(self)]:
            raise ValueError("; ".join(errors))
        return self

    @classmethod
    def of_any_release(cls, data: Any) -> Self:
        """Return the object made from data that a newer release may have written.

        Fields that this release does not know are kept, at every level, and ``wire`` returns them.
        """
        return cls.model_validate(data, extra="allow")

    def wire(self) -> dict[str, Any]:
        """Return the object as JSON-compatible data with camelCase keys, without unset values."""
        return with_unknown(self, self.model_dump(by_alias=True, mode="json", exclude_none=True))


Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
ShortString = Annotated[str, Field(min_length=1, max_length=253)]
Path = Annotated[str, Field(min_length=1, max_length=1024)]


class Device(StrEnum):
    """Kind of device that a process computes on. ``cpu`` needs no GPU node and uses gloo."""

    CUDA = "cuda"
    CPU = "cpu"


class Resources(Model):
    """Resource requests of one container; memory and GPU limits equal the requests."""

    cpu: str | None = Field(
        None,
        pattern=r"^[0-9]+m?$|^[0-9]+\.[0-9]+$",
        max_length=16,
        description="CPU cores; default: what the plan needs",
    )
    memory: str | None = Field(
        None,
        pattern=r"^[0-9]+(Ki|Mi|Gi|Ti)?$",
        max_length=16,
        description="memory in bytes, with an optional suffix: Ki, Mi, Gi or Ti; default: what the plan "
        "needs",
    )

    def or_else(self, default: "Resources") -> "Resources":
        """Return these resources, with those of ``default`` where none are set."""
        return Resources(cpu=self.cpu or default.cpu, memory=self.memory or default.memory)

    def requests(self) -> dict[str, str]:
        """Return what is set, in the form of a container's requests."""
        return {name: value for name, value in (("cpu", self.cpu), ("memory", self.memory)) if value}


AGENT_RESOURCES = Resources(cpu="50m", memory="512Mi")  # of an agent that holds nothing as large as a model
