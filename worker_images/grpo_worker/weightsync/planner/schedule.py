"""Schedule: the routes of a version as messages, in waves that each take the same share of every route. Pure.

Every member handles the waves in order, so the messages of a wave travel at the same time and no two members
wait for each other in different orders. A wave holds one share of every route. All interfaces are therefore
busy in every wave, in proportion to what they carry in the whole version.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_worker.weightsync.planner.regions import Atom, Box, Tensor
from grpo_worker.weightsync.planner.routes import Routes

ALIGNED = 16  # bytes; the widest load of a GPU, and a multiple of every dtype's size
CHECK_BYTES = 8  # the fingerprint after a message's payload
_GOLDEN = 0.6180339887498949  # spreads the first waves of short streams evenly


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a tensor in a message; its sender holds all of it, and its receivers need all of it."""

    tensor: str
    box: Box


@dataclass(frozen=True, slots=True)
class Message:
    """Regions that trainer rank ``source`` sends to engine rank ``landing``, which forwards them to ``siblings``.

    ``nbytes``: of the payload and the fingerprint after it.
    """

    source: int
    landing: int
    siblings: tuple[int, ...]
    regions: tuple[Region, ...]
    nbytes: int

    @property
    def receivers(self) -> tuple[int, ...]:
        """All engine ranks that get the message."""
        return self.landing, *self.siblings


Wave = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a region in its message: of the values, and of the scales of a tensor in FP8."""

    values: tuple[int, int]
    scales: tuple[int, int] | None


def places(regions: Sequence[Region], tensors: Mapping[str, Tensor]) -> tuple[list[Place], int]:
    """Return where each region is in its message, and the bytes of the payload.

    Scales follow all values, so that the values of adjacent regions stay adjacent.
    """
    values, end = [], 0
    for region in regions:
        size = tensors[region.tensor].value_bytes(region.box)
        values.append((end, end + size))
        end += _aligned(size)
    result = []
    for region, place in zip(regions, values, strict=True):
        size = tensors[region.tensor].scale_bytes(region.box)
        result.append(Place(place, (end, end + size) if size else None))
        end += _aligned(size)
    return result, end


def make_schedule(
    atoms: Sequence[Atom], routes: Routes, tensors: Mapping[str, Tensor], limit: int
) -> list[Wave]:
    """Divide the routes into waves of which no engine rank receives more than ``limit`` bytes.

    Raises ValueError if an atom is larger than ``limit``.
    """
    streams = _streams(routes)
    if not streams:
        return []
    largest = max(atom.nbytes for atom in atoms)
    if largest + ALIGNED + CHECK_BYTES > limit:
        raise ValueError(f"a wave of {limit} bytes cannot hold an atom of {largest}")
    count = max(1, math.ceil(_largest_receiver(atoms, streams) / limit))
    while True:
        waves = _divide(atoms, streams, tensors, count)
        fullest = max(max(received_bytes(wave).values()) for wave in waves)
        if fullest <= limit:
            return waves
        count = max(count + 1, math.ceil(count * fullest / limit))


def received_bytes(wave: Iterable[Message]) -> dict[int, int]:
    """Return the bytes that each engine rank gets in a wave."""
    received: dict[int, int] = defaultdict(int)
    for message in wave:
        for rank in message.receivers:
            received[rank] += message.nbytes
    return received


_Streams = dict[tuple[int, int, tuple[int, ...]], list[int]]  # (source, landing, siblings) -> atoms


def _streams(routes: Routes) -> _Streams:
    streams: _Streams = defaultdict(list)
    for (sender, landing), of_pair in routes.pairs.items():
        for each in of_pair:
            streams[sender, landing, each.siblings] += each.atoms
    return streams


def _largest_receiver(atoms: Sequence[Atom], streams: _Streams) -> int:
    received: dict[int, int] = defaultdict(int)
    for (_, landing, siblings), indices in streams.items():
        nbytes = sum(atoms[index].nbytes for index in indices)
        for rank in (landing, *siblings):
            received[rank] += nbytes
    return max(received.values())


def _divide(
    atoms: Sequence[Atom], streams: _Streams, tensors: Mapping[str, Tensor], count: int
) -> list[Wave]:
    """Divide each stream into ``count`` shares, beginning at another wave than the stream before it."""
    waves: list[list[Message]] = [[] for _ in range(count)]
    for number, ((source, landing, siblings), indices) in enumerate(streams.items()):
        shares: dict[int, list[Region]] = defaultdict(list)
        total, sent = sum(atoms[index].nbytes for index in indices), 0
        for index in indices:
            middle = (sent + atoms[index].nbytes / 2) / total
            sent += atoms[index].nbytes
            wave = int((middle + number * _GOLDEN) * count) % count
            shares[wave].append(Region(atoms[index].tensor, atoms[index].box))
        for wave, regions in shares.items():
            _, nbytes = places(regions, tensors)
            waves[wave].append(Message(source, landing, siblings, tuple(regions), nbytes + CHECK_BYTES))
    return [tuple(wave) for wave in waves if wave]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
