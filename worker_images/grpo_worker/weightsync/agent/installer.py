"""One version from host memory into one engine: prepare, transfer, commit, or abort."""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpo_worker.weightsync.agent import metrics
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.local_group import LocalGroup
from grpo_worker.weightsync.agent.staged_version import StagedVersion, checksum_of
from grpo_worker.weightsync.agent.update import Phase, Update
from grpo_worker.weightsync.protocol.direct_load import AGENT, DirectLoad, direct_load_request
from grpo_worker.weightsync.protocol.transfer_plan import TransferPlan

log = logging.getLogger(__name__)


class UpdateError(RuntimeError):
    """An update was aborted; the message names pod, version, phase and bucket."""


class Installer:
    """The way into one engine of ``ranks`` ranks. ``timeout``: seconds of each call to the engine; of a
    direct load that is the whole transfer. One update at a time."""

    def __init__(self, name: str, engine: Engine, ranks: int, timeout: float) -> None:
        self._name = name
        self._engine = engine
        self._ranks = ranks
        self._timeout = timeout
        self._group: LocalGroup | None = None
        self.seconds: dict[str, float] = {}
        self.told: dict[str, Any] = {}  # by the engine, of the last direct load
        self.update = Update(0)
        self._sent = 0  # buckets that have left; written by the thread that sends them

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Around everything that is done for one version. Whatever is raised inside aborts the update.

        Raises UpdateError. An engine that answers is left without an open session and without the group.
        """
        self.seconds = {}
        self._enter(Update(version))
        try:
            self._engine.listen()
            yield
        except Exception as error:
            self._count_sent()
            touched = self.update.phase != Phase.PLAN
            self._enter(self.update.aborted(str(error) or repr(error)))
            if touched:
                self.drop_group(tidy=True)
            raise UpdateError(f"{self._name}: {self.update.reason}") from error

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add to the seconds of ``part``."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - started

    def install(self, copy: StagedVersion) -> str:
        """Everything after the plan; the digest of what the engine holds. Call it inside ``updating``."""
        load = copy.direct_load()
        self._enter(self.update.prepare(load.plan_id, len(copy.buckets)))
        group = self._joined()

        def transfer() -> None:
            self._send_directly(group, copy, load) if group.direct else self._send(group, copy)

        def checksum() -> str:
            # After a direct load every rank of the engine has compared the bytes that it wrote.
            return copy.checksum() if group.direct else self._engine.checksum()

        return self._transact(load.plan_id, copy.nbytes, transfer, checksum)

    def take(self, link: str, transfer_plan: TransferPlan, version: int) -> str:
        """Like ``install``, of a version that the trainer ranks send over ``link``."""
        load = direct_load_request(transfer_plan, self._timeout)
        self._enter(self.update.prepare(load.plan_id, len(transfer_plan.buckets)))
        fingerprints: list[int] = []

        def transfer() -> None:
            told = self._engine.receive_all(link, transfer_plan.tensors, str(version), load)
            fingerprints.extend(told["fingerprints"])
            self._sent = len(transfer_plan.buckets)
            self._note(version, told)

        return self._transact(load.plan_id, transfer_plan.nbytes, transfer, lambda: checksum_of(fingerprints))

    def _transact(
        self, plan_id: str, nbytes: int, transfer: Callable[[], None], checksum: Callable[[], str]
    ) -> str:
        """Pause, transfer, commit, go on; what ``checksum`` says of it."""
        self._sent = 0
        with self.timed("pause"):
            self._engine.pause()
            with self.timed("send"):
                self._engine.begin_update()
                self._enter(self.update.transfer(plan_id))
                transfer()
                self._count_sent()
                self._enter(self.update.commit())
                self._engine.end_update()
            with self.timed("verify"):
                found = checksum()
                self._enter(self.update.committed(self._engine.weight_version()))
            self._engine.resume()
        metrics.took(self.seconds, nbytes)
        return found

    def drop_group(self, tidy: bool = False) -> None:
        """Forget the group. ``tidy``: the engine's side too, if it answers: a session left open would
        refuse the next begin, and a group left behind would leak."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
        if not tidy or not self._engine.alive():
            return
        calls = [self._engine.end_update]
        if group is not None:
            name = group.name
            calls.append(lambda: self._engine.leave_group(name))
        for call in calls:
            try:
                call()
            except EngineError as error:
                log.info("nothing to tidy: %s", error)

    def _joined(self) -> LocalGroup:
        if self._group is None:
            with self.timed("join"):
                # No name twice: the engine may still have the group of an agent that died.
                name = f"{AGENT}{uuid.uuid4().hex[:12]}"
                self._group = LocalGroup(self._engine, name, self._ranks, self._timeout)
        return self._group

    def _send_directly(self, group: LocalGroup, copy: StagedVersion, load: DirectLoad) -> None:
        """All buckets by one request; the engine writes one while the next is under way."""
        tensors = [tensor for bucket in copy.buckets for tensor in bucket.tensors]
        sender = threading.Thread(target=self._broadcast, args=(group, copy), daemon=True)
        sender.start()
        told = self._engine.receive_all(group.name, tensors, str(copy.plan.version), load)
        sender.join(self._timeout)
        self._note(copy.plan.version, told)

    def _note(self, version: int, told: dict[str, Any]) -> None:
        """What the engine says of a direct load."""
        self.seconds |= {f"engine_{part}": value for part, value in told["seconds"].items()}
        names = ("copies", "byLoader", "recorded", "extraBytes", "received")
        self.told = {name: told[name] for name in names}
        log.info("version %d: %s", version, self.told)

    def _broadcast(self, group: LocalGroup, copy: StagedVersion) -> None:
        for bucket in copy.buckets:
            group.send(bucket.flat)
            self._sent += 1

    def _count_sent(self) -> None:
        while self.update.phase == Phase.TRANSFER and self.update.sent < self._sent:
            self.update = self.update.bucket(self.update.sent)

    def _send(self, group: LocalGroup, copy: StagedVersion) -> None:
        for index, bucket in enumerate(copy.buckets):
            last = index == len(copy.buckets) - 1
            sender = threading.Thread(target=group.send, args=(bucket.flat,), daemon=True)
            sender.start()
            self._engine.receive(group.name, bucket.tensors, str(copy.plan.version) if last else None)
            sender.join(self._timeout)
            self._sent += 1
            self._count_sent()

    def _enter(self, update: Update) -> None:
        self.update = update
        metrics.entered(update)
