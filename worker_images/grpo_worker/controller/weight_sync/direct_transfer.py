"""Coordination of direct transfers: versions go from trainer ranks into engine ranks without staging."""

import logging
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from grpo_operator.api.weight_path import Backend, WeightPath
from grpo_worker.common.clock import SYSTEM_CLOCK, Clock
from grpo_worker.common.patient_http import UNLIMITED
from grpo_worker.controller.weight_sync.retries import Retries
from grpo_worker.controller.weight_sync.synchronizer import METRIC_PREFIX, Engines, Trainers
from grpo_worker.rollout.routing import EngineEntry
from grpo_worker.weightsync.protocol.direct_load import LINK
from grpo_worker.weightsync.protocol.link_offer import LinkOffer
from grpo_worker.weightsync.protocol.version import Version

log = logging.getLogger(__name__)
Identity = tuple[str, str, int]  # address, agent instance and restarts of an engine


@dataclass(frozen=True, slots=True)
class Delivery:
    """Outcome of the direct transfers of one version.

    ``complete``: every reachable engine has received it. ``gang``: identity of the trainer ranks; engines
    that got the version from them need not load it again. ``metrics``: seconds of the phases, failures.
    """

    complete: bool = False
    gang: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Link:
    name: str
    engine: Identity


class DirectTransferCoordinator:
    """Links all trainer ranks with each reachable engine, and sends versions over the links.

    Every engine has a link of its own: an engine that fails, joins or leaves changes no other link.
    """

    def __init__(
        self,
        trainers: Trainers,
        engines: Engines,
        backend: Backend,
        patience: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """``patience``: seconds without progress after which a member of a link is given up.

        An agent may take as long to answer after the trainer ranks have ended.
        """
        self._trainers = trainers
        self._engines = engines
        self._backend = backend
        self._patience = patience
        self._clock = clock
        self._links: dict[str, _Link] = {}  # by engine
        self._retries: Retries[Identity] = Retries()
        self._gang = ""
        self.failures = 0
        self.after_trainers_start()

    def after_trainers_start(self) -> None:
        """Forget all links: the new gang has none."""
        self._links, self._gang = {}, uuid.uuid4().hex[:12]
        self._retries = Retries()

    def deliver(self, version: Version) -> Delivery:
        """Try to bring every reachable engine to ``version``. Raises GangError.

        If it is not complete, the version must be staged for engines that are STALE then.
        """
        self._engines.hold()
        started = self._clock.now()
        with self._engines.reserved() as engines:
            problems, seconds = self._deliver(engines, version)
        for name, problem in problems.items():
            log.warning("version %d is staged for %s: %s", version, name, problem)
        metrics = {f"{METRIC_PREFIX}{phase}": value for phase, value in seconds.items()}
        metrics[f"{METRIC_PREFIX}link"] = self._clock.now() - started
        metrics["weight_sync/link_failures"] = float(self.failures)
        return Delivery(bool(engines) and not problems, self._gang, metrics)

    def _deliver(
        self, engines: Sequence[EngineEntry], version: Version
    ) -> tuple[dict[str, str], dict[str, float]]:
        """Return the problem of each engine that did not get the version, and the seconds of each phase."""
        problems = {}
        for engine in engines:
            if rest := self._retries.rest(engine.name, identity(engine)):
                problems[engine.name] = f"a direct transfer failed before; next try after {rest} versions"
        due = [engine for engine in engines if engine.name not in problems]
        self._close_outdated(engines)
        failed = self._open([engine for engine in due if engine.name not in self._links])
        linked = [engine for engine in due if engine.name not in failed]
        seconds: dict[str, float] = {}
        if linked:
            more, seconds = self._send(linked, version)
            failed |= more
        for engine in due:
            if engine.name in failed:
                self.failures += 1
                self._retries.failed(engine.name, identity(engine))
            else:
                self._retries.succeeded(engine.name)
        self._close([engine.name for engine in due if engine.name in failed])
        return problems | failed, seconds

    def _close_outdated(self, engines: Sequence[EngineEntry]) -> None:
        """Leave the links of engines that were replaced or are gone."""
        now = {engine.name: identity(engine) for engine in engines}
        self._close([name for name, link in self._links.items() if now.get(name) != link.engine])

    def _close(self, engines: Sequence[str]) -> None:
        names = [self._links.pop(engine).name for engine in engines if engine in self._links]
        if names:
            self._trainers.call("close_links", names)

    def _open(self, engines: Sequence[EngineEntry]) -> dict[str, str]:
        """Link the trainers with each engine; return the problems by engine."""
        if not engines:
            return {}
        layouts = self._trainers.call("exchange_layouts", self._engines.fp8)
        if problem := next(filter(None, layouts), ""):
            return {engine.name: problem for engine in engines}
        names = {engine.name: f"{LINK}{self._gang}-{uuid.uuid4().hex[:12]}" for engine in engines}
        port = self._trainers.call("start_rendezvous", list(names.values()), self._engines.fp8)
        offers = [self._offer(engine, names[engine.name], port) for engine in engines]
        calls = [
            _Call(engine, offer.name, self._engines.ask(engine, "link", UNLIMITED, offer=offer.to_json()))
            for engine, offer in zip(engines, offers, strict=True)
        ]
        problems, _ = self._together(calls, "open_links", offers)
        for engine in engines:
            self._links[engine.name] = _Link(names[engine.name], identity(engine))
        log.info("%d trainer ranks, links with %s", self._trainers.world, ", ".join(names))
        return problems

    def _offer(self, engine: EngineEntry, name: str, port: int) -> LinkOffer:
        return LinkOffer(
            name=name,
            gang=self._gang,
            address=self._trainers.address,
            port=port,
            trainers=self._trainers.world,
            ranks=engine.ranks,
            hosts=engine.hosts,
            backend=self._backend,
            bucket_bytes=engine.bucket_bytes,
            links=max(self._engines.size, len(self._links) + 1),
            fp8=self._engines.fp8,
        )

    def _send(
        self, engines: Sequence[EngineEntry], version: Version
    ) -> tuple[dict[str, str], dict[str, float]]:
        body = {"version": version, "patience": self._patience}
        calls = []
        for engine in engines:
            link = self._links[engine.name].name
            request = self._engines.ask(engine, "take", UNLIMITED, link=link, **body)
            calls.append(_Call(engine, link, request))
        names = [call.link for call in calls]
        problems, answers = self._together(calls, "send_weights", names, self._patience)
        phases = sorted({phase for answer in answers.values() for phase in answer["seconds"]})
        slowest = {
            phase: max(answer["seconds"].get(phase, 0.0) for answer in answers.values()) for phase in phases
        }
        return problems, slowest

    def _together(
        self, calls: Sequence["_Call"], method: str, *args: Any
    ) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        """Call the trainers while agents handle ``calls``; return problems and answers by engine.

        The trainers answer in the order of ``calls``. A member that fails ends its own link alone.
        """
        for call in calls:
            call.request.add_done_callback(partial(self._end_on_failure, call.link))
        of_ranks: list[list[str]] = self._trainers.call(method, *args)
        self._await_agents(calls)
        problems, answers = {}, {}
        for number, call in enumerate(calls):
            answer, problem = _outcome(call.request)
            if problem:
                self._trainers.notify("give_up_transfer", call.link)
            of_trainers = next(filter(None, (of_rank[number] for of_rank in of_ranks)), "")
            if of_trainers or problem:
                problems[call.engine.name] = "; ".join(filter(None, (of_trainers, problem)))
            else:
                answers[call.engine.name] = answer
        return problems, answers

    def _await_agents(self, calls: Sequence["_Call"]) -> None:
        """Wait for the agents, which answer soon after the trainers; end their waits for silent engines."""
        wait([call.request for call in calls], timeout=self._patience)
        late = [call for call in calls if not call.request.done()]
        for call in late:
            self._engines.ask(call.engine, "give-up", self._patience, link=call.link)
        wait([call.request for call in late], timeout=self._patience)

    def _end_on_failure(self, link: str, request: Future[Any]) -> None:
        """Make all members of a link give up when its engine failed, so that none waits for its patience."""
        if _outcome(request)[1]:
            self._trainers.notify("give_up_transfer", link)


@dataclass(frozen=True, slots=True)
class _Call:
    """A request to the agent of ``engine`` about its ``link``."""

    engine: EngineEntry
    link: str
    request: "Future[dict[str, Any]]"


def identity(engine: EngineEntry) -> Identity:
    """Return what changes when an engine or its agent is replaced."""
    return engine.address, engine.instance, engine.restarts


def _outcome(request: Future[Any]) -> tuple[dict[str, Any], str]:
    """Return an agent's answer, and the problem or an empty text."""
    if not request.done():
        return {}, "its agent does not answer"
    if request.exception() is not None:
        return {}, str(request.exception())
    answer: dict[str, Any] = request.result()
    return answer, str(answer.get("error", ""))


def coordinator_for(
    path: WeightPath,
    trainers: Trainers,
    engines: Engines,
    patience: float,
    clock: Clock = SYSTEM_CLOCK,
) -> DirectTransferCoordinator | None:
    """Return the coordinator of the path's direct transfers, or None if every version is staged."""
    if not path.direct:
        return None
    return DirectTransferCoordinator(trainers, engines, path.direct, patience, clock)
