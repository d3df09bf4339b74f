"""Schedule: the routes of a version as messages, in waves that each take the same share of every route. Pure.

Every member handles the waves in order, so the messages of a wave travel at the same time and no two members
wait for each other in different orders. A wave holds one share of every route. All interfaces are therefore
busy in every wave, in proportion to what they carry in the whole version.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from grpo_worker.weightsync.planner.regions import Atom, Box, Tensor
from grpo_worker.weightsync.planner.routes import Routes
from grpo_worker.weightsync.protocol.buffers import aligned

_REGION = 16  # bytes to which regions are aligned: the widest load of a GPU, a multiple of every dtype's size
CHECK_BYTES = 8  # the fingerprint after a message's payload
_MESSAGE = 256  # bytes by which a message takes more than its regions: the fingerprint, and alignment
_MARGIN = _MESSAGE + 2 * _REGION
_GOLDEN = 0.6180339887498949  # spreads the first waves of short streams evenly


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a tensor in a message; its sender holds all of it, and its receivers need all of it."""

    tensor: str
    box: Box


@dataclass(frozen=True, slots=True)
class Message:
    """Regions from trainer rank ``source`` to engine rank ``landing``, which forwards them to ``siblings``.

    ``nbytes``: of the payload and the fingerprint after it. ``counted``: the landing rank adds the payload's
    bytes to the sum by which engines are compared; each region is counted once in an engine.
    """

    source: int
    landing: int
    siblings: tuple[int, ...]
    counted: bool
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
        end += aligned(size, _REGION)
    result = []
    for region, place in zip(regions, values, strict=True):
        size = tensors[region.tensor].scale_bytes(region.box)
        result.append(Place(place, (end, end + size) if size else None))
        end += aligned(size, _REGION)
    return result, end


def make_schedule(
    atoms: Sequence[Atom], routes: Routes, tensors: Mapping[str, Tensor], limit: int, send_limit: int
) -> list[Wave]:
    """Divide the routes into waves of which no engine rank receives more than ``limit`` bytes.

    A trainer rank sends at most ``send_limit`` bytes of a wave, or an atom on each of its ways. Raises
    ValueError if an atom is larger than ``limit``.
    """
    streams = _streams(routes)
    if not streams:
        return []
    sizes = np.array([atom.nbytes for atom in atoms], dtype=np.int64)
    if (largest := int(sizes.max())) + _MARGIN > limit:
        raise ValueError(f"a wave of {limit} bytes cannot hold an atom of {largest}")
    padded = sizes + _REGION * (1 + np.array([tensors[atom.tensor].scaled for atom in atoms]))
    count = 1
    while True:
        divided = [_divided(sizes[stream.atoms], number, count) for number, stream in enumerate(streams)]
        over = _overrun(streams, divided, padded, count, limit, send_limit)
        if over <= 1:
            return _waves(atoms, streams, divided, tensors, count)
        count = max(count + 1, math.ceil(count * over))


@dataclass(frozen=True, slots=True)
class _Stream:
    """Atoms (by index, int64 [atoms]) that travel the same way."""

    source: int
    receivers: tuple[int, ...]
    counted: bool
    atoms: npt.NDArray[np.int64]


def _streams(routes: Routes) -> list[_Stream]:
    found: dict[tuple[int, tuple[int, ...], bool], list[int]] = defaultdict(list)
    for (sender, landing), of_pair in routes.pairs.items():
        for each in of_pair:
            found[sender, (landing, *each.siblings), each.counted] += each.atoms
    return [_Stream(*key, np.array(indices, dtype=np.int64)) for key, indices in found.items()]


def _divided(sizes: npt.NDArray[np.int64], number: int, count: int) -> npt.NDArray[np.int64]:
    """Return the wave of each atom of stream ``number``, which is divided into ``count`` equal shares.

    Every stream begins at another wave, so that streams of few atoms do not meet in one.
    """
    ends = np.cumsum(sizes)
    middles = (ends - sizes / 2) / ends[-1]
    waves: npt.NDArray[np.int64] = ((middles + number * _GOLDEN) * count).astype(np.int64) % count
    return waves


def _overrun(
    streams: Sequence[_Stream],
    divided: Sequence[npt.NDArray[np.int64]],
    padded: npt.NDArray[np.int64],
    count: int,
    limit: int,
    send_limit: int,
) -> float:
    """Return the largest ratio of the bytes that a rank receives or sends in a wave to its limit."""
    received: dict[int, npt.NDArray[np.int64]] = {}
    sent: dict[int, npt.NDArray[np.int64]] = {}
    ways: Counter[int] = Counter()  # of each sender
    for stream, waves in zip(streams, divided, strict=True):
        nbytes = np.bincount(waves, padded[stream.atoms], count).astype(np.int64)
        nbytes += _MESSAGE * (nbytes > 0)
        for rank in stream.receivers:
            received[rank] = received.get(rank, 0) + nbytes
        sent[stream.source] = sent.get(stream.source, 0) + nbytes
        ways[stream.source] += 1
    least = int(padded.max()) + _MESSAGE
    senders = (int(of_rank.max()) / max(send_limit, ways[rank] * least) for rank, of_rank in sent.items())
    return max(*senders, max(int(of_rank.max()) for of_rank in received.values()) / limit)


def _waves(
    atoms: Sequence[Atom],
    streams: Sequence[_Stream],
    divided: Sequence[npt.NDArray[np.int64]],
    tensors: Mapping[str, Tensor],
    count: int,
) -> list[Wave]:
    waves: list[list[Message]] = [[] for _ in range(count)]
    for stream, of_stream in zip(streams, divided, strict=True):
        shares: dict[int, list[Region]] = defaultdict(list)
        for index, wave in zip(stream.atoms.tolist(), of_stream.tolist(), strict=True):
            shares[wave].append(Region(atoms[index].tensor, atoms[index].box))
        landing, *siblings = stream.receivers
        for wave, regions in shares.items():
            _, nbytes = places(regions, tensors)
            ends = stream.source, landing, tuple(siblings)
            message = Message(*ends, stream.counted, tuple(regions), nbytes + CHECK_BYTES)
            waves[wave].append(message)
    return [tuple(wave) for wave in waves if wave]
