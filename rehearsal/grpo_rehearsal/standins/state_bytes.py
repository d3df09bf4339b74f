"""Bytes of the training state that ranks read and write, tensor by tensor, from their layout (pure).

The first rank that holds a tensor saves its weights, and every rank that holds it reads them. The ranks that
hold the same tensors share their optimizer state: each keeps one range of it, saves as much in whole chunks,
here those of which it has the largest part, and reads those of which it has any.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_rehearsal.standins.pieces import Pieces, in_proportion
from grpo_rehearsal.standins.weight_layouts import layouts
from grpo_worker.megatron.checkpoint.pieces import CHUNK
from grpo_worker.weightsync.protocol.manifest import Slice

WEIGHTS = (2,)  # bytes of a value: bf16
STATE = (*WEIGHTS, 4, 4, 4)  # and in fp32 the main weights and Adam's two moments


@dataclass(frozen=True, slots=True)
class Share:
    """What the ranks read or write in one call.

    ``total``, ``node``: bytes of all nodes, and of the node with the most. ``pieces``: bytes of each piece of
    the rank with the most.
    """

    total: int
    node: int
    pieces: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Bytes of the rank with the most."""
        return sum(self.pieces)

    def scaled(self, factor: float) -> "Share":
        """Return the same values with ``factor`` times their bytes."""
        pieces = tuple(round(factor * piece) for piece in self.pieces)
        return Share(round(factor * self.total), round(factor * self.node), pieces)

    def then(self, other: "Share") -> "Share":
        """Return both, one after the other."""
        return Share(self.total + other.total, self.node + other.node, self.pieces + other.pieces)

    def at_node_rate(self, rate: float) -> Pieces:
        """Return the progress at ``rate`` bytes/s of a node, which its ranks share; the fullest ends last."""
        return in_proportion(self.pieces, self.node / rate)

    def at_rank_rate(self, rate: float) -> Pieces:
        """Return the progress at ``rate`` bytes/s of each rank."""
        return in_proportion(self.pieces, self.rank / rate)


@dataclass(frozen=True, slots=True)
class RankValues:
    """Values of the policy's tensors at one rank.

    ``held``: of its weights; ``first``: of those that no earlier rank holds. ``touched``: of the chunks of
    whose optimizer state it keeps a part; ``owned``: of those that it saves the optimizer state of.
    """

    held: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    touched: list[int] = field(default_factory=list)
    owned: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Values of a policy's tensors by rank. ``per_node``: ranks of a node."""

    ranks: Sequence[RankValues]
    per_node: int

    @classmethod
    def of(cls, hf: Mapping[str, Any], layout: Layout, per_node: int) -> "StateBytes":
        """Return those of a model in a layout."""
        holders: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
        values: dict[tuple[str, int, int], int] = {}
        for rank, slices in enumerate(layouts(hf, layout, fp8=False)):
            for part in {(one.name, one.dim, one.offset): one for one in slices}.values():
                holders[part.name, part.dim, part.offset].append(rank)
                values[part.name, part.dim, part.offset] = _values(part)
        ranks = [RankValues() for _ in range(layout.world)]
        shared: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for key, of_part in holders.items():
            shared[tuple(of_part)].extend(_chunks(values[key]))
            ranks[of_part[0]].first.append(values[key])
            for rank in of_part:
                ranks[rank].held.append(values[key])
        for group, sizes in shared.items():
            _share([ranks[rank] for rank in group], sizes)
        return cls(ranks, per_node)

    def read(self, widths: Sequence[int]) -> Share:
        """Return what ranks read. ``widths``: bytes of a value of the weights, and of each other state."""
        return self._all([_bytes(rank.held, rank.touched, widths) for rank in self.ranks])

    def written(self, widths: Sequence[int]) -> Share:
        """Return what ranks write. ``widths``: bytes of a value of the weights, and of each other state."""
        return self._all([_bytes(rank.first, rank.owned, widths) for rank in self.ranks])

    def _all(self, pieces: Sequence[tuple[int, ...]]) -> Share:
        sums = [sum(of_rank) for of_rank in pieces]
        nodes = [sum(sums[first : first + self.per_node]) for first in range(0, len(sums), self.per_node)]
        return Share(sum(sums), max(nodes), pieces[sums.index(max(sums))])


def _chunks(values: int) -> list[int]:
    count = -(-values // CHUNK)
    return [values * (index + 1) // count - values * index // count for index in range(count)]


def _share(group: Sequence[RankValues], sizes: Sequence[int]) -> None:
    """Share the optimizer state of chunks among the ranks that hold them, in ranges of the same length."""
    length = -(-sum(sizes) // len(group))
    end = 0
    for size in sizes:
        start, end = end, end + size
        among = range(start // length, (end - 1) // length + 1)
        for number in among:
            group[number].touched.append(size)
        own = max(among, key=lambda n: min(end, (n + 1) * length) - max(start, n * length))
        group[own].owned.append(size)


def _bytes(weights: Sequence[int], state: Sequence[int], widths: Sequence[int]) -> tuple[int, ...]:
    of_weights = [widths[0] * values for values in weights]
    return (*of_weights, *(width * values for width in widths[1:] for values in state))


def _values(part: Slice) -> int:
    return math.prod(part.length if dim == part.dim else size for dim, size in enumerate(part.shape))
