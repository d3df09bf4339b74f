"""Staged loader: fetches versions from the trainers' sidecars, and streams them into the engine in chunks."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from grpo_worker.weightsync.agent import metrics
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.held_weights import StagedSource
from grpo_worker.weightsync.agent.http_reader import FetchError
from grpo_worker.weightsync.agent.managed_engine import ManagedEngine
from grpo_worker.weightsync.agent.staged_version import StagedVersion
from grpo_worker.weightsync.protocol.manifest import Manifest
from grpo_worker.weightsync.protocol.tiling import make_plan
from grpo_worker.weightsync.protocol.transfer_plan import make_transfer_plan

log = logging.getLogger(__name__)


class StagedLoader:
    """Loads staged versions into one engine. Callers hold the agent's lock.

    ``bucket_bytes``: upper limit of a bucket.
    """

    def __init__(self, engine: ManagedEngine, fetcher: Fetcher, bucket_bytes: int) -> None:
        self._engine = engine
        self._fetcher = fetcher
        self._bucket_bytes = bucket_bytes

    def load(self, version: int, sources: Mapping[int, str]) -> None:
        """Fetch ``version`` from the sidecars and load it, unless the engine serves these bytes already.

        ``sources``: trainer rank -> base URL. Raises UpdateError, after marking a touched engine.
        """
        engine = self._engine
        with engine.updating(version):
            manifests = self._manifests(sources, version)
            held, source = engine.held.staged, _source(version, manifests, sources)
            if engine.serves(version) and held is not None and held.digests == source.digests:
                engine.set_source(replace(held, sources=sources))  # it may have come from elsewhere
                return
            engine.set_source(source)
            self.install(self._stage(source, manifests))

    def load_again(self, source: StagedSource) -> None:
        """Load a version that was loaded before. Raises UpdateError; the caller marks the engine."""
        log.info("loading version %d again", source.version)
        with self._engine.installer.updating(source.version):
            self.install(source.copy or self._find_again(source))

    def install(self, staged: StagedVersion) -> None:
        """Install a version whose chunks can be streamed, if the engine is up. Call it inside an update."""
        engine = self._engine
        if engine.restarting:
            if not engine.client.alive():
                return  # Agent.watch loads it when the engine is back
            engine.on_up()
        try:
            with engine.installer.streaming(staged) as version:
                engine.write(staged.version, lambda: engine.installer.install(version, record=True))
        finally:
            metrics.record_fetch(self._fetcher.received)

    def _find_again(self, source: StagedSource) -> StagedVersion:
        """Return a version that was loaded before. Raises FetchError if the trainers have other bytes now."""
        manifests = self._manifests(source.sources, source.version)
        if _source(source.version, manifests, source.sources).digests != source.digests:
            raise FetchError(f"the trainers have published other bytes as version {source.version}")
        return self._stage(source, manifests)

    def _manifests(self, sources: Mapping[int, str], version: int) -> list[Manifest]:
        with self._engine.installer.timed("pull"):
            return self._fetcher.manifests(sources, version)

    def _stage(self, source: StagedSource, manifests: list[Manifest]) -> StagedVersion:
        """Return a version whose chunks can be streamed. Raises PlanError, or FetchError."""
        plan = make_transfer_plan(make_plan(manifests), self._bucket_bytes)
        with self._engine.installer.timed("pull"):
            blobs = self._fetcher.blobs(source.sources, manifests)
        staged = StagedVersion(source.version, plan, source.digests, blobs, source.sources)
        if blobs.local:
            self._engine.set_source(replace(source, copy=staged))
        return staged


def _source(version: int, manifests: list[Manifest], sources: Mapping[int, str]) -> StagedSource:
    return StagedSource(version, sources, [manifest.digest for manifest in manifests])
