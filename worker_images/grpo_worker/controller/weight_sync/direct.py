"""Versions from the trainer ranks straight into the engines, as long as all members of the link stay."""

import logging
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any

from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.rollout.engine_pool import RolloutPool
from grpo_worker.rollout.routing import EngineEntry
from grpo_worker.weightsync.protocol.direct_load import LINK
from grpo_worker.weightsync.protocol.group_offer import GroupOffer, transfer_plan_of
from grpo_worker.weightsync.protocol.tiling import PlanError
from grpo_worker.weightsync.transport.rendezvous import JOIN_SECONDS, TransferError

log = logging.getLogger(__name__)
TransferGroup = dict[str, tuple[str, str, int]]  # name -> address of an engine, its agent, its restarts
_MOST_PATIENCE = 63


class DirectTransfer:
    """The link between a gang and the engines of a pool. ``backend``: nccl, gloo or cuda-ipc; ``timeout``:
    seconds for a version."""

    def __init__(self, trainers: TrainerGang, pool: RolloutPool, backend: str, timeout: float) -> None:
        self._trainers = trainers
        self._pool = pool
        self._backend = backend
        self._timeout = timeout
        self._members: TransferGroup = {}
        self._failed: TransferGroup = {}
        self._patience = self._skipped = 0  # versions to let pass after a failure, and that have passed
        self.failures = 0
        self.latest = ""  # name of the link that was tried last

    def begin_attempt(self) -> None:
        """The gang is new, and in no link."""
        self._members, self._failed = {}, {}

    def send(self, version: int) -> dict[str, float]:
        """Bring every engine that is there to ``version``; seconds of the slowest one's phases.

        Raises LinkError when a member failed; engines may then be STALE. Raises GangError.
        """
        with self._pool.reserved() as engines:
            members = {e.name: (e.address, e.instance, e.restarts) for e in engines}
            self._check(members)
            try:
                if members != self._members:
                    self._open(engines)
                    self._members = members
                seconds = self._send(engines, version)
            except TransferError:
                self.failures += 1
                self._trainers.call("close_link")
                self._members, self._failed = {}, members
                raise
            self._patience, self._failed = 0, {}
            return seconds

    def _check(self, members: TransferGroup) -> None:
        """Those with whom it has failed are not tried again at once: a link that does not form takes long."""
        if not members:
            raise TransferError("no engine is there")
        if members != self._failed:
            self._patience = 0
        elif self._skipped < self._patience:
            self._skipped += 1
            raise TransferError(
                f"it failed with these engines; {self._patience - self._skipped} versions to wait"
            )
        self._patience, self._skipped = min(2 * self._patience + 1, _MOST_PATIENCE), 0

    def _open(self, engines: Sequence[EngineEntry]) -> None:
        limits = {engine.bucket_bytes for engine in engines}
        if len(limits) > 1:
            raise TransferError(f"engines take buckets of different sizes: {sorted(limits)} bytes")
        bucket = limits.pop()
        self._trainers.call("close_link")
        layouts = self._trainers.call("weight_layout", self._pool.fp8)
        try:
            plan_id = transfer_plan_of(layouts, bucket).plan_id
        except PlanError as error:
            raise TransferError(str(error)) from error
        ranks = self._trainers.world
        world = ranks + sum(engine.ranks for engine in engines)
        name = self.latest = f"{LINK}{ranks}-{uuid.uuid4().hex[:12]}"
        address, port = self._trainers.address, self._trainers.call("listen", name)
        offer = GroupOffer(name, address, port, world, ranks, self._backend, layouts, plan_id)
        joining: list[Future[Any]] = []
        for engine in engines:
            joining.append(self._pool.ask(engine, "link", JOIN_SECONDS * 2, offer=offer.to_json()))
            offer = replace(offer, first=offer.first + engine.ranks)
        place = name, address, port, world, layouts, bucket, plan_id, self._backend
        self._together(joining, "open_link", *place)
        names = ", ".join(engine.name for engine in engines)
        log.info("link %s: %d trainer ranks, engines %s", name, ranks, names)

    def _send(self, engines: Sequence[EngineEntry], version: int) -> dict[str, float]:
        asked = [
            self._pool.ask(engine, "take", self._timeout * 2, version=version, link=self.latest)
            for engine in engines
        ]
        told = self._together(asked, "send_weights", self._timeout, self._pool.fp8)
        phases = sorted({phase for each in told for phase in each["seconds"]})
        return {phase: max(each["seconds"].get(phase, 0.0) for each in told) for phase in phases}

    def _together(self, asked: list[Future[Any]], method: str, *args: Any) -> list[dict[str, Any]]:
        """The gang's call and the engines' answers; a member that fails ends it for all."""
        heed = partial(self._heed, self.latest)
        for future in asked:
            future.add_done_callback(heed)
        problems = [problem for problem in self._trainers.call(method, *args) if problem]
        done, late = wait(asked, timeout=self._timeout)
        told = [future.result() for future in done if future.exception() is None]
        problems += [str(future.exception()) for future in done if future.exception()]
        problems += [answer["error"] for answer in told if "error" in answer]
        if late:
            problems.append(f"{len(late)} engines do not answer")
        if problems:
            raise TransferError("; ".join(problems)[:1000])
        return told

    def _heed(self, link: str, future: Future[Any]) -> None:
        """A member that fails ends it for all; late words about an older link end nothing."""
        if future.exception() is not None or "error" in future.result():
            self._trainers.tell("give_up_link", link)
