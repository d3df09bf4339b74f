"""Rendezvous of the hosts of one engine: their servers start and end together, in rounds. No I/O.

SGLang's servers of one engine form process groups once, when they start. A server that restarts alone finds
no peers, and the others wait for the old one. The agent of the first host therefore decides for all hosts:

* Every host reports once a second which server it runs; the answer names the round that it must run.
* A round begins when all hosts report and none of them runs a server.
* It ends for all hosts when the server or the container of one ends, or when one stops reporting.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from grpo_operator.api.messages import EngineHost
from grpo_operator.api.v1alpha1.status import HostState

log = logging.getLogger(__name__)
# Longer than an agent takes to restart, because the reports pass through it.
LOST_SECONDS = 60.0
# As kubelet does it for containers: a round begins at once after the first loss, later after these pauses,
# until one has lasted.
_FIRST_PAUSE, _LONGEST_PAUSE, _LASTING_SECONDS = 5.0, 300.0, 600.0


class UnknownHostError(RuntimeError):
    """A host of the engine has not reported."""


@dataclass(frozen=True, slots=True)
class HostReport:
    """Report of one host.

    ``process``: random id of the engine container's first process, so that its restart is noticed.
    ``round``: round of the server that runs now, or "" if none runs.
    ``ended``: round of the last server that ended by itself. ``error``: why it did.
    ``agent``: URL of a further host's agent.
    """

    host: int
    pod: str
    process: str
    round: str = ""
    ended: str = ""
    error: str = ""
    agent: str = ""


@dataclass(frozen=True, slots=True)
class _Seen:
    report: HostReport
    time: float


class HostRendezvous:
    """Rounds of one engine of ``hosts`` hosts. Thread-safe. ``clock``: seconds, monotonic."""

    def __init__(self, hosts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._hosts = hosts
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[int, _Seen] = {}
        self._members: dict[int, str] = {}  # processes of the current round, by host
        self._round = ""
        self._ended = ""  # the round before
        self._began = clock()
        self._losses = 0  # since a round has lasted
        self._next = clock()  # time before which no round begins
        self._reason = ""  # why the last round ended

    def report(self, report: HostReport) -> str:
        """Take a host's report; return the round whose server it must run, or "" for none."""
        with self._lock:
            self._seen[report.host] = _Seen(report, self._clock())
            self._end_if_lost()
            if not self._round:
                self._begin_if_complete()
            return self._answer(report)

    def problem(self) -> str:
        """Return why the engine cannot serve, with the names of pods; "" while a round is complete."""
        with self._lock:
            self._end_if_lost()
            if self._round:
                starting = [h for h in self._members if self._seen[h].report.round != self._round]
                return f"{self._names(starting)}: the server starts" if starting else ""
            return self._waits()

    def further_agents(self) -> list[str]:
        """Return the URLs of the agents of the hosts after the first, by host.

        Raises UnknownHostError for one that has not reported since this agent started.
        """
        with self._lock:
            if missing := [host for host in range(1, self._hosts) if host not in self._seen]:
                raise UnknownHostError(f"host {missing[0]} of {self._hosts} has not reported yet")
            return [self._seen[host].report.agent for host in range(1, self._hosts)]

    def starting_for(self) -> float:
        """Return the seconds since the round began; 0 while the hosts wait for each other."""
        with self._lock:
            return self._clock() - self._began if self._round else 0.0

    def states(self) -> list[EngineHost]:
        """Return the state of each host that has reported."""
        with self._lock:
            return [
                EngineHost(host=host, pod=seen.report.pod, state=self._state(seen))
                for host, seen in sorted(self._seen.items())
            ]

    def _state(self, seen: _Seen) -> HostState:
        if not self._fresh(seen):
            return HostState.LOST
        runs = self._round and seen.report.round == self._round
        return HostState.RUNNING if runs else HostState.WAITING

    def _fresh(self, seen: _Seen) -> bool:
        return self._clock() - seen.time < LOST_SECONDS

    def _end_if_lost(self) -> None:
        """End the current round when one of its hosts has lost its server."""
        for host, process in self._members.items():
            seen = self._seen[host]
            reason = self._lost(seen, process)
            if reason:
                self._end(f"{seen.report.pod}: {reason}")
                return

    def _lost(self, seen: _Seen, process: str) -> str:
        report = seen.report
        if not self._fresh(seen):
            return f"no report for {LOST_SECONDS:.0f} s"
        if report.process != process:
            return "the engine's container restarted"
        return f"the server ended: {report.error}" if report.ended == self._round else ""

    def _end(self, reason: str) -> None:
        now = self._clock()
        self._losses = 1 if now - self._began > _LASTING_SECONDS else self._losses + 1
        pause = min(_FIRST_PAUSE * 2 ** (self._losses - 2), _LONGEST_PAUSE) if self._losses > 1 else 0.0
        self._next = now + pause
        log.warning("round %s ended: %s", self._round, reason)
        self._ended, self._round, self._members, self._reason = self._round, "", {}, reason

    def _begin_if_complete(self) -> None:
        """Begin a round when no host runs a server; adopt the one that all run already."""
        present = {host: seen.report for host, seen in self._seen.items() if self._fresh(seen)}
        if len(present) < self._hosts:
            return
        rounds = {report.round for report in present.values()}
        if rounds == {""} and self._clock() >= self._next:
            self._round = uuid.uuid4().hex[:12]
        elif len(rounds) == 1 and rounds != {self._ended}:
            (self._round,) = rounds  # this agent has restarted
        if self._round:
            self._members = {host: report.process for host, report in present.items()}
            self._began = self._clock()
            log.info("round %s: %s", self._round, ", ".join(seen.pod for seen in present.values()))

    def _answer(self, report: HostReport) -> str:
        if self._round or not report.round or report.round == self._ended:
            return self._round
        # A restarted agent does not know the round yet: the server goes on until another host runs none.
        others = {seen.report.round for seen in self._seen.values() if self._fresh(seen)}
        return report.round if others == {report.round} else ""

    def _waits(self) -> str:
        waits = [str(host) for host in range(self._hosts) if not self._present(host)]
        missing = f"waiting for host {', '.join(waits)} of {self._hosts}" if waits else "the hosts restart"
        return f"{self._reason}; {missing}" if self._reason else missing

    def _present(self, host: int) -> bool:
        return host in self._seen and self._fresh(self._seen[host])

    def _names(self, hosts: list[int]) -> str:
        return ", ".join(self._seen[host].report.pod for host in hosts)
