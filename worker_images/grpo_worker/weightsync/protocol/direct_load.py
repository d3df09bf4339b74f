"""Direct load: the request by which an agent lets its engine load a whole version. Pure.

It travels in fields of SGLang's own route ``/update_weights_from_distributed``.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from grpo_worker.weightsync.protocol.transfer_plan import Message, Piece, TransferPlan

PREFIX = "grpo:"  # of a load_format that announces a direct load
MARK = "[grpo direct loading]"  # in the answer of an engine that supports direct loads
LINK = "grpo-link-"  # prefix of a transfer group's name (trainer ranks and engines); their number follows
AGENT = "grpo-weights-"  # prefix of the name of a group of one agent and its engine


@dataclass(frozen=True, slots=True)
class DirectLoad:
    """Announcement of one version.

    ``plan_id``: equal for requests with equal names, shapes and buckets.
    ``counts``: number of tensors of each bucket, in the order of the request's names.
    ``messages``: of each bucket, if the trainer ranks send them; ``timeout``: seconds for all. Without
    messages the agent streams the buckets.
    """

    plan_id: str
    counts: tuple[int, ...]
    messages: tuple[tuple[Message, ...], ...] = ()
    timeout: float = 0.0

    def to_load_format(self) -> str:
        """Return the text for the request's field ``load_format``."""
        fields = asdict(self) | {"messages": [[_brief(m) for m in bucket] for bucket in self.messages]}
        return PREFIX + json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_load_format(cls, text: str) -> "DirectLoad":
        """Parse the output of ``to_load_format``. Raises ValueError for any other text."""
        try:
            data = json.loads(text.removeprefix(PREFIX))
            messages = tuple(tuple(map(_full, bucket)) for bucket in data["messages"])
            return cls(data["plan_id"], tuple(data["counts"]), messages, float(data["timeout"]))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"load_format {text[:80]!r} is no direct load") from error


def direct_load_request(transfer_plan: TransferPlan, timeout: float) -> DirectLoad:
    """Return the announcement of a version that the trainer ranks send."""
    counts = tuple(len(bucket.tensors) for bucket in transfer_plan.buckets)
    messages = tuple(bucket.messages for bucket in transfer_plan.buckets)
    return DirectLoad(transfer_plan.plan_id, counts, messages, timeout)


def _brief(message: Message) -> list[object]:
    """Return a message as JSON data. If it is received in place, its size replaces its pieces."""
    if message.start is not None:
        return [message.source, message.start, message.nbytes]
    pieces = [[p.tensor, p.dim, p.offset, p.length, p.nbytes] for p in message.pieces]
    return [message.source, None, pieces]


def _full(brief: Sequence[object]) -> Message:
    """Parse the output of ``_brief``."""
    source, start, rest = brief
    assert isinstance(source, int)
    if isinstance(start, int) and isinstance(rest, int):
        return Message(source, start, (Piece(0, 0, 0, 0, rest),))
    if not isinstance(rest, Iterable):
        raise TypeError(f"pieces must be a list, got {rest!r}")
    return Message(source, None, tuple(Piece(*piece) for piece in rest))
