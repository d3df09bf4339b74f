"""Agents of an engine of several hosts whose ranks are threads; the first host's agent leads."""

from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.detours import Detours
from grpo_worker.weightsync.agent.engine_place import EnginePlace
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.further_host import FurtherHost, application
from grpo_worker.weightsync.agent.host_rendezvous import HostRendezvous, HostReport
from grpo_worker.weightsync.agent.http import rollout_application
from grpo_worker.weightsync.agent.part_routes import HostParts
from grpo_worker.weightsync.agent.part_source import PartSource
from grpo_worker.weightsync.agent.peers import Peers
from support.engine_server import JOB, free_port, serve_app
from support.rank_threads import ThreadedEngine

FIRST = "http://127.0.0.1:9"  # no stand-in rank reports through its agent


class FurtherAgent:
    """Agent of a further host. ``received``: bytes that it has read for the last version."""

    def __init__(self, host: int, bucket: int, timeout: float, store: Path | None, first: str) -> None:
        self._fetcher = Fetcher(timeout)
        self.parts = HostParts(PartSource(self._fetcher, bucket, store, timeout, Detours(first)), timeout)
        self.url = serve_app(self.application(host))

    def application(self, host: int) -> Starlette:
        return application(FurtherHost(host, f"pod-{host}", FIRST, lambda: True), self.parts)

    @property
    def received(self) -> int:
        return self._fetcher.received


class HostAgents:
    """Agents of the ``hosts`` hosts of ``engine``; the first has the URL ``url``.

    ``store``: of the job's checkpoints. ``relays``: the first one answers those of further hosts.
    """

    def __init__(
        self, engine: ThreadedEngine, hosts: int, bucket: int, timeout: float = 10,
        peers: Peers | None = None, store: Path | None = None, relays: bool = False,
    ) -> None:  # fmt: skip
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.further = [FurtherAgent(host, bucket, timeout, store, self.url) for host in range(1, hosts)]
        self.rendezvous = HostRendezvous(hosts)
        self.rendezvous.report(HostReport(0, "pod-0", "process"))
        for host, further in enumerate(self.further, 1):
            self.report(host, further.url)
        place = EnginePlace(hosts=self.rendezvous, peers=peers, store=store)
        ranks = len(engine.models)
        self.first = Agent("engine-0", engine, ranks, bucket, timeout, writer=JOB, place=place)
        if relays:
            serve_app(rollout_application(self.first, None, place), port)
        self.first.watch()

    def report(self, host: int, url: str) -> None:
        """Report the agent of a further host."""
        self.rendezvous.report(HostReport(host, f"pod-{host}", "process", agent=url))

    def sync(self, version: int, sources: dict[int, str]) -> dict[str, Any]:
        return self.first.sync(JOB, version, sources)

    @property
    def received(self) -> list[int]:
        """Bytes that the agent of each host has read for the last version."""
        return [self.first._fetcher.received, *(further.received for further in self.further)]
