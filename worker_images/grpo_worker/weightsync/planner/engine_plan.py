"""Plan of the transfers of a version to one engine, and each member's part of it. Pure.

Every engine has a plan of its own, so a change of an engine changes no other plan. A new plan takes the load
that trainer ranks already have from other engines into account.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_worker.weightsync.planner.boxes import Kept, needed_regions
from grpo_worker.weightsync.planner.regions import Box, Held, Tensor, atoms
from grpo_worker.weightsync.planner.routes import route
from grpo_worker.weightsync.planner.schedule import Message, Region, Wave, make_schedule

BUFFERS = 3  # of an engine rank: of the wave that arrives, of the one forwarded, of the one written
_ATOMS_A_WAVE = 16  # at least; a smaller number would leave waves uneven
_LARGEST = 8 << 20  # bytes of an atom; larger ones would not be balanced as well


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a plan: the messages of each wave that one member sends, receives or forwards.

    ``tensors``: those of the messages. Ranks of engines are numbered from 0.
    """

    tensors: dict[str, Tensor]
    waves: tuple[Wave, ...]

    def to_json(self) -> str:
        """Return the part as JSON, in which tensors have numbers."""
        numbers = {name: index for index, name in enumerate(self.tensors)}
        tensors = [[name, t.rows, t.columns, t.dtype] for name, t in self.tensors.items()]
        waves = [[_brief(message, numbers) for message in wave] for wave in self.waves]
        return json.dumps([tensors, waves], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Part":
        """Parse the output of ``to_json``."""
        tensors, waves = json.loads(text)
        names = [name for name, *_ in tensors]
        return cls(
            {name: Tensor(*rest) for name, *rest in tensors},
            tuple(tuple(_full(message, names) for message in wave) for wave in waves),
        )


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """All messages of a version to one engine.

    ``sent``: bytes that each trainer rank sends, with those to engines that were planned before.
    """

    tensors: dict[str, Tensor]
    waves: tuple[Wave, ...]
    sent: dict[int, int]

    @property
    def plan_id(self) -> str:
        """Hash of the tensors and messages."""
        text = Part(self.tensors, self.waves).to_json()
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def of_trainer(self, rank: int) -> Part:
        """Return what a trainer rank sends."""
        return self._part(lambda message: message.source == rank)

    def of_engine(self, rank: int) -> Part:
        """Return what an engine rank receives and forwards."""
        return self._part(lambda message: rank in message.receivers)

    def _part(self, belongs: Callable[[Message], bool]) -> Part:
        waves = tuple(tuple(filter(belongs, wave)) for wave in self.waves)
        names = {region.tensor for wave in waves for message in wave for region in message.regions}
        return Part({name: tensor for name, tensor in self.tensors.items() if name in names}, waves)


def plan_engine(
    tensors: Mapping[str, Tensor],
    held: Sequence[Held],
    kept: Mapping[int, Kept],
    host_of: Callable[[int], int],
    bucket_bytes: int,
    sent: Mapping[int, int] | None = None,
) -> EnginePlan:
    """Plan the transfers to one engine.

    ``kept``: regions that each of its ranks keeps. ``host_of``: rank -> host, within which messages are
    forwarded. ``bucket_bytes``: half of the memory that a rank has for receiving. ``sent``: bytes that
    trainer ranks already send to other engines. Raises RegionError if the trainers do not hold what is kept.
    """
    limit = 2 * bucket_bytes // BUFFERS
    parts = atoms(tensors, held, needed_regions(kept, tensors), min(_LARGEST, limit // _ATOMS_A_WAVE))
    routes = route(parts, host_of, sent=sent)
    return EnginePlan(dict(tensors), tuple(make_schedule(parts, routes, tensors, limit)), routes.sent)


def _brief(message: Message, numbers: Mapping[str, int]) -> list[Any]:
    regions = [[numbers[r.tensor], r.box.top, r.box.bottom, r.box.left, r.box.right] for r in message.regions]
    return [message.source, message.landing, message.siblings, message.nbytes, regions]


def _full(brief: Sequence[Any], names: Sequence[str]) -> Message:
    source, landing, siblings, nbytes, regions = brief
    return Message(
        source, landing, tuple(siblings), tuple(Region(names[t], Box(*box)) for t, *box in regions), nbytes
    )
