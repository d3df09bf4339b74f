"""Makespan: predicted seconds of planned transfers over interfaces of a known rate. Pure.

Members of a wave share an interface. A member starts a wave when the wave two before it has ended, because it
has memory for no more. Forwarding within a host is not counted: it does not use the interfaces.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from grpo_worker.weightsync.planner.schedule import Wave

_AHEAD = 2  # waves that a member has in progress


class _End(NamedTuple):
    """One direction of a member: its interface there, and the member."""

    direction: str
    interface: int
    member: tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Interfaces:
    """Numbers of the network interfaces of members: of a trainer rank, and of an engine's rank."""

    trainer: Callable[[int], int]
    engine: Callable[[int, int], int]


def makespan(engines: Sequence[Sequence[Wave]], interfaces: Interfaces, rate: float) -> float:
    """Return the seconds until all engines have a version.

    ``engines``: the waves of each engine's plan; all are executed at the same time. ``rate``: bytes/s of an
    interface in each direction.
    """
    free: dict[tuple[str, int], float] = defaultdict(float)  # time at which an interface is free
    ended: dict[tuple[str, int, int], list[float]] = defaultdict(list)  # of each member's waves
    for number in range(max(map(len, engines), default=0)):
        ends = [
            (_sender(e, m.source, interfaces), _receiver(e, m.landing, interfaces), m.nbytes)
            for e, waves in enumerate(engines)
            for m in (waves[number] if number < len(waves) else ())
        ]  # fmt: skip
        _advance(ends, free, ended, rate)
    return max((times[-1] for times in ended.values() if times), default=0.0)


def _sender(engine: int, rank: int, interfaces: Interfaces) -> _End:
    return _End("out", interfaces.trainer(rank), ("trainer", engine, rank))


def _receiver(engine: int, rank: int, interfaces: Interfaces) -> _End:
    return _End("in", interfaces.engine(engine, rank), ("engine", engine, rank))


def _advance(
    ends: Sequence[tuple[_End, _End, int]],
    free: dict[tuple[str, int], float],
    ended: dict[tuple[str, int, int], list[float]],
    rate: float,
) -> None:
    """Add one wave's messages (sender, receiver, bytes)."""
    load: dict[tuple[str, int], int] = defaultdict(int)
    start: dict[tuple[str, int], float] = {}
    for sender, receiver, nbytes in ends:
        begin = max(_ready(ended[sender.member]), _ready(ended[receiver.member]))
        for end in (sender, receiver):
            key = end.direction, end.interface
            load[key] += nbytes
            start[key] = min(start.get(key, begin), begin)
    for key, nbytes in load.items():
        free[key] = max(free[key], start[key]) + nbytes / rate
    finished: dict[tuple[str, int, int], float] = defaultdict(float)
    for sender, receiver, _ in ends:
        done = max(free["out", sender.interface], free["in", receiver.interface])
        for member in (sender.member, receiver.member):
            finished[member] = max(finished[member], done)
    for member, time in finished.items():
        ended[member].append(time)


def _ready(times: Sequence[float]) -> float:
    """Return the time at which a member can start its next wave."""
    return times[-_AHEAD] if len(times) >= _AHEAD else 0.0
