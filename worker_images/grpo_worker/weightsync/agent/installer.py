"""Installer: runs one update of one engine from prepare to commit, or aborts it."""

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from grpo_worker.common.polling import pause_after
from grpo_worker.weightsync.agent import metrics
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.engine_place import EnginePlace
from grpo_worker.weightsync.agent.engine_stream import EngineStream
from grpo_worker.weightsync.agent.further_parts import FurtherParts
from grpo_worker.weightsync.agent.link_calls import LinkCalls
from grpo_worker.weightsync.agent.staged_version import StagedVersion
from grpo_worker.weightsync.agent.streamed_load import StreamedLoad, StreamedVersion
from grpo_worker.weightsync.agent.update import Phase, Update
from grpo_worker.weightsync.protocol.agent_stream import LOOPBACK, STREAM
from grpo_worker.weightsync.protocol.direct_load import AGENT, Fetch

if TYPE_CHECKING:
    from grpo_worker.weightsync.agent.local_group import LocalGroup

log = logging.getLogger(__name__)
_FETCH_POLL_SECONDS = 0.01  # at first: the engine's ranks answer between two batches


class UpdateError(RuntimeError):
    """The update was aborted; the message names pod, version, phase and bucket."""


class Installer:
    """Installs versions in one engine of ``ranks`` ranks, one at a time.

    ``timeout``: seconds of each call to the engine, and for each chunk of a staged version.
    ``place``: where the engine's hosts are; None: it has one. ``shares_gpus``: with trainers, which need the
    memory that the engine does not use.
    ``seconds``: of each part of the last update. ``load_report``: of the last direct load, from the
    engine; with ``sent``, the bytes that each rank was sent, if each got only its part.
    ``received_elsewhere``: bytes of the last staged version that agents of further hosts have read.
    """

    def __init__(
        self, name: str, engine: Engine, ranks: int, timeout: float, place: EnginePlace | None = None,
        shares_gpus: bool = False,
    ) -> None:  # fmt: skip
        self._place = place or EnginePlace()
        self._name = name
        self._engine = engine
        self._ranks = ranks
        self._timeout = timeout
        self._shares_gpus = shares_gpus
        self._settled_link = ""  # over which the engine has received a version
        self._group: LocalGroup | None = None
        self.seconds: dict[str, float] = {}
        self.load_report: dict[str, Any] = {}
        self.received_elsewhere = 0
        self.update = Update(0)
        self._sent = 0  # buckets sent; written by the sending thread

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Run an update; every error inside aborts it.

        Raises UpdateError. An engine that still answers then has no open session and has left the group.
        """
        self.seconds = {}
        self._enter(Update(version))
        try:
            self._engine.check_responsive()
            yield
        except Exception as error:
            self._count_sent()
            touched = self.update.phase != Phase.PLAN
            self._enter(self.update.aborted(str(error) or repr(error)))
            if touched:
                self.drop_group(clean_engine=True)
            raise UpdateError(f"{self._name}: {self.update.reason}") from error

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Measure a block and add it to the seconds of ``part``."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - started

    @contextmanager
    def streaming(self, staged: StagedVersion) -> Iterator[StreamedVersion]:
        """Fetch a staged version; the block begins when the first chunks are there. Raises FetchError."""
        name = f"{STREAM}{uuid.uuid4().hex[:12]}"
        further = FurtherParts(self._place.further_agents(), name, staged, self._ranks, self._timeout)
        opened = StreamedVersion.opened(staged, further, self._timeout, partial(self.timed, "pull"))
        with self._place.relay.of(staged.version, staged.sources), opened as version:
            try:
                yield version
            finally:
                self.received_elsewhere = version.received

    def install(self, version: StreamedVersion, record: bool) -> str:
        """Install a staged version, and return the checksum of the engine's weights.

        ``record``: the engine also records what its ranks keep, as it does when it joins its first link.
        Call it, like ``receive``, inside ``updating``.
        """
        # A single rank keeps everything. A rank may wait until a chunk arrives and another rank takes it.
        staged = version.staged
        request = staged.direct_load(record, parts=self._ranks > 1, patience=2 * self._timeout)
        self._enter(self.update.prepare(request.plan_id, len(staged.plan.buckets)))
        with self._opened(version.further) as group:

            def transfer() -> None:
                if isinstance(group, EngineStream):
                    self._stream(StreamedLoad(self._engine, group, version, request, self._timeout))
                else:
                    for _ in group.send_all(staged, version.own):
                        self._sent += 1
                        self._count_sent()

            def checksum() -> str:
                # In a direct load every rank of the engine compares the fingerprints of what it received.
                return version.checksum() if isinstance(group, EngineStream) else self._engine.checksum()

            return self._transact(request.plan_id, lambda: version.nbytes, transfer, checksum)

    def fetch(self, link: str, version: int, patience: float, calls: LinkCalls) -> None:
        """Let the engine receive a version over ``link`` while it generates; see ``receive``."""
        fetch = Fetch(link, str(version), patience)

        def poll() -> None:
            began = time.monotonic()
            while not self._engine.fetched(fetch):
                time.sleep(pause_after(time.monotonic() - began, _FETCH_POLL_SECONDS))

        with self.timed("fetch"):
            calls.run(link, poll)

    def receive(
        self, link: str, version: int, patience: float, calls: LinkCalls, fetched: bool = False
    ) -> str:
        """Let the engine receive a version over the link ``link``; return its checksum.

        ``patience``: seconds that a rank waits for a wave. ``calls``: runs the call to the engine, which
        pauses and resumes it too. ``fetched``: the engine has the version since ``fetch``, and only installs
        it.
        """
        self._enter(self.update.prepare(link, 1))
        self._sent = 0
        # Joining leaves memory behind, which the engine returns after the first version over the link.
        keep_buffers = link == self._settled_link and not self._shares_gpus
        load = partial(self._engine.receive_over, link, str(version), patience, keep_buffers)
        if fetched:
            load = partial(self._engine.install, link, str(version), keep_buffers)
        with self.timed("pause"):
            self._enter(self.update.transfer(link))
            report = calls.run(link, load)
            self._sent = 1
            self._count_sent()
        self._report(version, report)
        self._enter(self.update.commit())
        self._enter(self.update.committed(str(report.get("weightVersion") or self._engine.weight_version())))
        self._settled_link = link
        metrics.record_commit(self.seconds, int(report["received"]))
        return str(report["checksum"])

    def _transact(
        self,
        plan_id: str,
        nbytes: Callable[[], int],
        transfer: Callable[[], None],
        checksum: Callable[[], str],
    ) -> str:
        """Pause the engine, transfer, commit, resume; return the result of ``checksum``."""
        self._sent = 0
        with self.timed("pause"):
            with self.timed("stop"):
                self._engine.pause()
            with self.timed("send"):
                self._engine.begin_update()
                self._enter(self.update.transfer(plan_id))
                transfer()
                self._count_sent()
                self._enter(self.update.commit())
                self._engine.end_update()
            with self.timed("verify"):
                result = checksum()
                self._enter(self.update.committed(self._engine.weight_version()))
            with self.timed("resume"):
                self._engine.resume()
        metrics.record_commit(self.seconds, nbytes())
        return result

    def drop_group(self, clean_engine: bool = False) -> None:
        """Leave the process group with an engine that cannot load directly.

        ``clean_engine``: also close the update session and leave the group in the engine, if it answers. An
        open session would refuse the next update, and the group would leak.
        """
        group, self._group = self._group, None
        if group is not None:
            group.close()
        if not clean_engine or not self._engine.alive():
            return
        calls = [self._engine.end_update]
        if group is not None:
            name = group.name
            calls.append(lambda: self._engine.leave_group(name))
        for call in calls:
            try:
                call()
            except EngineError as error:
                log.info("cleaning up after an aborted update: %s", error)

    @contextmanager
    def _opened(self, further: FurtherParts) -> Iterator["EngineStream | LocalGroup"]:
        """Connect to the engine's ranks for one update; those of further hosts to the agents there.

        An engine that cannot load directly gets a process group instead, which stays open.
        """
        if self._group is not None:
            yield self._group
            return
        with self.timed("join"):
            # The ranks of each host reach the agent of their pod.
            stream = EngineStream(
                self._engine, further.name, self._ranks, self._timeout, LOOPBACK, further.ports
            )
        try:
            if stream.direct:
                yield stream
                return
        finally:
            stream.close()
        further.end()
        # It imports torch, which takes 300 MiB.
        from grpo_worker.weightsync.agent.local_group import LocalGroup

        name = f"{AGENT}{uuid.uuid4().hex[:12]}"
        with self.timed("join"):
            self._group = LocalGroup(self._engine, name, self._ranks, self._timeout, self._place.address)
        yield self._group

    def _stream(self, load: StreamedLoad) -> None:
        """Let the engine load a version from streams."""
        try:
            report = load.run(partial(self.timed, "record"))
        finally:
            self._sent = load.buckets
        self._report(self.update.version, report)

    def _report(self, version: int, answer: dict[str, Any]) -> None:
        """Keep and log the engine's report of a direct load."""
        self.seconds |= {f"engine_{part}": value for part, value in answer["seconds"].items()}
        names = ("copies", "byLoader", "recorded", "extraBytes", "received", "sent")
        self.load_report = {name: answer[name] for name in names if name in answer}
        log.info("version %d: %s", version, self.load_report)

    def _count_sent(self) -> None:
        """Add the buckets that the sending thread has sent to the update."""
        while self.update.phase == Phase.TRANSFER and self.update.sent < self._sent:
            self.update = self.update.bucket(self.update.sent)

    def _enter(self, update: Update) -> None:
        self.update = update
        metrics.record_phase(update)
