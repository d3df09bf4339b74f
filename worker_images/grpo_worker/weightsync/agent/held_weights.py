"""Weights that an engine holds: where they came from, and whether they can be loaded again. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from grpo_worker.weightsync.agent.staged_version import StagedVersion
from grpo_worker.weightsync.agent.transfer_group import JoinedGroup


@dataclass(frozen=True, slots=True)
class StagedSource:
    """A version in the trainers' host memory.

    ``sources``: rank -> base URL. ``digests``: of the ranks' blobs. ``copy``: the version, if its
    blobs are in this process's memory.
    """

    version: int
    sources: Mapping[int, str]
    digests: list[str]
    copy: StagedVersion | None = None


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Origin of an engine's weights.

    ``source``: a version that the trainers staged, which can be loaded again; or the transfer group that the
    trainer ranks sent the version over; or None, if neither applies.
    ``checksum``: of the weights in the engine, or "" if they are unknown.
    ``awaits_next``: the engine gave up its weights to the trainers. A new version follows, so the staged one
    is not loaded again.
    """

    source: StagedSource | JoinedGroup | None = None
    checksum: str = ""
    awaits_next: bool = False

    @property
    def staged(self) -> StagedSource | None:
        """The staged version, also while the engine does not hold it."""
        return self.source if isinstance(self.source, StagedSource) else None

    @property
    def reloadable(self) -> StagedSource | None:
        """Version to load into an engine that restarted or whose update failed."""
        return None if self.awaits_next else self.staged

    def came_over(self, group: str | None) -> bool:
        """Return whether the weights came over the transfer group of this name."""
        return isinstance(self.source, JoinedGroup) and self.source.name == group

    def loading(self) -> "HeldWeights":
        """Return the state when an engine begins to load a version."""
        return replace(self, awaits_next=False)

    def loaded(self, checksum: str) -> "HeldWeights":
        """Return the state after the engine has loaded the source."""
        return replace(self, checksum=checksum)

    def from_source(self, source: StagedSource | JoinedGroup | None) -> "HeldWeights":
        """Return the state with another source."""
        return replace(self, source=source)

    def without_group(self) -> "HeldWeights":
        """Return the state after the engine left its transfer group."""
        return replace(self, source=self.staged)

    def lost(self) -> "HeldWeights":
        """Return the state after the engine's process ended."""
        return replace(self, source=self.staged, checksum="")

    def released(self) -> "HeldWeights":
        """Return the state after the engine released its weights' memory to the trainers."""
        return replace(self, source=self.staged, checksum="", awaits_next=True)
