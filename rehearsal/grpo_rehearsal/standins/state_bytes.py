"""Bytes of the training state that ranks read and write, tensor by tensor, from their layout (pure).

Ranks save the weights and the whole optimizer's state of a tensor once, by the first rank that holds it, and
read them on every rank that holds it: Megatron-Core's format "fully_reshardable".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_rehearsal.standins.pieces import Pieces, in_proportion
from grpo_rehearsal.standins.weight_layouts import layouts
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
class StateBytes:
    """Values of a policy's tensors by rank.

    ``held``: of all parts that a rank holds; ``saved``: of those that no earlier rank holds. ``per_node``:
    ranks of a node.
    """

    held: Sequence[Sequence[int]]
    saved: Sequence[Sequence[int]]
    per_node: int

    @classmethod
    def of(cls, hf: Mapping[str, Any], layout: Layout, per_node: int) -> "StateBytes":
        """Return those of a model in a layout."""
        seen: set[tuple[str, int, int]] = set()
        held, saved = [], []
        for slices in layouts(hf, layout, fp8=False):
            sizes = {(part.name, part.dim, part.offset): _values(part) for part in slices}
            held.append(list(sizes.values()))
            saved.append([values for part, values in sizes.items() if part not in seen])
            seen |= sizes.keys()
        return cls(held, saved, per_node)

    def read(self, widths: Sequence[int]) -> Share:
        """Return what ranks read of a state with ``widths`` bytes a value."""
        return self._share(self.held, widths)

    def written(self, widths: Sequence[int]) -> Share:
        """Return what ranks write of a state with ``widths`` bytes a value."""
        return self._share(self.saved, widths)

    def _share(self, values: Sequence[Sequence[int]], widths: Sequence[int]) -> Share:
        sums = [sum(of_rank) * sum(widths) for of_rank in values]
        nodes = [sum(sums[first : first + self.per_node]) for first in range(0, len(sums), self.per_node)]
        fullest = values[sums.index(max(sums))]
        return Share(sum(sums), max(nodes), tuple(count * width for width in widths for count in fullest))


def _values(part: Slice) -> int:
    return math.prod(part.length if dim == part.dim else size for dim, size in enumerate(part.shape))
