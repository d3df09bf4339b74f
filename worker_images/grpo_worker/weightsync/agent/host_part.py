"""Host part: a further host's agent streams to the ranks of its pod what they keep of one version.

The first host's agent leads the update: it asks for the state all the time, and lets the part go on. A part
that it has stopped to ask about ends by itself, so that the engine's ranks do not wait in vain.
"""

import logging
import threading
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

from grpo_worker.weightsync.agent.engine_client import EngineError
from grpo_worker.weightsync.agent.http_reader import FetchError
from grpo_worker.weightsync.agent.part_messages import PartPhase, PartRequest, PartState
from grpo_worker.weightsync.agent.part_source import PartSource
from grpo_worker.weightsync.agent.rank_parts import RankParts
from grpo_worker.weightsync.agent.rank_streams import RankStreams
from grpo_worker.weightsync.agent.staged_version import VersionStream
from grpo_worker.weightsync.planner.rank_parts import Table, union_of_tables

log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5


class PartError(RuntimeError):
    """The part is not in the phase that the call needs, or there is no part of this name."""


class HostPart:
    """One part. Thread-safe.

    ``source``: opens the version. ``timeout``: seconds for each chunk, and without a sign of the agent that
    leads. ``before``: the part before this one, whose memory must be free first.
    """

    def __init__(
        self, request: PartRequest, source: PartSource, timeout: float, before: "HostPart | None" = None
    ) -> None:
        self.name = request.name
        self._request, self._source, self._timeout, self._before = request, source, timeout, before
        self._lock = threading.Lock()
        self._state = PartState()
        self._heard = time.monotonic()
        self._closed, self._released = threading.Event(), threading.Event()
        self._kept: Table | None = None
        self._counted: Table | None = None
        self._streams: RankStreams | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def state(self) -> PartState:
        """Return the state, for the agent that leads."""
        self._heard = time.monotonic()
        return replace(self._state, received=self._source.received)

    def kept(self) -> Table:
        """Return the regions that the ranks keep, each once. Raises PartError before they have told it."""
        self._heard = time.monotonic()
        if self._kept is None:
            raise PartError(f"the ranks have not told yet what they keep: {self._state.phase}")
        return self._kept

    def release(self, counted: Table) -> None:
        """Let the part be streamed. ``counted``: regions of earlier hosts, which count them."""
        self._heard = time.monotonic()
        self._counted = counted
        self._released.set()

    def close(self) -> None:
        """End the streams; ranks that wait for bytes give up at once."""
        self._closed.set()
        self._released.set()
        if self._streams is not None:
            self._streams.abort()

    def join(self) -> None:
        """Wait until the memory is free."""
        self._thread.join()

    def _run(self) -> None:
        if self._before is not None:
            self._before.join()
            self._before = None
        try:
            self._load()
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine's update fails on all hosts
            log.warning("version %d: %r", self._request.version, error)
            self._enter(PartPhase.FAILED, problem=str(error) or repr(error))

    def _load(self) -> None:
        request = self._request
        staged = self._source.open(request, self._closed.is_set)
        with VersionStream(staged, self._timeout) as stream:
            stream.wait_for_first()
            self._check()
            with closing(
                RankStreams(request.name, range(request.first, request.end), self._timeout)
            ) as ranks:
                self._streams = ranks
                self._enter(PartPhase.READY, port=ranks.port)
                if missing := ranks.accept(self._given_up):
                    raise EngineError(f"{missing} ranks of this host have not connected")
                tables = ranks.receive_kept(self._given_up)
                self._kept = union_of_tables(tables)
                self._enter(PartPhase.KEPT)
                self._wait(self._released)
                self._enter(PartPhase.STREAM)
                stream.restrict(tables, self._counted)
                parts = RankParts(staged.plan, tables)
                for ready in stream:
                    self._check()
                    ranks.send_parts(parts.of_chunk(ready.chunk, ready.data), self._given_up)
                counted = {"nbytes": stream.nbytes, "total": stream.total}
                self._enter(PartPhase.DONE, sent=tuple(parts.sent), **counted)
                self._wait(self._closed)  # the ranks still read

    def _enter(self, phase: PartPhase, **more: Any) -> None:
        with self._lock:
            self._state = replace(self._state, phase=phase, **more)

    def _given_up(self) -> bool:
        return self._closed.is_set() or time.monotonic() - self._heard > self._timeout

    def _check(self) -> None:
        """Raise FetchError if the update has ended, or the agent that leads it has gone."""
        if self._closed.is_set():
            raise FetchError("the update has ended")
        if self._given_up():
            raise FetchError(f"the first host's agent has not asked for {self._timeout:.0f} s")

    def _wait(self, event: threading.Event) -> None:
        """Wait for an event while the agent that leads asks. Raises FetchError if it stops to ask."""
        while not event.wait(_LOOK_SECONDS):
            self._check()
