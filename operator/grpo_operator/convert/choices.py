"""Decisions of the user that a configuration does not contain."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choices:
    """Options of ``grpo-convert``.

    ``rollout_nodes``: nodes of the pool for engines only; None: as the source. ``nodes``: all nodes; None: as
    the source. ``steps``: totalSteps. ``rows``: rows of the data, from which epochs become steps.
    """

    name: str = ""
    reward: str = ""
    rollout_nodes: int | None = None
    nodes: int | None = None
    steps: int | None = None
    rows: int | None = None
    gpu_type: str = ""
