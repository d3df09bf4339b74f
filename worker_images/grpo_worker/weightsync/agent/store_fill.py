"""Fill from the checkpoint store: presents the version of a checkpoint as a staged version."""

import logging
from concurrent.futures import Future, wait
from pathlib import Path

from grpo_worker.checkpointing.restart_point import RestartPoint, restart_point
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.file_reader import FileReader, reading_threads
from grpo_worker.weightsync.agent.refills import WaitingCalls
from grpo_worker.weightsync.agent.staged_version import StagedVersion
from grpo_worker.weightsync.agent.stored_source import open_stored
from grpo_worker.weightsync.protocol.stored_version import manifests_in

log = logging.getLogger(__name__)
_LOOK_SECONDS = 3.0  # in which the store must answer


class StoreFill:
    """Versions in ``folder``, that of the job ``writer`` in its store; None: the store cannot be read.

    ``timeout``: seconds of each read. ``calls``: of the job; those that wait for the engine end a reading,
    unless they only ask for the version that is being read.
    """

    def __init__(
        self, folder: Path | None, writer: str | None, fetcher: Fetcher, bucket_bytes: int, timeout: float,
        calls: WaitingCalls,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._writer = writer
        self._fetcher = fetcher
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._calls = calls
        self._threads = reading_threads()
        self._look: Future[RestartPoint | None] | None = None  # one without a timely answer
        self._damaged: RestartPoint | None = None

    def find(self, writer: str | None) -> RestartPoint | None:
        """Return the version that the trainers of the job ``writer`` would publish if they started now.

        None if the store does not have it, or does not answer soon.
        """
        if self._folder is None or writer != self._writer or self._calls.other_than(None):
            return None
        found = self._newest(self._folder)
        return found if found != self._damaged else None

    def set_aside(self, point: RestartPoint) -> None:
        """Do not return this version again: it is damaged, and reading it again would not help."""
        self._damaged = point

    def open(self, point: RestartPoint) -> StagedVersion:
        """Return the version, whose chunks can be streamed. Raises FetchError, or PlanError."""
        version = point.version
        reader = FileReader(self._threads, self._timeout, lambda: self._calls.other_than(version))
        return open_stored(point.weights, version, reader, self._fetcher, self._bucket_bytes)

    def _newest(self, folder: Path) -> RestartPoint | None:
        """Look into the store in a thread: it may hang, and the agent must not."""
        if self._look is not None and not self._look.done():
            return None
        look = self._look = self._threads.submit(_look_into, folder)
        if not wait([look], _LOOK_SECONDS).done:
            return None
        self._look = None
        try:
            return look.result()
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the checkpoint store cannot be read: %s: %r", folder, error)
            return None


def _look_into(folder: Path) -> RestartPoint | None:
    """Return the restart point if its weights are there."""
    point = restart_point(folder)
    return point if point is not None and manifests_in(point.weights) else None
