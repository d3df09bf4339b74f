"""Message from an agent to the operator: what is wrong with the GPUs of its node, at ``GET /v1/gpus``.

It holds findings only, so that the answer of a healthy node has the same few bytes for any number of GPUs.
"""

from enum import StrEnum

from pydantic import Field

from grpo_operator.api.messages import Message

MAX_FINDINGS = 64  # in one report


class Severity(StrEnum):
    """Health of a GPU. ``DEGRADED``: slower, or due for a reset; ``SICK``: work on it fails."""

    OK = "Ok"
    DEGRADED = "Degraded"
    SICK = "Sick"


class GpuFinding(Message):
    """One thing that is wrong with a GPU.

    ``reason``: CamelCase, as in conditions. ``since``: when the agent saw it first, in seconds since 1970.
    """

    gpu: str = Field(min_length=1, max_length=64)
    index: int = Field(ge=0)
    severity: Severity
    reason: str = Field(max_length=64, pattern=r"^[A-Z][A-Za-z0-9]*$")
    text: str = Field(max_length=256)
    since: float = Field(ge=0)


class GpuReport(Message):
    """The findings of one agent. ``gpus``: that it reads; 0: it has no access to NVML."""

    gpus: int = 0
    findings: tuple[GpuFinding, ...] = Field((), max_length=MAX_FINDINGS)
