"""Invitation of an engine to a link: a transfer group of all trainer ranks and the ranks of one engine."""

from dataclasses import asdict, dataclass
from typing import Any

from grpo_operator.api.weight_path import Backend


@dataclass(frozen=True, slots=True)
class LinkOffer:
    """Everything that a trainer rank or an engine needs to join the link ``name``.

    ``gang``: identity of the gang of trainer ranks, equal for all its links.
    ``address``, ``port``: of the rendezvous store, at the first trainer rank.
    ``trainers``, ``ranks``: number of trainer ranks, which come first, and of the engine's ranks.
    ``hosts``: number of the engine's hosts, each of which has an equal number of ranks.
    ``bucket_bytes``: half of the memory that an engine rank has for receiving, and that a trainer rank has
    for sending over all its links.
    ``links``: number of engines to which the trainer ranks send at the same time.
    ``fp8``: the engine loads weights in FP8.
    """

    name: str
    gang: str
    address: str
    port: int
    trainers: int
    ranks: int
    hosts: int
    backend: Backend
    bucket_bytes: int
    links: int
    fp8: bool

    @property
    def world(self) -> int:
        """Number of members."""
        return self.trainers + self.ranks

    def host_of(self, rank: int) -> int:
        """Return the host of an engine's rank, within which messages are forwarded.

        By CUDA IPC every rank reads the trainers' memory itself.
        """
        return rank if self.backend is Backend.CUDA_IPC else rank * self.hosts // self.ranks

    def to_json(self) -> dict[str, Any]:
        """Return the offer as JSON-compatible data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "LinkOffer":
        """Read an offer. Raises KeyError for a missing field and ValueError for an unknown backend."""
        fields = {name: data[name] for name in cls.__dataclass_fields__}
        return cls(**fields | {"backend": Backend(data["backend"])})
