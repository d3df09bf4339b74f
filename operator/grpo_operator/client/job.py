"""A GRPOJob as the client returns it."""

from dataclasses import dataclass, field
from typing import Any, Self

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.status import GRPOJobStatus, Phase
from grpo_operator.client.conditions import message_of

ENDED = (Phase.SUCCEEDED, Phase.FAILED)


class JobFailedError(Exception):
    """A job has failed, or cannot run. ``job``: its last state."""

    def __init__(self, job: "Job") -> None:
        super().__init__(f"GRPOJob {job.name} is {job.phase}: {job.message}")
        self.job = job


@dataclass(frozen=True, slots=True)
class Job:
    """State of a GRPOJob. ``spec`` and ``status`` leave out fields that this release does not know.

    ``manifest``: the whole object, as the API server returned it.
    """

    name: str
    namespace: str
    uid: str
    spec: GRPOJobSpec
    status: GRPOJobStatus
    manifest: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> Self:
        """Return the job of an object from the API server."""
        meta = manifest["metadata"]
        spec = GRPOJobSpec.of_any_release(manifest["spec"])
        status = GRPOJobStatus.of_any_release(manifest.get("status") or {})
        return cls(meta["name"], meta["namespace"], meta["uid"], spec, status, manifest)

    @property
    def phase(self) -> str:
        """Return the phase; "" before the operator has seen the job."""
        return self.status.phase or ""

    @property
    def ended(self) -> bool:
        """Return whether the job has succeeded or failed."""
        return self.phase in ENDED

    @property
    def message(self) -> str:
        """Return the message of the condition that matters most now, or ""."""
        return message_of(self.manifest.get("status") or {})
