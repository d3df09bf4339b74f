"""Links of stand-in ranks and engines: what their members tell each other, and the real plan of each engine.

The bytes are those of the worker's own encoding, ``grpo_worker.weightsync.protocol.link_exchange``.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_rehearsal.standins.weight_layouts import layouts, packed
from grpo_worker.weightsync.planner.boxes import SCALES, held_regions
from grpo_worker.weightsync.planner.engine_plan import plan_engine
from grpo_worker.weightsync.planner.layouts import EngineShape, kept_by_rank
from grpo_worker.weightsync.planner.regions import Box, Held, Tensor, scale_box
from grpo_worker.weightsync.planner.schedule import Wave
from grpo_worker.weightsync.protocol.link_exchange import LinkExchange, TensorRow
from grpo_worker.weightsync.protocol.link_offer import LinkOffer


class Store(dict[str, bytes]):
    """Store of a link in memory, with the methods of torch's that a link uses."""

    def set(self, key: str, value: str | bytes) -> None:
        """Leave a value."""
        self[key] = value.encode() if isinstance(value, str) else value

    def check(self, keys: list[str]) -> bool:
        """Return whether all values are there."""
        return all(key in self for key in keys)

    def nbytes(self, prefix: str) -> int:
        """Return the bytes of all values whose keys begin with ``prefix``."""
        return sum(len(value) for key, value in self.items() if key.startswith(prefix))


@dataclass(frozen=True, slots=True)
class Join:
    """Bytes that the members of a link read at its store when an engine joins.

    ``table``: tensors that each engine rank reads. ``kept``: regions that engine ranks leave for the first
    trainer rank. ``receives``, ``sends``: parts of the plan that engine ranks and the other trainer ranks
    read. ``waves``: bytes of the member with the most in each wave. ``problem``: why there is no plan, or "".
    ``seconds``: of this machine, for the plan.
    """

    table: int
    kept: int
    receives: int = 0
    sends: int = 0
    waves: tuple[int, ...] = ()
    problem: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Weights:
    tensors: dict[str, Tensor]
    held: list[Held]
    rows: list[TensorRow]


@dataclass(slots=True)
class GangLinks:
    """Links of a gang. ``engine``: parallelism of every engine.

    ``layout_bytes``: that the other ranks have sent to the first one. ``kept_bytes``: that engines have left
    for it.
    """

    hf: Mapping[str, Any]
    layout: Layout
    engine: EngineShape
    layout_bytes: int = 0
    kept_bytes: int = 0
    _weights: dict[bool, _Weights] = field(default_factory=dict)  # by the flag fp8
    _joins: dict[LinkOffer, Join] = field(default_factory=dict)

    @property
    def joins(self) -> list[Join]:
        """The joins so far, one for each kind of offer."""
        return list(self._joins.values())

    @property
    def waves(self) -> tuple[int, ...]:
        """Bytes of each wave of a version, in the plan with the fewest waves."""
        return min((join.waves for join in self.joins if join.waves), key=len, default=())

    def knows_layouts(self, fp8: bool) -> bool:
        """Return whether the first rank knows what the ranks hold."""
        return fp8 in self._weights

    def exchange_layouts(self, fp8: bool) -> int:
        """Tell the first rank what all ranks hold; return the bytes between the ranks.

        Raises RegionError, like the first rank.
        """
        slices = layouts(self.hf, self.layout, fp8)
        sent = sum(len(packed(of_rank)) for of_rank in slices[1:])
        self.layout_bytes += sent
        tensors, held = held_regions(slices)
        named = {part.name: part for of_rank in slices for part in of_rank}
        rows = [TensorRow(part.name, part.shape, part.dtype) for _, part in sorted(named.items())]
        self._weights[fp8] = _Weights(tensors, held, rows)
        return sent

    def join(self, offer: LinkOffer) -> Join:
        """Return what an engine costs that accepts the offer, after ``exchange_layouts``.

        Equal engines share a plan, as real ones do.
        """
        key = replace(offer, name="", gang="", address="", port=0)
        if key not in self._joins:
            self._joins[key] = self._join(offer)
        return self._joins[key]

    def _join(self, offer: LinkOffer) -> Join:
        store, weights = Store(), self._weights[offer.fp8]
        exchange = LinkExchange(store)
        exchange.put_tensors(weights.rows)
        kept = kept_regions(self.hf, self.engine, weights.tensors)
        for rank, of_rank in kept.items():
            exchange.put_kept(rank, of_rank)
        join = Join(table=store.nbytes("tensors"), kept=store.nbytes("kept-") + store.nbytes("keeps-"))
        began = time.perf_counter()
        try:
            limits = offer.bucket_bytes, offer.links
            plan = plan_engine(weights.tensors, weights.held, kept, offer.host_of, *limits)
        except ValueError as error:
            return replace(join, problem=str(error))
        exchange.put_parts(plan, offer.trainers, offer.ranks)
        seconds = time.perf_counter() - began
        sends = store.nbytes("sends-") - store.nbytes("sends-0/")  # the first rank has the store itself
        waves = tuple(map(_heaviest, plan.waves))
        return replace(join, receives=store.nbytes("receives-"), sends=sends, waves=waves, seconds=seconds)


def _heaviest(wave: Wave) -> int:
    """Return the bytes that the busiest member of a wave sends or receives."""
    sent, received = Counter[int](), Counter[int]()
    for message in wave:
        sent[message.source] += message.nbytes
        received.update(dict.fromkeys(message.receivers, message.nbytes))
    return max(*sent.values(), *received.values())


def kept_regions(
    hf: Mapping[str, Any], engine: EngineShape, tensors: Mapping[str, Tensor]
) -> dict[int, dict[str, list[Box]]]:
    """Return the regions of tensors, and of their scales in FP8, that each rank of an engine keeps."""
    kept = kept_by_rank(hf, engine)
    for of_rank in kept.values():
        scaled = {name: boxes for name, boxes in of_rank.items() if tensors[name].scaled}
        of_rank |= {name + SCALES: list(map(scale_box, boxes)) for name, boxes in scaled.items()}
    return kept
