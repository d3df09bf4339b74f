"""Messages of a link's members at its store: tensors, kept regions, parts of the plan."""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from grpo_worker.common.repeated import repeated
from grpo_worker.weightsync.planner.engine_plan import EnginePlan, Part
from grpo_worker.weightsync.planner.regions import Box

_BEAT_SECONDS = 5.0
_PIECE_BYTES = 4 << 20  # torch's store refuses a value above 8 MiB
_TENSORS, _BEATS, _PROBLEM = "tensors", "beats", "problem"
# Waits until its first argument returns true; raises TransferError with the text of the second.
WaitFor = Callable[[Callable[[], bool], Callable[[], str]], None]


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor that the trainers send. ``dtype``: torch's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class LinkExchange:
    """Values at a link's ``store`` (PrefixStore). Methods raise the store's RuntimeError when it is gone."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def beat(self) -> None:
        """Tell the other members, which wait for this one, that it makes progress."""
        self._store.add(_BEATS, 1)

    def put_tensors(self, rows: Iterable[TensorRow]) -> None:
        """Leave the tensors of a version for the engine's ranks."""
        self._put(_TENSORS, [[row.name, row.shape, row.dtype] for row in rows])

    def tensors(self) -> list[TensorRow] | None:
        """Return the tensors of a version, or None if they are not there."""
        rows = self._get(_TENSORS)
        return None if rows is None else [TensorRow(name, tuple(shape), dtype) for name, shape, dtype in rows]

    def put_kept(self, rank: int, kept: Mapping[str, Iterable[Box]]) -> None:
        """Leave the regions that rank ``rank`` of the engine keeps; equal regions of ranks are left once."""
        content = {
            name: [[b.top, b.bottom, b.left, b.right] for b in boxes] for name, boxes in sorted(kept.items())
        }
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        if not self._store.check([f"kept-{digest}"]):
            self._put(f"kept-{digest}", content)
        self._store.set(f"keeps-{rank}", digest)

    def all_keep(self, ranks: int) -> bool:
        """Return whether all of the engine's ``ranks`` have left what they keep."""
        return bool(self._store.check([f"keeps-{rank}" for rank in range(ranks)]))

    def kept(self, ranks: int) -> dict[int, dict[str, list[Box]]]:
        """Return the regions that each of the engine's ``ranks`` keeps, once ``all_keep`` is true."""
        of_digest: dict[str, dict[str, list[Box]]] = {}
        result = {}
        for rank in range(ranks):
            digest = self._store.get(f"keeps-{rank}").decode()
            if digest not in of_digest:
                content = self._get(f"kept-{digest}") or {}
                of_digest[digest] = {name: [Box(*box) for box in boxes] for name, boxes in content.items()}
            result[rank] = of_digest[digest]
        return result

    def put_parts(self, plan: EnginePlan, trainers: int, ranks: int) -> None:
        """Leave each member its part of the plan."""
        for rank, part in enumerate(plan.of_trainers(trainers)):
            self._put(f"sends-{rank}", part.to_data())
        for rank, part in enumerate(plan.of_engine(ranks)):
            self._put(f"receives-{rank}", part.to_data())

    def refuse(self, problem: str) -> None:
        """Tell all members why there is no plan."""
        self._put(_PROBLEM, problem)

    def sends(self, rank: int, wait_for: WaitFor) -> Part:
        """Wait for the part of a trainer rank. Raises ValueError if there is no plan."""
        return self._part(f"sends-{rank}", wait_for)

    def receives(self, rank: int, wait_for: WaitFor) -> Part:
        """Wait for the part of an engine's rank. Raises ValueError if there is no plan."""
        return self._part(f"receives-{rank}", wait_for)

    def _part(self, key: str, wait_for: WaitFor) -> Part:
        wait_for(
            lambda: bool(self._store.check([key]) or self._store.check([_PROBLEM])),
            lambda: "the first trainer rank made no plan",
        )
        data = self._get(key)
        if data is None:
            raise ValueError(self._get(_PROBLEM))
        return Part.from_data(data)

    def _put(self, key: str, value: Any) -> None:
        """Leave a value in pieces; the number of pieces comes last, as readers look for it."""
        data = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)
        pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{key}/{number}", piece)
        self._store.set(key, str(len(pieces)))

    def _get(self, key: str) -> Any:
        if not self._store.check([key]):
            return None
        count = int(self._store.get(key))
        data = b"".join(self._store.get(f"{key}/{number}") for number in range(count))
        return json.loads(zlib.decompress(data))


def beating(exchanges: Sequence[LinkExchange]) -> AbstractContextManager[None]:
    """Beat for these links during a block that takes long."""

    def beat() -> None:
        for exchange in exchanges:
            exchange.beat()

    return repeated(beat, _BEAT_SECONDS, "beats of links")
