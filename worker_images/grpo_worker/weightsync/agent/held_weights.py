"""Weights that an engine holds: where they came from, and whether they can be loaded again. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from grpo_worker.weightsync.agent.engine_link import JoinedLink
from grpo_worker.weightsync.agent.staged_version import StagedVersion


@dataclass(frozen=True, slots=True)
class StagedSource:
    """A version that the trainers have staged.

    ``sources``: of their host memory, rank -> base URL; empty if the version came from the checkpoint store.
    ``digests``: of the ranks' blobs. ``copy``: the version, if its blobs are in this process's memory.
    """

    version: int
    sources: Mapping[int, str]
    digests: list[str]
    copy: StagedVersion | None = None


Origin = StagedSource | JoinedLink | None


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Origin of an engine's weights.

    ``source``: a version that the trainers staged, which can be loaded again; or the link over which the
    trainer ranks sent the version; or None, if neither applies.
    ``checksum``: of the weights in the engine, or "" if they are unknown.
    ``awaits_next``: the engine gave up its weights to the trainers. A new version follows, so the staged one
    is not loaded again.
    """

    source: Origin = None
    checksum: str = ""
    awaits_next: bool = False

    @property
    def staged(self) -> StagedSource | None:
        """The staged version, also while the engine does not hold it."""
        return self.source if isinstance(self.source, StagedSource) else None

    @property
    def reloadable(self) -> StagedSource | None:
        """Version in the trainers' host memory to load into an engine that restarted or failed to update."""
        staged = self.staged
        return staged if staged is not None and staged.sources and not self.awaits_next else None

    @property
    def origin(self) -> Origin:
        """The source without a copy of its bytes, for an engine that gets the weights from this one."""
        return replace(self.source, copy=None) if isinstance(self.source, StagedSource) else self.source

    def came_from(self, gang: str | None) -> bool:
        """Return whether the weights came over a link with this gang of trainer ranks."""
        return isinstance(self.source, JoinedLink) and self.source.gang == gang

    def loading(self) -> "HeldWeights":
        """Return the state when an engine begins to load a version."""
        return replace(self, awaits_next=False)

    def loaded(self, checksum: str) -> "HeldWeights":
        """Return the state after the engine has loaded the source."""
        return replace(self, checksum=checksum)

    def from_source(self, source: Origin) -> "HeldWeights":
        """Return the state with another source."""
        return replace(self, source=source)

    def without_link(self) -> "HeldWeights":
        """Return the state after the engine left its link."""
        return replace(self, source=self.staged)

    def lost(self) -> "HeldWeights":
        """Return the state after the engine's process ended."""
        return replace(self, source=self.staged, checksum="")

    def released(self) -> "HeldWeights":
        """Return the state after the engine released its weights' memory to the trainers."""
        return replace(self, source=self.staged, checksum="", awaits_next=True)
