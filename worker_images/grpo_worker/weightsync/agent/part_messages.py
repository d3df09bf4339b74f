"""Messages about host parts: what the ranks of one host keep of a version. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from grpo_worker.weightsync.planner.rank_parts import FIELDS, Table


class PartPhase(StrEnum):
    """Phase of a host part, in order; FAILED follows any of them.

    FETCH: the plan is made and the first chunk is fetched. READY: the ranks may connect, and tell what they
    keep. KEPT: they have told it. STREAM: they are sent what they keep. DONE: they have been sent all of it.
    """

    FETCH = "fetch"
    READY = "ready"
    KEPT = "kept"
    STREAM = "stream"
    DONE = "done"
    FAILED = "failed"

    def reached(self, phase: "PartPhase") -> bool:
        """Return whether ``phase`` is this one or an earlier one; a part that has failed reaches none."""
        order = list(PartPhase)
        return self != PartPhase.FAILED and order.index(self) >= order.index(phase)


@dataclass(frozen=True, slots=True)
class PartRequest:
    """Request of the first host's agent to stream a version to the ranks ``first`` to ``end`` - 1.

    ``name``: of the streams, which only the engine's ranks know besides. ``sources``: rank -> base URL.
    ``stored``: folder of the version in the checkpoint store instead; "" if it is not read there.
    ``plan_id``, ``digests``: of the version as the first host's agent has found it.
    """

    name: str
    version: int
    plan_id: str
    sources: Mapping[int, str]
    digests: list[str]
    first: int
    end: int
    stored: str = ""

    @property
    def from_peer(self) -> bool:
        """True if the version lies in the ranks of a serving engine, which have no digests of their blobs."""
        return not self.digests

    def to_json(self) -> dict[str, Any]:
        """Return the request as JSON-compatible data."""
        return asdict(self) | {"sources": {str(rank): url for rank, url in self.sources.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PartRequest":
        """Read a request. Raises KeyError for a missing field."""
        fields = {name: data[name] for name in cls.__dataclass_fields__}
        sources = {int(rank): url for rank, url in data["sources"].items()}
        return cls(**fields | {"sources": sources})


@dataclass(frozen=True, slots=True)
class PartState:
    """State of a host part.

    ``port``: at which its ranks connect. ``received``: bytes that its agent has read over the network.
    ``nbytes``, ``total``: number and sum of the bytes that it counted, which no earlier host counts.
    ``sent``: bytes that each rank was sent. ``problem``: why it has failed.
    """

    phase: PartPhase = PartPhase.FETCH
    port: int = 0
    received: int = 0
    nbytes: int = 0
    total: int = 0
    sent: tuple[int, ...] = ()
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON-compatible data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PartState":
        """Read a state. Raises KeyError or ValueError for other data."""
        fields = {name: data[name] for name in cls.__dataclass_fields__}
        return cls(**fields | {"phase": PartPhase(data["phase"]), "sent": tuple(data["sent"])})


def table_bytes(table: Table) -> bytes:
    """Return the bytes of a table of regions."""
    return table.astype("<i4").tobytes()


def table_from(data: bytes) -> Table:
    """Return the table from the output of ``table_bytes``. Raises ValueError for other data."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False).reshape(-1, FIELDS)
