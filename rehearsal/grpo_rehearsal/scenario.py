"""Scenario of a rehearsed job: its steps, and its faults with their times."""

from dataclasses import dataclass, field

from grpo_rehearsal.durations import Assumptions


@dataclass(frozen=True, slots=True)
class Scenario:
    """Faults of one rehearsal. Times are seconds after the first request of the first step's generation.

    ``engine_deaths``: (engine, time). ``slow_engines``: (engine, factor). ``late_engines``: (engine, seconds
    after the start of the job until its pod exists). ``hung_rank``: (rank, time). ``dead_node``: (node of the
    training pool, time). ``steps``: of the job. ``assumed``: figures that no plan derives.
    """

    name: str = "calm"
    steps: int = 1
    engine_deaths: tuple[tuple[int, float], ...] = ()
    slow_engines: tuple[tuple[int, float], ...] = ()
    late_engines: tuple[tuple[int, float], ...] = ()
    hung_rank: tuple[int, float] | None = None
    dead_node: tuple[int, float] | None = None
    assumed: Assumptions = field(default_factory=Assumptions)


def parse_pair(text: str) -> tuple[int, float]:
    """Convert ``NUMBER:VALUE``. Raises ValueError that names the text."""
    number, _, value = text.partition(":")
    try:
        return int(number), float(value)
    except ValueError as error:
        raise ValueError(f"{text!r} is not NUMBER:VALUE, for example 3:120") from error
