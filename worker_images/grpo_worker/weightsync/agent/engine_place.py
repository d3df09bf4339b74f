"""Place of an engine: the address of its first host, its peers, and the rendezvous of its hosts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_operator.api.messages import EngineHost
from grpo_operator.api.names import RENDEZVOUS_PORT
from grpo_operator.api.urls import host_port
from grpo_worker.common.auth import served
from grpo_worker.weightsync.agent.host_rendezvous import HostRendezvous, HostReport
from grpo_worker.weightsync.agent.peers import Peers
from grpo_worker.weightsync.agent.relay import Relay

START_SECONDS = 1800.0  # the default of engine.startSeconds


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """``address``: at which all hosts of the engine reach its first host. ``hosts``: None for one host.

    ``start_seconds``: in which the started servers of all hosts must answer. ``peers``: from which the engine
    is loaded if nobody else does it; None: it waits for the trainers. ``store``: folder of the job in its
    checkpoint store, from which it is loaded if no peer serves. ``relay``: for its further hosts.
    ``own_weights``: the server loads those of its model itself, and no job may write others.
    """

    address: str = "127.0.0.1"
    hosts: HostRendezvous | None = None
    start_seconds: float = START_SECONDS
    peers: Peers | None = None
    store: Path | None = None
    relay: Relay = field(default_factory=Relay)
    own_weights: bool = False

    def further_agents(self) -> list[str]:
        """Return the URLs of the agents of the engine's further hosts, by host."""
        return self.hosts.further_agents() if self.hosts else []

    def answer(self, report: HostReport, serving: bool) -> dict[str, Any]:
        """Take a host's report; return the round that it must run, and what the host needs to know for it."""
        assert self.hosts is not None, "only the hosts of a multi-host engine report"
        rendezvous = host_port(self.address, RENDEZVOUS_PORT)
        return {
            "round": self.hosts.report(report), "rendezvous": rendezvous, "serving": serving,
            "served": served(),
        }  # fmt: skip

    def problem(self) -> str:
        """Return why the servers of the hosts do not all run, or ""."""
        return self.hosts.problem() if self.hosts else ""

    def hosts_status(self) -> list[EngineHost]:
        """Return the state of each host; empty for an engine of one host."""
        return self.hosts.states() if self.hosts else []
