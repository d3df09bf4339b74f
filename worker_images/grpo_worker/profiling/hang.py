"""Diagnosis of a hanging gang from each rank's collectives, progress and stack.

Ranks that wait in a collective have begun it and the stuck rank has not, with gloo as well as with NCCL.
"""

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_worker.profiling.progress import PROGRESS, STORAGE_WORK, Progress

_FRAMES = 4  # innermost calls that a report shows
_PLACES = 4  # places with stuck ranks that a report shows
_NAMES = 4  # ranks that a report names at each place


@dataclass(frozen=True, slots=True)
class Position:
    """Where one rank stands.

    ``begun``: number of collectives begun in each process group, by the group's name, which is the same on
    all its ranks; ``where``: innermost calls of the computing thread; ``work``: kind of the last progress;
    ``amounts``: progress by kind of work; ``reads``: a store is being read.
    """

    rank: int
    begun: dict[str, int]
    where: tuple[str, ...]
    work: str = ""
    amounts: dict[str, int] = field(default_factory=dict)
    reads: bool = False

    @property
    def at_store(self) -> bool:
        """True if a rank that stands still waits for a store."""
        return self.reads or self.work in STORAGE_WORK


def progress() -> Progress:
    """Return this rank's progress, in which each collective begun counts as one piece of work."""
    reported = PROGRESS.get()
    groups = _groups()
    collectives = len(groups) + sum(group._get_sequence_number_for_group() for group, _ in groups)
    return Progress(reported.count + collectives, reported.work, reported.allowance)


def position(rank: int, thread: int) -> Position:
    """Return this rank's position; safe while the thread with id ``thread`` is inside a collective."""
    begun = {
        f"{name} {dist.get_process_group_ranks(group)}": group._get_sequence_number_for_group()
        for group, name in _groups()
    }
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame)[-_FRAMES:] if frame else []
    where = tuple(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(stack))
    return Position(rank, begun, where, PROGRESS.get().work, PROGRESS.amounts(), PROGRESS.reads)


def _groups() -> list[tuple[Any, str]]:
    from torch.distributed import distributed_c10d as c10d

    return list(c10d._world.pg_names.items())


def write_flight_record(folder: Path, rank: int) -> None:
    """Write torch's flight recorder, the last collectives with their stacks, for torchfrtrace.

    Ranks record only if TORCH_FR_BUFFER_SIZE was set before their first collective.
    """
    c10d: Any = torch._C._distributed_c10d
    dump = c10d._dump_nccl_trace if dist.get_backend() == "nccl" else c10d._dump_fr_trace
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank_{rank}").write_bytes(dump())


def stuck_ranks(positions: Sequence[Position | None]) -> list[int]:
    """Return the ranks that block the others.

    These are the unresponsive ranks (None) or, if all respond, the ranks that are behind in some group and
    ahead in none: a rank that is behind in one group and ahead in another waits for a stuck rank itself.
    """
    unresponsive = [rank for rank, position in enumerate(positions) if position is None]
    if unresponsive:
        return unresponsive
    known = [position for position in positions if position is not None]
    most, least = _extremes(known)
    behind = {p.rank for p in known for name, count in p.begun.items() if count < most[name]}
    ahead = {p.rank for p in known for name, count in p.begun.items() if count > least[name]}
    return sorted(behind - ahead)


def caused_outside(positions: Sequence[Position | None]) -> bool:
    """Return whether the stuck ranks' processes are frozen, or wait for a store."""
    blamed = stuck_ranks(positions) or range(len(positions))
    found = [positions[rank] for rank in blamed]
    return all(position is None or position.at_store for position in found)


def report(positions: Sequence[Position | None], hosts: Sequence[str] = ()) -> str:
    """Return one line with the stuck ranks, their innermost calls, and how far they are behind.

    ``hosts``: pod of each rank. Ranks at the same place are reported together. If no rank is behind the
    others, the line says where all of them are.
    """
    stuck = stuck_ranks(positions)
    known = [position for position in positions if position is not None]
    most, _ = _extremes(known)
    places: dict[str, list[int]] = {}
    for rank in stuck or range(len(positions)):
        places.setdefault(_place(positions[rank], most), []).append(rank)
    parts = [f"{_names(ranks, hosts)} {place}" for place, ranks in list(places.items())[:_PLACES]]
    if len(places) > _PLACES:
        parts.append(f"{sum(map(len, list(places.values())[_PLACES:]))} more ranks elsewhere")
    return ("" if stuck else "all ranks began the same collectives: ") + "; ".join(parts)


def _extremes(positions: Sequence[Position]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the largest and the smallest number of collectives begun in each group."""
    most: dict[str, int] = {}
    least: dict[str, int] = {}
    for position in positions:
        for name, count in position.begun.items():
            most[name] = max(most.get(name, count), count)
            least[name] = min(least.get(name, count), count)
    return most, least


def _place(stuck: Position | None, most: dict[str, int]) -> str:
    if stuck is None:
        return "does not respond"
    gaps = [
        f"group {name}: {count} collectives begun, others {most[name]}"
        for name, count in stuck.begun.items()
        if most[name] > count
    ]
    if stuck.work:
        gaps.append(f"last progress: {stuck.amounts.get(stuck.work, 0)} {stuck.work}")
    verb = "waits for a store in" if stuck.reads else "is stuck in"
    return f"{verb} {' < '.join(stuck.where)}" + (f" ({'; '.join(gaps)})" if gaps else "")


def _names(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    named = [f"rank {rank}" + (f" on {hosts[rank]}" if hosts else "") for rank in ranks[:_NAMES]]
    more = len(ranks) - _NAMES
    return ", ".join(named) + (f" and {more} more ranks" if more > 0 else "")
