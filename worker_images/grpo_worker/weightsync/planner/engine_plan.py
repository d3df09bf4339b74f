"""Plan of the transfers of a version to one engine, and each member's part of it. Pure.

Every engine has a plan of its own, so a change of an engine changes no other plan. A new plan takes the load
that trainer ranks already have from other engines into account.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from grpo_worker.weightsync.planner.boxes import Kept, needed_regions
from grpo_worker.weightsync.planner.regions import Box, Held, Tensor, atoms
from grpo_worker.weightsync.planner.routes import route
from grpo_worker.weightsync.planner.schedule import Message, Region, Wave, make_schedule

BUFFERS = 3  # of an engine rank: of the wave that arrives, of the one forwarded, of the one written
SEND_BUFFERS = 3  # of a trainer rank and link: of two waves that are sent, of the one packed
_ATOMS_A_WAVE = 16  # at least; a smaller number would leave waves uneven
_LARGEST = 8 << 20  # bytes of an atom; larger ones would not be balanced as well


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a plan: the messages of each wave that one member sends, receives or forwards.

    ``tensors``: those of the messages. Ranks of engines are numbered from 0.
    """

    tensors: dict[str, Tensor]
    waves: tuple[Wave, ...]

    @property
    def landings(self) -> list[int]:
        """Engine ranks that receive from a trainer rank with this part."""
        return sorted({message.landing for message in self._messages})

    def sources(self, rank: int) -> list[int]:
        """Return the trainer ranks from which engine rank ``rank`` receives."""
        return sorted({message.source for message in self._messages if message.landing == rank})

    def siblings(self, rank: int) -> list[int]:
        """Return the engine ranks to which engine rank ``rank`` forwards."""
        return sorted(
            {to for message in self._messages if message.landing == rank for to in message.siblings}
        )

    def forwarders(self, rank: int) -> list[int]:
        """Return the engine ranks that forward to engine rank ``rank``."""
        return sorted({message.landing for message in self._messages if rank in message.siblings})

    @property
    def _messages(self) -> Iterator[Message]:
        return chain.from_iterable(self.waves)

    def to_data(self) -> list[Any]:
        """Return the part as data for JSON, in which tensors have numbers."""
        numbers = {name: index for index, name in enumerate(self.tensors)}
        tensors = [[name, t.rows, t.columns, t.dtype] for name, t in self.tensors.items()]
        waves = [[_brief(message, numbers) for message in wave] for wave in self.waves]
        return [tensors, waves]

    @classmethod
    def from_data(cls, data: Sequence[Any]) -> "Part":
        """Read the output of ``to_data``."""
        tensors, waves = data
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
        text = json.dumps(Part(self.tensors, self.waves).to_data())
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def of_trainers(self, count: int) -> list[Part]:
        """Return what each of ``count`` trainer ranks sends."""
        return self._parts(count, lambda message: (message.source,))

    def of_engine(self, count: int) -> list[Part]:
        """Return what each of the engine's ``count`` ranks receives and forwards."""
        return self._parts(count, lambda message: message.receivers)

    def _parts(self, count: int, members: Callable[[Message], Sequence[int]]) -> list[Part]:
        """Divide the waves among members in one pass: an engine has many messages."""
        own: list[list[list[Message]]] = [[[] for _ in self.waves] for _ in range(count)]
        for number, wave in enumerate(self.waves):
            for message in wave:
                for member in members(message):
                    own[member][number].append(message)
        return [self._part(tuple(map(tuple, waves))) for waves in own]

    def _part(self, waves: tuple[Wave, ...]) -> Part:
        names = {region.tensor for wave in waves for message in wave for region in message.regions}
        return Part({name: self.tensors[name] for name in sorted(names)}, waves)


def plan_engine(
    tensors: Mapping[str, Tensor],
    held: Sequence[Held],
    kept: Mapping[int, Kept],
    host_of: Callable[[int], int],
    bucket_bytes: int,
    links: int = 1,
    sent: Mapping[int, int] | None = None,
) -> EnginePlan:
    """Plan the transfers to one engine.

    ``kept``: regions that each of its ranks keeps. ``host_of``: rank -> host, within which messages are
    forwarded. ``bucket_bytes``: half of the memory that an engine rank has for receiving, and that a trainer
    rank has for sending over ``links`` links. ``sent``: bytes that trainer ranks already send to other
    engines. Raises RegionError if the trainers do not hold what is kept.
    """
    limit = 2 * bucket_bytes // BUFFERS
    send_limit = 2 * bucket_bytes // (SEND_BUFFERS * links)
    largest = min(_LARGEST, min(limit, send_limit) // _ATOMS_A_WAVE)
    parts = atoms(tensors, held, needed_regions(kept, tensors), largest)
    routes = route(parts, host_of, sent=sent)
    waves = make_schedule(parts, routes, tensors, limit, send_limit)
    return EnginePlan(dict(tensors), tuple(waves), routes.sent)


def _brief(message: Message, numbers: Mapping[str, int]) -> list[Any]:
    regions = [[numbers[r.tensor], r.box.top, r.box.bottom, r.box.left, r.box.right] for r in message.regions]
    ends = [message.source, message.landing, message.siblings, message.counted]
    return [*ends, message.nbytes, regions]


def _full(brief: Sequence[Any], names: Sequence[str]) -> Message:
    source, landing, siblings, counted, nbytes, regions = brief
    made = tuple(Region(names[tensor], Box(*box)) for tensor, *box in regions)
    return Message(source, landing, tuple(siblings), counted, made, nbytes)
