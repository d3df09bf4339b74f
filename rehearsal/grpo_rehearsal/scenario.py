"""Scenario of a rehearsed job: its steps, and its faults with their times."""

from dataclasses import dataclass, field

from grpo_rehearsal.durations import Assumptions


@dataclass(frozen=True, slots=True)
class Scenario:
    """Faults of one rehearsal. Times are seconds after the first request of the first step's generation.

    ``engine_deaths``: (engine, time). ``slow_engines``: (engine, factor). ``late_engines``: (engine, seconds
    after the start of the job until its pod exists). ``late_agents``: (engine, seconds by which every answer
    of its agent is late). ``hung_rank``: (rank, time). ``slow_ranks``: (rank, factor of its passes).
    ``dead_nodes``: (node of the training pool, time). ``lost_head``: time of the loss of Ray's head, which
    ends all ranks. ``steps``: of the job. ``assumed``: figures that no plan derives.
    """

    name: str = "calm"
    steps: int = 1
    engine_deaths: tuple[tuple[int, float], ...] = ()
    slow_engines: tuple[tuple[int, float], ...] = ()
    late_engines: tuple[tuple[int, float], ...] = ()
    late_agents: tuple[tuple[int, float], ...] = ()
    hung_rank: tuple[int, float] | None = None
    slow_ranks: tuple[tuple[int, float], ...] = ()
    dead_nodes: tuple[tuple[int, float], ...] = ()
    lost_head: float | None = None
    assumed: Assumptions = field(default_factory=Assumptions)

    def check(self, engines: int, ranks: int, nodes: int) -> None:
        """Raise ValueError that names an engine, a rank or a node that the job does not have."""
        one_rank = () if self.hung_rank is None else (self.hung_rank,)
        for what, count, faults in (
            (
                "engine",
                engines,
                self.engine_deaths + self.slow_engines + self.late_engines + self.late_agents,
            ),
            ("rank", ranks, one_rank + self.slow_ranks),
            ("node of the training pool", nodes, self.dead_nodes),
        ):
            for number, _ in faults:
                if not 0 <= number < count:
                    raise ValueError(f"there is no {what} {number}: the job has {count}, numbered from 0")


def parse_pair(text: str) -> tuple[int, float]:
    """Convert ``NUMBER:VALUE``. Raises ValueError that names the text."""
    number, _, value = text.partition(":")
    try:
        return int(number), float(value)
    except ValueError as error:
        raise ValueError(f"{text!r} is not NUMBER:VALUE, for example 3:120") from error
