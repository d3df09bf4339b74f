"""Fill from a peer: finds an engine of the pool that serves, and presents its weights as a staged version."""

from collections.abc import Callable

from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.peer_offer import PeerOffer
from grpo_worker.weightsync.agent.peers import Peers, Serving
from grpo_worker.weightsync.agent.staged_version import StagedVersion
from grpo_worker.weightsync.protocol.tiling import make_plan
from grpo_worker.weightsync.protocol.transfer_plan import make_transfer_plan


class PeerFill:
    """Versions of ``peers``; None: there are none.

    ``cancelled``: whether the reading must end.
    """

    def __init__(
        self, peers: Peers | None, fetcher: Fetcher, bucket_bytes: int, cancelled: Callable[[], bool]
    ) -> None:
        self._peers = peers
        self._fetcher = fetcher
        self._bucket_bytes = bucket_bytes
        self._cancelled = cancelled

    def find(self, writer: str | None) -> Serving | None:
        """Return the peers that serve the weights of the job ``writer``, or of any; None if none does."""
        return self._peers.serving(writer) if self._peers is not None else None

    def open(self, serving: Serving) -> tuple[PeerOffer, StagedVersion]:
        """Return what one of the peers offers, and its version, whose chunks can be streamed.

        Raises FetchError, or PlanError.
        """
        assert self._peers is not None, "found by them"
        url, offer = self._peers.first_offer(serving)
        sources = offer.sources(url)
        manifests = self._fetcher.manifests(sources, offer.version)
        plan = make_transfer_plan(make_plan(manifests), self._bucket_bytes)
        blobs = self._fetcher.peer_blobs(sources, manifests, self._cancelled)
        return offer, StagedVersion(offer.version, plan, [], blobs, sources, offer.checksum)
