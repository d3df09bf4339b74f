"""Diagnosis of a hanging gang from each rank's collectives and stack.

Ranks that wait in a collective have begun it and the stuck rank has not, with gloo as well as with NCCL.
"""

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_FRAMES = 4  # innermost calls that a report shows


@dataclass(frozen=True, slots=True)
class Position:
    """Progress of one rank.

    ``begun``: number of collectives begun in each process group, by the group's name, which is the same on
    all its ranks; ``where``: innermost calls of the computing thread.
    """

    rank: int
    begun: dict[str, int]
    where: tuple[str, ...]


def position(rank: int, thread: int) -> Position:
    """Return this rank's position; safe while the thread with id ``thread`` is inside a collective."""
    from torch.distributed import distributed_c10d as c10d

    groups: list[tuple[Any, str]] = list(c10d._world.pg_names.items())
    begun = {
        f"{name} {dist.get_process_group_ranks(group)}": group._get_sequence_number_for_group()
        for group, name in groups
    }
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame)[-_FRAMES:] if frame else []
    where = tuple(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(stack))
    return Position(rank, begun, where)


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
    behind, ahead = set(), set()
    for name in {name for position in known for name in position.begun}:
        counts = {position.rank: position.begun[name] for position in known if name in position.begun}
        behind |= {rank for rank, count in counts.items() if count < max(counts.values())}
        ahead |= {rank for rank, count in counts.items() if count > min(counts.values())}
    return sorted(behind - ahead)


def report(positions: Sequence[Position | None]) -> str:
    """Return one line with the stuck ranks, their innermost calls, and how far they are behind."""
    parts = []
    for rank in stuck_ranks(positions):
        stuck = positions[rank]
        if stuck is None:
            parts.append(f"rank {rank} does not respond")
            continue
        parts.append(f"rank {rank} is stuck in {' < '.join(stuck.where)} ({_lagging(stuck, positions)})")
    return "; ".join(parts) or "all ranks began the same collectives"


def _lagging(mine: Position, positions: Sequence[Position | None]) -> str:
    gaps = []
    for name, count in mine.begun.items():
        most = max(p.begun.get(name, 0) for p in positions if p is not None)
        if most > count:
            gaps.append(f"group {name}: {count} collectives begun, others {most}")
    return "; ".join(gaps)
