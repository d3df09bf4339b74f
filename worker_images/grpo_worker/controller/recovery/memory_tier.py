"""Checkpoints in the training pods' memory: who holds which rank's snapshot, and how to get back.

A rank's snapshot lies in its own pod and in the next one, so the loss of one pod loses none. What is
lost all the same is replayed from the store's newest checkpoint.
"""

import json
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from grpo_worker.checkpointing.snapshots import name_of
from grpo_worker.common.auth import headers
from grpo_worker.common.files import write_text
from grpo_worker.controller.training.gang import Restored, TrainerGang

log = logging.getLogger(__name__)


class MemoryTier:
    """Takes a snapshot each ``every`` steps and keeps the record of the newest whole one in ``file``."""

    def __init__(self, trainers: TrainerGang, every: int, replicas: int, file: Path, timeout: float) -> None:
        self._trainers = trainers
        self._every = every
        self._replicas = replicas
        self._file = file
        self._http = httpx.Client(timeout=timeout)
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="snapshots")
        self._taken: dict[str, Any] | None = None  # record of what is on its way to the pods' memory
        self._copying: Future[None] | None = None

    def due(self, step: int) -> bool:
        """Shall a snapshot be taken after ``step``? Not while the one before is under way."""
        return step % self._every == 0 and self._taken is None

    def take(self, step: int, attempt: int, state: dict[str, Any]) -> None:
        """Copy the ranks' state; it is whole some steps later. ``state``: the controller's."""
        name = name_of(step, attempt)
        self._trainers.call("take_snapshot", name)
        self._taken = {"name": name, "step": step, "state": state}

    def poll(self) -> None:
        """Go on with the snapshot that is under way."""
        if self._copying is not None and self._copying.done():
            problem = self._copying.exception()
            if problem is not None:
                log.warning("no snapshot of this step: %r", problem)
            self._copying = self._taken = None
        if self._taken is None or self._copying is not None:
            return
        if all(self._trainers.call("snapshot_written", self._taken["name"])):
            sources = self._trainers.sources()
            self._copying = self._threads.submit(self._replicate, self._taken, sources)

    def begin_attempt(self) -> None:
        """What was under way is of no use to a new gang."""
        if self._copying is not None:
            self._copying.exception()
        self._taken = self._copying = None

    def restore(self, after: int) -> Restored | None:
        """Bring the gang to the newest snapshot, if there is a whole one newer than step ``after``."""
        record = self._read()
        if record is None or record["step"] <= after:
            return None
        name = record["name"]
        holders = {int(rank): urls for rank, urls in record["holders"].items()}
        wanted = {rank: [url] for rank, url in self._trainers.sources().items()}
        if holders.keys() != wanted.keys() or not self._pull_all(name, wanted, holders):
            log.warning("snapshot %s is no longer whole", name)
            return None
        self._file.unlink()  # should loading fail, the next attempt takes the store's checkpoint
        self._trainers.call("load_snapshot", name)
        self._write(record)
        return Restored(record["step"], record["state"], "memory")

    def _replicate(self, taken: dict[str, Any], sources: dict[int, str]) -> None:
        holders = {rank: [url] for rank, url in sources.items()}
        for distance in range(1, self._replicas + 1):
            further = next_pods(sources, distance)
            if self._pull_all(taken["name"], further, {rank: [url] for rank, url in sources.items()}):
                for rank, urls in further.items():
                    holders[rank] += urls
        self._write(taken | {"holders": holders})

    def _pull_all(self, name: str, to: dict[int, list[str]], holders: dict[int, list[str]]) -> bool:
        def pull(rank: int, url: str) -> bool:
            body = {"name": name, "rank": rank, "holders": holders[rank]}
            try:
                return self._http.post(f"{url}/v1/snapshots", json=body, headers=headers()).status_code == 200
            except httpx.HTTPError as error:
                log.warning("snapshot of rank %d to %s: %r", rank, url, error)
                return False

        calls = [self._threads.submit(pull, rank, url) for rank, urls in to.items() for url in urls]
        answers = [call.result() for call in calls]  # wait for every one
        return all(answers)

    def _read(self) -> dict[str, Any] | None:
        return json.loads(self._file.read_text()) if self._file.is_file() else None

    def _write(self, record: dict[str, Any]) -> None:
        write_text(self._file, json.dumps(record))


def next_pods(sources: dict[int, str], distance: int) -> dict[int, list[str]]:
    """Rank -> the pod ``distance`` further than its own; none where that is its own again."""
    pods = sorted(set(sources.values()))
    if distance % len(pods) == 0:
        return {rank: [] for rank in sources}
    return {rank: [pods[(pods.index(url) + distance) % len(pods)]] for rank, url in sources.items()}
