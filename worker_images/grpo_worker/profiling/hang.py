"""Who holds a hanging gang up: how far each rank came in every process group, and where it is now.

The ranks that wait in a collective have begun it, the culprit has not; that holds for gloo and NCCL.
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
    """One rank. ``begun``: collectives begun in each process group, by the group's name (the same on
    all its ranks); ``where``: innermost calls of the thread that works."""

    rank: int
    begun: dict[str, int]
    where: tuple[str, ...]


def position(rank: int, thread: int) -> Position:
    """This rank's; safe while another thread (its identifier: ``thread``) is inside a collective."""
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
    """Write torch's flight recorder, the last collectives with their stacks, for torchfrtrace; ranks
    record when TORCH_FR_BUFFER_SIZE is set before their first collective."""
    c10d: Any = torch._C._distributed_c10d
    dump = c10d._dump_nccl_trace if dist.get_backend() == "nccl" else c10d._dump_fr_trace
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank_{rank}").write_bytes(dump())


def stuck_ranks(positions: Sequence[Position | None]) -> list[int]:
    """Ranks that others wait for: silent ones (None), or else those behind in some group and ahead
    in none, for who waits for them in one group may hold up others in the next."""
    silent = [rank for rank, found in enumerate(positions) if found is None]
    if silent:
        return silent
    known = [found for found in positions if found is not None]
    behind, ahead = set(), set()
    for name in {name for found in known for name in found.begun}:
        counts = {found.rank: found.begun[name] for found in known if name in found.begun}
        behind |= {rank for rank, count in counts.items() if count < max(counts.values())}
        ahead |= {rank for rank, count in counts.items() if count > min(counts.values())}
    return sorted(behind - ahead)


def report(positions: Sequence[Position | None]) -> str:
    """One line: the stuck ranks, what they do, and how far the others are."""
    parts = []
    for rank in stuck_ranks(positions):
        found = positions[rank]
        if found is None:
            parts.append(f"rank {rank} answers nothing")
            continue
        lagging = _lagging(found, positions)
        parts.append(f"rank {rank} is stuck in {' < '.join(found.where)} ({lagging})")
    return "; ".join(parts) or "all ranks began the same collectives"


def _lagging(mine: Position, positions: Sequence[Position | None]) -> str:
    gaps = []
    for name, count in mine.begun.items():
        most = max(p.begun.get(name, 0) for p in positions if p is not None)
        if most > count:
            gaps.append(f"group {name}: {count} collectives begun, others {most}")
    return "; ".join(gaps)
