"""Streamed load: a staged version on its way to all ranks of an engine, for one request to the engine.

This agent streams to the ranks of its own host, and those of the further hosts each to their own. The engine
loads the version on all ranks or refuses it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from grpo_worker.common.weight_checksum import checksum, conflict
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.engine_stream import EngineStream
from grpo_worker.weightsync.agent.further_parts import FurtherParts
from grpo_worker.weightsync.agent.http_reader import FetchError
from grpo_worker.weightsync.agent.part_messages import PartPhase
from grpo_worker.weightsync.agent.rank_parts import RankParts
from grpo_worker.weightsync.agent.staged_version import StagedVersion, VersionStream
from grpo_worker.weightsync.protocol.direct_load import DirectLoad

_UNBOUNDED = 7 * 86400.0  # seconds of a call whose progress is watched
Timer = Callable[[], AbstractContextManager[None]]
_LOOK_SECONDS = 0.5  # between two looks at the further hosts


class StreamedVersion:
    """A staged version, of which the agents of all hosts of an engine have the first chunk.

    ``own``: chunks for the ranks of this host. ``further``: parts of the other hosts.
    """

    def __init__(self, staged: StagedVersion, own: VersionStream, further: FurtherParts) -> None:
        self.staged, self.own, self.further = staged, own, further

    @classmethod
    @contextmanager
    def opened(
        cls, staged: StagedVersion, further: FurtherParts, timeout: float, pulling: Timer
    ) -> Iterator["StreamedVersion"]:
        """Fetch the first chunks; the block begins when all are there. Raises FetchError.

        ``timeout``: seconds in which a chunk must be complete. ``pulling``: context of this.
        """
        with further, VersionStream(staged, timeout) as own:
            with pulling():
                own.wait_for_first()
                further.wait_for(PartPhase.READY)
            yield cls(staged, own, further)

    @property
    def nbytes(self) -> int:
        """Bytes of the version that the engine keeps, each counted once, when all have been sent."""
        return self.own.nbytes + sum(state.nbytes for state in self.further.states)

    @property
    def received(self) -> int:
        """Bytes that the agents of the further hosts have read over the network."""
        return sum(state.received for state in self.further.states)

    def checksum(self) -> str:
        """Return the checksum of all bytes that the engine keeps. Raises FetchError if it is not the peer's.

        A direct transfer of the same bytes gives the same one.
        """
        found = checksum(self.nbytes, self.own.total + sum(state.total for state in self.further.states))
        wanted = self.staged.checksum
        if wanted and conflict((found, wanted)):
            raise FetchError(f"the peer's weights have the checksum {wanted}, but {found} was read")
        return found


class StreamedLoad:
    """Load of ``version`` into ``engine`` by the request ``load``. ``group``: this host's ranks.

    ``timeout``: seconds in which the engine must answer after the last byte. ``buckets``: sent so far by
    this agent.
    """

    def __init__(
        self, engine: Engine, group: EngineStream, version: StreamedVersion, load: DirectLoad, timeout: float
    ) -> None:
        self._engine, self._group, self._version = engine, group, version
        self._load, self._timeout = load, timeout
        self._answer: Future[dict[str, Any]] = Future()
        self.buckets = 0

    def run(self, recording: Timer) -> dict[str, Any]:
        """Send all buckets for one request; the engine writes one while it receives the next.

        ``recording``: context in which the ranks tell what they keep. Returns the engine's report, with the
        bytes of each rank's part as ``sent``. Raises EngineError, or FetchError.
        """
        staged = self._version.staged
        thread = ThreadPoolExecutor(1)
        # The request lasts as long as there are bytes to send: progress is watched here.
        arguments = self._group.name, staged.plan.tensors, str(staged.version), self._load, _UNBOUNDED
        self._answer = thread.submit(self._engine.receive_all, *arguments)
        thread.shutdown(wait=False)
        try:
            sent = self._send(recording)
            report = self._report()
            self._version.further.wait_for(PartPhase.DONE)
        except TimeoutError as error:
            self._end()
            limit = f"{self._timeout:.0f} s"
            raise EngineError(f"ReadTimeout: no answer for {limit} after the last bucket") from error
        except FetchError:
            self._end()
            raise
        except EngineError as error:
            # A further host's error, and the engine's own, say more than that of a connection.
            texts = [*self._end(), str(error)]
            raise EngineError("; ".join(dict.fromkeys(texts))) from error
        return report | {"sent": sent + [n for state in self._version.further.states for n in state.sent]}

    def _send(self, recording: Timer) -> list[int]:
        """Send all buckets to the ranks of this host; return the bytes of the part of each."""
        tables, stream, further = [], self._version.own, self._version.further
        if self._load.parts:
            with recording():
                tables = self._group.receive_kept(self._given_up)
                further.release(tables, self._given_up)
            stream.restrict(tables)
        ranks = RankParts(self._version.staged.plan, tables)
        for ready in stream:
            further.check()
            if self._load.parts:
                self._group.send_parts(ranks.of_chunk(ready.chunk, ready.data), self._given_up)
            else:
                self._group.send(ready.data, ready.fingerprint, self._given_up)
            self.buckets += ready.chunk.last
        return ranks.sent

    def _given_up(self) -> bool:
        return self._answer.done() or bool(self._version.further.problem())

    def _report(self) -> dict[str, Any]:
        """Wait for the engine's report: while further hosts send, and then for the timeout.

        Raises TimeoutError, or FetchError if a further host cannot go on.
        """
        further = self._version.further
        while not further.reached(PartPhase.DONE):
            try:
                return self._answer.result(_LOOK_SECONDS)
            except TimeoutError:
                further.check()
        return self._answer.result(self._timeout)

    def _end(self) -> list[str]:
        """Close all streams, and wait until the engine has given up the request; return what went wrong."""
        self._group.close()
        texts = [self._version.further.last_problem()]
        self._version.further.end()
        try:
            texts.append(str(self._answer.exception(self._timeout) or ""))
        except TimeoutError:
            self._engine.on_silent()
        return [text for text in texts if text]
