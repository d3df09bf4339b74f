"""Coordination of direct transfers: versions go from trainer ranks into engine ranks without staging."""

import logging
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from grpo_operator.api.weight_path import Backend, WeightPath
from grpo_worker.common.clock import SYSTEM_CLOCK, Clock
from grpo_worker.controller.weight_sync.synchronizer import METRIC_PREFIX, Engines, Trainers
from grpo_worker.rollout.routing import EngineEntry
from grpo_worker.weightsync.protocol.direct_load import LINK
from grpo_worker.weightsync.protocol.group_offer import GroupOffer, PlannedTransfer
from grpo_worker.weightsync.protocol.version import Version
from grpo_worker.weightsync.transport.rendezvous import JOIN_SECONDS, TransferError

log = logging.getLogger(__name__)
Members = dict[str, tuple[str, str, int]]  # name of an engine -> its address, agent instance and restarts
_MAX_SKIPS = 63
# Agent and engine connect to the store, then the engine waits for all members: each may take JOIN_SECONDS.
_JOIN_REQUEST_SECONDS = 3 * JOIN_SECONDS


@dataclass(frozen=True, slots=True)
class Delivery:
    """Outcome of a direct transfer of one version.

    ``complete``: every member has received it. ``group``: name of the transfer group; also set after a
    failure, because single engines may have received the version. ``metrics``: seconds of the phases,
    failures.
    """

    complete: bool = False
    group: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


class DirectTransferCoordinator:
    """Forms transfer groups of all trainer ranks and reachable engines, and sends versions through them.

    A group is used as long as its members stay the same.
    """

    def __init__(
        self,
        trainers: Trainers,
        engines: Engines,
        backend: Backend,
        timeout: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """``timeout``: seconds for the transfer of one version."""
        self._trainers = trainers
        self._engines = engines
        self._backend = backend
        self._clock = clock
        self._timeout = timeout
        self._members: Members = {}  # of the open group
        self._failed: Members = {}  # of the group that failed last
        self._skips = self._skipped = 0  # versions to stage after a failure, and those staged since
        self.failures = 0
        self.group = ""  # name of the newest group

    def after_trainers_start(self) -> None:
        """Forget the members: the new gang is in no group."""
        self._members, self._failed = {}, {}

    def deliver(self, version: Version) -> Delivery:
        """Try to bring every reachable engine to ``version``. Raises GangError.

        After a failure the version must be staged, and some engines may be STALE.
        """
        self._engines.hold()
        started = self._clock.now()
        try:
            complete, seconds = True, self.transfer(version)
        except TransferError as error:
            complete, seconds = False, {}
            log.warning("version %d is staged, because its direct transfer failed: %s", version, error)
        metrics = {f"{METRIC_PREFIX}{phase}": value for phase, value in seconds.items()}
        metrics[f"{METRIC_PREFIX}link"] = self._clock.now() - started
        metrics["weight_sync/link_failures"] = float(self.failures)
        return Delivery(complete, self.group, metrics)

    def transfer(self, version: Version) -> dict[str, float]:
        """Bring every reachable engine to ``version``; return the slowest engine's seconds of each phase.

        Raises TransferError when a member failed; engines may then be STALE. Raises GangError.
        """
        with self._engines.reserved() as engines:
            members = {e.name: (e.address, e.instance, e.restarts) for e in engines}
            self._check_retry(members)
            try:
                if members != self._members:
                    self._open_group(engines)
                    self._members = members
                seconds = self._send(engines, version)
            except TransferError:
                self.failures += 1
                self._trainers.call("close_transfer_group")
                self._members, self._failed = {}, members
                raise
            self._skips, self._failed = 0, {}
            return seconds

    def _check_retry(self, members: Members) -> None:
        """Raise TransferError unless a transfer to these members shall be tried now.

        A group that does not form takes long to fail, so the same members are tried ever more rarely.
        """
        if not members:
            raise TransferError("no engine is reachable")
        if members != self._failed:
            self._skips = 0
        elif self._skipped < self._skips:
            self._skipped += 1
            raise TransferError(
                f"it failed with these engines before; next try after {self._skips - self._skipped} versions"
            )
        self._skips, self._skipped = min(2 * self._skips + 1, _MAX_SKIPS), 0

    def _open_group(self, engines: Sequence[EngineEntry]) -> None:
        self._trainers.call("close_transfer_group")
        offer = self._offer(engines)
        joining: list[Future[Any]] = []
        first = offer.first
        for engine in engines:
            invitation = replace(offer, first=first).to_json()
            joining.append(self._engines.ask(engine, "link", _JOIN_REQUEST_SECONDS, offer=invitation))
            first += engine.ranks
        self._with_trainers(joining, "open_transfer_group", offer)
        names = ", ".join(engine.name for engine in engines)
        log.info("transfer group %s: %d trainer ranks, engines %s", offer.name, self._trainers.world, names)

    def _offer(self, engines: Sequence[EngineEntry]) -> GroupOffer:
        """Let the trainers plan the transfers to ``engines`` and start the rendezvous. Raises TransferError.

        The plan stays among the members: only its id passes through the controller.
        """
        sizes = {engine.bucket_bytes for engine in engines}
        if len(sizes) > 1:
            raise TransferError(f"engines receive buckets of different sizes: {sorted(sizes)} bytes")
        bucket_bytes = sizes.pop()
        planned: list[PlannedTransfer] = self._trainers.call("plan_transfer", bucket_bytes, self._engines.fp8)
        problem = next((each.problem for each in planned if each.problem), "")
        if problem:
            raise TransferError(problem)
        ranks = self._trainers.world
        name = self.group = f"{LINK}{ranks}-{uuid.uuid4().hex[:12]}"
        port, layouts_port = self._trainers.call("start_rendezvous", name)
        return GroupOffer(
            name=name,
            address=self._trainers.address,
            port=port,
            layouts_port=layouts_port,
            world=ranks + sum(engine.ranks for engine in engines),
            first=ranks,
            backend=self._backend,
            plan_id=planned[0].plan_id,
            bucket_bytes=bucket_bytes,
        )

    def _send(self, engines: Sequence[EngineEntry], version: Version) -> dict[str, float]:
        # After its own timeout an agent still resumes its engine before it answers.
        limit = 2 * self._timeout
        receiving = [
            self._engines.ask(engine, "take", limit, version=version, link=self.group) for engine in engines
        ]
        answers = self._with_trainers(receiving, "send_weights", self._timeout, self._engines.fp8)
        phases = sorted({phase for answer in answers for phase in answer["seconds"]})
        return {phase: max(answer["seconds"].get(phase, 0.0) for answer in answers) for phase in phases}

    def _with_trainers(self, requests: list[Future[Any]], method: str, *args: Any) -> list[dict[str, Any]]:
        """Call the trainers while the engines handle ``requests``; return the engines' answers.

        Raises TransferError that names every member that failed.
        """
        end_on_failure = partial(self._end_on_failure, self.group)
        for request in requests:
            request.add_done_callback(end_on_failure)
        problems = [problem for problem in self._trainers.call(method, *args) if problem]
        done, late = wait(requests, timeout=self._timeout)
        answers = [request.result() for request in done if request.exception() is None]
        problems += [str(request.exception()) for request in done if request.exception()]
        problems += [answer["error"] for answer in answers if "error" in answer]
        if late:
            problems.append(f"{len(late)} engines do not answer")
        if problems:
            raise TransferError("; ".join(problems)[:1000])
        return answers

    def _end_on_failure(self, group: str, request: Future[Any]) -> None:
        """Make all members of ``group`` give up when one failed, so that none waits until the deadline."""
        if request.exception() is not None or "error" in request.result():
            self._trainers.notify("give_up_transfer", group)


def coordinator_for(
    path: WeightPath, trainers: Trainers, engines: Engines, timeout: float, clock: Clock = SYSTEM_CLOCK
) -> DirectTransferCoordinator | None:
    """Return the coordinator of the path's direct transfers, or None if every version is staged."""
    return DirectTransferCoordinator(trainers, engines, path.direct, timeout, clock) if path.direct else None
