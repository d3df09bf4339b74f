"""How an agent asks its engine for a direct load: what stands in SGLang's own fields."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from grpo_worker.weightsync.protocol.transfer_plan import Message, Piece, TransferPlan

PREFIX = "grpo:"
MARK = "[grpo direct loading]"
LINK = "grpo-link-"  # groups of this name are links between trainer ranks and engines
AGENT = "grpo-weights-"  # and of this one, an agent and its engine


@dataclass(frozen=True, slots=True)
class DirectLoad:
    """One version in buckets. ``counts``: tensors of each bucket, in the order of the request's names.
    ``plan_id``: same names, shapes and buckets, same id.

    From an agent's memory: ``fingerprints`` of each bucket's bytes. Over a link: ``messages``, those of
    each bucket by trainer rank, and the ``timeout`` of the whole in seconds.
    """

    plan_id: str
    counts: tuple[int, ...]
    fingerprints: tuple[int, ...] = ()
    messages: tuple[tuple[Message, ...], ...] = ()
    timeout: float = 0.0

    def to_load_format(self) -> str:
        told = asdict(self) | {"messages": [[_brief(m) for m in bucket] for bucket in self.messages]}
        return PREFIX + json.dumps(told, separators=(",", ":"))

    @classmethod
    def from_load_format(cls, text: str) -> "DirectLoad":
        """Raises ValueError for anything else."""
        try:
            data = json.loads(text.removeprefix(PREFIX))
            messages = tuple(tuple(map(_full, bucket)) for bucket in data["messages"])
            counts, prints = tuple(data["counts"]), tuple(data["fingerprints"])
            return cls(data["plan_id"], counts, prints, messages, float(data["timeout"]))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"load_format {text[:80]!r} is no direct load") from error


def direct_load_request(transfer_plan: TransferPlan, timeout: float) -> DirectLoad:
    """The announcement of a shipment."""
    counts = tuple(len(bucket.tensors) for bucket in transfer_plan.buckets)
    messages = tuple(bucket.messages for bucket in transfer_plan.buckets)
    return DirectLoad(transfer_plan.plan_id, counts, (), messages, timeout)


def _brief(message: Message) -> list[object]:
    """A message that is in its place as a whole needs no more than its size."""
    if message.start is not None:
        return [message.source, message.start, message.nbytes]
    pieces = [[p.tensor, p.dim, p.offset, p.length, p.nbytes] for p in message.pieces]
    return [message.source, None, pieces]


def _full(brief: Sequence[object]) -> Message:
    source, start, rest = brief
    assert isinstance(source, int)
    if isinstance(start, int) and isinstance(rest, int):
        return Message(source, start, (Piece(0, 0, 0, 0, rest),))
    if not isinstance(rest, Iterable):
        raise TypeError(f"pieces must be a list, got {rest!r}")
    return Message(source, None, tuple(Piece(*piece) for piece in rest))
