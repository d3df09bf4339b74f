"""Offer of an engine's agent to the agents of its pool: they can read what the engine serves. Pure."""

from dataclasses import asdict, dataclass
from typing import Any

from grpo_worker.weightsync.agent.engine_link import JoinedLink
from grpo_worker.weightsync.agent.held_weights import Origin, StagedSource


@dataclass(frozen=True, slots=True)
class PeerOffer:
    """A version in the ranks of a serving engine.

    ``reading``: id of this engine's version among all that its agent has offered; part of the URLs.
    ``ranks``: of the engine. ``checksum``: of its weights. ``writer``, ``attempt``: the job that wrote them.
    ``origin``: where the engine got them from.
    """

    reading: str
    version: int
    ranks: int
    checksum: str
    writer: str | None
    attempt: int
    origin: Origin

    def sources(self, url: str) -> dict[int, str]:
        """Return the base URL of each rank's files, as of trainer ranks. ``url``: of the agent."""
        return dict.fromkeys(range(self.ranks), f"{url}/v1/peer/{self.reading}")

    def to_json(self) -> dict[str, Any]:
        """Return the offer as JSON-compatible data."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "origin"}
        return fields | {"origin": _origin_data(self.origin)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PeerOffer":
        """Read an offer. Raises KeyError for a missing field."""
        fields = {name: data[name] for name in cls.__dataclass_fields__}
        return cls(**fields | {"origin": _origin_of(data["origin"])})


def _origin_data(origin: Origin) -> dict[str, Any] | None:
    if isinstance(origin, StagedSource):
        sources = {str(rank): url for rank, url in origin.sources.items()}
        return {"version": origin.version, "sources": sources, "digests": origin.digests}
    return asdict(origin) if origin is not None else None


def _origin_of(data: dict[str, Any] | None) -> Origin:
    if data is None:
        return None
    if "gang" in data:
        return JoinedLink(data["name"], data["gang"])
    sources = {int(rank): url for rank, url in data["sources"].items()}
    return StagedSource(data["version"], sources, data["digests"])
