"""Fetcher: reads manifests of published versions, and gives access to their blobs."""

from collections.abc import Callable, Mapping, Sequence

from grpo_worker.weightsync.agent.blobs import Blobs, LocalBlobs, RangedBlobs
from grpo_worker.weightsync.agent.file_reader import FileReader
from grpo_worker.weightsync.agent.http_reader import HttpReader, UnreachableError
from grpo_worker.weightsync.agent.peer_blobs import PeerBlobs
from grpo_worker.weightsync.agent.sources import each, url_of
from grpo_worker.weightsync.agent.whole_blobs import WholeBlobs
from grpo_worker.weightsync.protocol.manifest import Manifest


class Fetcher:
    """Access to versions at the trainers' sidecars.

    ``timeout``: seconds without a byte. ``whole``: fetches whole blobs into this process's memory, for deltas
    and NIXL; None: blobs stay at the trainers, and ranges of them are read when they are needed.
    """

    def __init__(self, timeout: float, whole: WholeBlobs | None = None) -> None:
        self._reader = HttpReader(timeout)
        self._whole = whole
        self._streamed: RangedBlobs | PeerBlobs | None = None

    def manifests(self, sources: Mapping[int, str], version: int) -> list[Manifest]:
        """Return all ranks' manifests. ``sources``: rank -> base URL.

        Raises FetchError if one is missing, and UnreachableError with all sources that cannot be reached.
        """
        ranks: dict[str, list[int]] = {}
        for rank, url in sources.items():
            ranks.setdefault(url, []).append(rank)

        def fetch(source: str) -> list[Manifest] | UnreachableError:
            found = []
            for rank in ranks[source]:
                try:
                    with self._reader.get(url_of(sources, version, rank, "json")) as body:
                        found.append(Manifest.from_json(body.read()))
                except UnreachableError as error:
                    return error
            return found

        answers = dict(zip(ranks, each(fetch, ranks), strict=True))
        lost = {source: error for source, error in answers.items() if isinstance(error, UnreachableError)}
        if lost:
            first = next(iter(lost.values()))
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            raise UnreachableError(f"{first}{more}", lost.keys())
        found = [m for answer in answers.values() if isinstance(answer, list) for m in answer]
        return sorted(found, key=lambda manifest: manifest.rank)

    def blobs(self, sources: Mapping[int, str], manifests: Sequence[Manifest]) -> Blobs:
        """Return the ranks' blobs. The next call invalidates them. Raises FetchError."""
        self._streamed = None
        if self._whole is not None:
            return LocalBlobs(self._whole.fetch(sources, manifests))
        urls = {m.rank: url_of(sources, m.version, m.rank, "bin") for m in manifests}
        self._streamed = RangedBlobs(self._reader, urls, manifests)
        return self._streamed

    def peer_blobs(
        self, sources: Mapping[int, str], manifests: Sequence[Manifest], cancelled: Callable[[], bool]
    ) -> Blobs:
        """Return the blobs of a peer's ranks. ``cancelled``: whether the reading must end."""
        urls = {m.rank: url_of(sources, m.version, m.rank, "bin") for m in manifests}
        self._streamed = PeerBlobs(self._reader, urls, cancelled)
        return self._streamed

    def stored_blobs(
        self, reader: FileReader, paths: Mapping[int, str], manifests: Sequence[Manifest]
    ) -> Blobs:
        """Return the blobs of a version in the checkpoint store. ``paths``: of the files, by rank."""
        self._streamed = RangedBlobs(reader, paths, manifests)
        return self._streamed

    @property
    def received(self) -> int:
        """Bytes that the last version took over the network, or from the store, so far."""
        if self._streamed is not None:
            return self._streamed.received
        return self._whole.received if self._whole is not None else 0

    def forget(self) -> None:
        """Free the memory: later versions are received in another way."""
        self._streamed = None
        if self._whole is not None:
            self._whole.forget()
