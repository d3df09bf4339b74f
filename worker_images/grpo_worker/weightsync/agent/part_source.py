"""Source of host parts: opens the version that the first host's agent has named, and no other bytes."""

from collections.abc import Callable
from pathlib import Path

from grpo_worker.weightsync.agent.detours import Detours
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.file_reader import FileReader, reading_threads
from grpo_worker.weightsync.agent.http_reader import FetchError
from grpo_worker.weightsync.agent.part_messages import PartRequest
from grpo_worker.weightsync.agent.staged_version import StagedVersion
from grpo_worker.weightsync.agent.stored_source import open_stored
from grpo_worker.weightsync.protocol.tiling import make_plan
from grpo_worker.weightsync.protocol.transfer_plan import make_transfer_plan


class PartSource:
    """Versions for the ranks of one host, one at a time.

    ``bucket_bytes``: upper limit of a bucket. ``store``: folder of the job in its checkpoint store; None: it
    cannot be read. ``timeout``: seconds of each read there. ``detours``: to sources that are cut off.
    """

    def __init__(
        self, fetcher: Fetcher, bucket_bytes: int, store: Path | None, timeout: float, detours: Detours
    ) -> None:
        self._fetcher = fetcher
        self._detours = detours
        self._bucket_bytes = bucket_bytes
        self._store = store
        self._timeout = timeout
        self._threads = reading_threads()
        self._copy: StagedVersion | None = None  # the last version, if its blobs are in this process's memory

    @property
    def received(self) -> int:
        """Bytes that the last version took over the network so far."""
        return self._fetcher.received

    def open(self, request: PartRequest, cancelled: Callable[[], bool]) -> StagedVersion:
        """Return the version, whose chunks can be streamed. Raises FetchError, or PlanError.

        ``cancelled``: returns whether the reading from a peer or the store must end.
        """
        copy, self._copy = self._copy, None
        if copy is not None and (copy.version, copy.digests) == (request.version, request.digests):
            self._copy = copy
            return copy
        if request.stored:
            return self._stored(request, cancelled)
        sources, manifests = self._detours.read(
            request.sources, lambda reached: self._fetcher.manifests(reached, request.version)
        )
        plan = make_transfer_plan(make_plan(manifests), self._bucket_bytes)
        if plan.plan_id != request.plan_id:
            raise FetchError(f"plan {plan.plan_id} instead of the first host's {request.plan_id}")
        if request.from_peer:
            blobs = self._fetcher.peer_blobs(sources, manifests, cancelled)
        elif [manifest.digest for manifest in manifests] != request.digests:
            raise FetchError(f"the trainers have published other bytes as version {request.version}")
        else:
            blobs = self._fetcher.blobs(sources, manifests)
        staged = StagedVersion(request.version, plan, request.digests, blobs, sources)
        self._copy = staged if blobs.local else None
        return staged

    def _stored(self, request: PartRequest, cancelled: Callable[[], bool]) -> StagedVersion:
        folder = Path(request.stored)
        if self._store is None or not folder.is_relative_to(self._store) or ".." in folder.parts:
            raise FetchError(f"{folder}: this agent may read {self._store or 'no checkpoint store'}")
        reader = FileReader(
            self._threads, self._timeout, lambda: "the update has ended" if cancelled() else ""
        )
        staged = open_stored(folder, request.version, reader, self._fetcher, self._bucket_bytes)
        if (staged.plan.plan_id, staged.digests) != (request.plan_id, request.digests):
            raise FetchError(f"{folder}: it holds other bytes than the first host's agent has found")
        return staged
