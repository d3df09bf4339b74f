"""Pods and containers of a job's parts (pure)."""

from enum import StrEnum
from typing import NamedTuple

from grpo_operator.api.names import JOB_LABEL, POOL_LABEL

_MOST_PODS = 1024  # whose logs are read at once


class Part(StrEnum):
    """Part of a job whose logs can be shown."""

    CONTROLLER = "controller"
    TRAINER = "trainer"
    TRAINER_AGENT = "trainer-agent"
    ENGINE = "engine"
    ENGINE_AGENT = "engine-agent"
    HEAD = "head"


_PLACES = {
    Part.CONTROLLER: ("controller", "controller"),
    Part.TRAINER: ("trainer", "ray-worker"),
    Part.TRAINER_AGENT: ("trainer", "agent"),
    Part.ENGINE: ("rollout", "engine"),
    Part.ENGINE_AGENT: ("rollout", "agent"),
    Part.HEAD: ("head", "ray-head"),
}


class LogTarget(NamedTuple):
    """Pods and container of a part of a job. ``pool``: value of the pods' label."""

    pool: str
    container: str

    @classmethod
    def of(cls, part: Part) -> "LogTarget":
        return cls(*_PLACES[part])

    def selector(self, job: str) -> str:
        """Return the selector of the pods of this part of a job."""
        return f"{JOB_LABEL}={job},{POOL_LABEL}={self.pool}"

    def arguments(self, job: str) -> list[str]:
        """Return the arguments of ``kubectl logs`` for this part of a job."""
        most = f"--max-log-requests={_MOST_PODS}"
        return ["-l", self.selector(job), "-c", self.container, "--prefix", most]
