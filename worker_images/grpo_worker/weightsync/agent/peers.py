"""Peers: the agents of the same pool's other engines, from which a version can be read."""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from pydantic import ValidationError

from grpo_operator.api.messages import AgentStatus
from grpo_operator.api.names import AGENT_PORT
from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.common import tls
from grpo_worker.common.auth import headers
from grpo_worker.common.service_addresses import ServiceAddresses
from grpo_worker.weightsync.agent.http_reader import FetchError
from grpo_worker.weightsync.agent.peer_offer import PeerOffer
from grpo_worker.weightsync.agent.sources import each

log = logging.getLogger(__name__)
_LOOK_SECONDS = 3.0


def urls_of(service: str) -> Callable[[], list[str]]:
    """Return a function that returns the URLs of the agents behind the pool's headless service."""
    addresses = ServiceAddresses(service, AGENT_PORT)
    return lambda: [tls.url(address, AGENT_PORT) for address in addresses()]


@dataclass(frozen=True, slots=True)
class Serving:
    """Agents of engines that serve ``version``, by URL."""

    version: int
    urls: list[str]


class Peers:
    """Finds engines of the pool that serve.

    ``urls``: returns the URLs of the pool's agents, this one among them. ``timeout``: seconds in which a peer
    must answer what it offers.
    """

    def __init__(self, urls: Callable[[], list[str]], timeout: float) -> None:
        self._urls = urls
        self._timeout = timeout
        self._http = httpx.Client(timeout=_LOOK_SECONDS, verify=tls.own())

    def serving(self, writer: str | None) -> Serving | None:
        """Return the peers that serve the pool's newest version, in random order; None if none serves.

        ``writer``: the job whose weights they must have; None: any.
        """
        urls = self._urls()
        by_version: dict[int, list[str]] = {}
        for url, status in zip(urls, each(self._status, urls), strict=True):
            if status is not None and status.weight_version is not None and _eligible(status, writer):
                by_version.setdefault(status.weight_version, []).append(url)
        if not by_version:
            return None
        newest = max(by_version)
        random.shuffle(by_version[newest])  # readers spread over the peers
        return Serving(newest, by_version[newest])

    def first_offer(self, serving: Serving) -> tuple[str, PeerOffer]:
        """Return the first peer that offers the version. Raises the last one's FetchError if none does."""
        problem = FetchError("no peer serves")
        for url in serving.urls:
            try:
                offer = self._offer(url)
                if offer.version == serving.version:
                    return url, offer
                problem = FetchError(f"peer {url}: it serves version {offer.version} now")
            except FetchError as error:
                problem = error
            log.info("%s", problem)
        raise problem

    def _offer(self, url: str) -> PeerOffer:
        """Return what the peer at ``url`` offers. Raises FetchError with its reason if it offers nothing."""
        try:
            answer = self._http.post(f"{url}/v1/peer", headers=headers(), timeout=self._timeout)
            data = answer.json()
            if answer.status_code != httpx.codes.OK:
                raise FetchError(f"peer {url}: {data['error']}")
            return PeerOffer.from_json(data)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise FetchError(f"peer {url}: {error!r}") from error

    def _status(self, url: str) -> AgentStatus | None:
        try:
            return AgentStatus.model_validate(self._http.get(f"{url}/v1/status").json())
        except (httpx.HTTPError, ValueError, ValidationError):
            return None


def _eligible(status: AgentStatus, writer: str | None) -> bool:
    return status.state == EngineState.SERVING and writer in (None, status.writer)
