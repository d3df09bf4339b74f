"""Checkpoints in the memory of the training pods.

Each rank's snapshot is kept in its own pod and in the next ones, so the loss of one pod loses no snapshot. If
one is lost nevertheless, the job resumes from the newest checkpoint in the store.
"""

import json
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import httpx

from grpo_worker.checkpointing import attempts
from grpo_worker.checkpointing.snapshots import attempt_of, name_of
from grpo_worker.common import tls
from grpo_worker.common.auth import headers, is_signed, signature
from grpo_worker.common.errors import LONGEST
from grpo_worker.common.files import write_text
from grpo_worker.common.patient_http import patient_transport
from grpo_worker.common.store_path import StorePath, has_file, remove_file
from grpo_worker.controller.recovery.copy_outcomes import CopyOutcomes
from grpo_worker.controller.training.gang import Restored, TrainerGang

log = logging.getLogger(__name__)
_CONNECT_SECONDS = 30.0
_PURPOSE = b"grpo memory.json"


class MemoryTier:
    """Takes a snapshot every ``every`` steps and records the newest complete one in ``file``.

    ``replicas``: number of other pods that keep a copy. ``file``: in the job's folder of the store; the name
    of that folder is part of every seal.
    """

    def __init__(
        self, trainers: TrainerGang, every: int, replicas: int, file: StorePath,
        outcomes: CopyOutcomes | None = None,
    ) -> None:  # fmt: skip
        self._trainers = trainers
        self._every = every
        self._replicas = replicas
        self._file, self._job = file, file.parent.name
        # A copy may take as long as it needs: the agent that copies ends it when no byte arrives.
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        self._http = httpx.Client(transport=patient_transport(tls.own()), timeout=timeout)
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="snapshots")
        self._taken: dict[str, Any] | None = None  # record of the snapshot in progress
        self._records: Future[None] = Future()  # that the snapshot in progress needs
        self._complete: str | None = None  # name of the newest complete one
        self._kept: str | None = None  # the complete one that stays meanwhile
        self._copying: Future[str] | None = None  # of what the copies lack, or ""
        self.outcomes = outcomes or CopyOutcomes()

    def due(self, step: int) -> bool:
        """Return whether to take a snapshot after ``step``: not while the previous one is in progress."""
        return step % self._every == 0 and self._taken is None

    def snapshot(self, step: int, attempt: int, state: dict[str, Any], records: "Future[None]") -> None:
        """Start to copy the ranks' state, which takes some steps. ``state``: the controller's state.

        ``records``: done when the records of the steps up to this one are on the store; the snapshot counts
        after that.
        """
        self._records = records
        name = name_of(step, attempt)
        self._kept = self._complete
        self._trainers.call("take_snapshot", name, self._kept)
        self._taken = {"name": name, "step": step, "state": state}

    def poll(self) -> None:
        """Continue the snapshot in progress."""
        if self._taken is not None and self._copying is not None and self._copying.done():
            problem = self._copying.exception()
            if problem is not None:
                log.warning("the snapshot failed: %r", problem)
                self.outcomes.failed(f"snapshot {self._taken['name']} failed: {problem!r}")
            else:
                self.outcomes.complete(self._taken["step"], self._copying.result())
            self._copying = self._taken = None
        if self._taken is None or self._copying is not None:
            return
        written = self._trainers.call("snapshot_written", self._taken["name"])
        errors = [answer for answer in written if isinstance(answer, str)]
        if errors:
            text = f"snapshot {self._taken['name']} failed on {len(errors)} ranks: {errors[0]}"
            log.warning("%s", text)
            self.outcomes.failed(text)
            self._taken = None  # the next step takes another one
        elif all(written):
            sources = self._trainers.sources()
            self._copying = self._threads.submit(self._replicate, self._taken, sources, self._records)

    def note_stored(self, step: int) -> None:
        """Note that the store has a complete checkpoint of ``step``."""
        if self._taken is not None and self._taken["step"] < step:
            self.outcomes.overtaken(self._taken["step"], step)

    def begin_attempt(self) -> None:
        """Discard the snapshot in progress: the gang that took it has ended."""
        self._taken = self._copying = None

    def restore(self, after: int) -> Restored | None:
        """Load the newest snapshot if it is complete and newer than step ``after``, else return None."""
        record = self._read()
        self._complete = record["name"] if record else None
        self.outcomes.found(record["step"] if record else None)
        if record is None or record["step"] <= after:
            return None
        name = record["name"]
        if not attempts.counts(self._file.parent, record["step"], attempt_of(name)):
            return None
        self._kept = name
        holders = {int(rank): urls for rank, urls in record["holders"].items()}
        targets = {rank: [url] for rank, url in self._trainers.sources().items()}
        if holders.keys() != targets.keys() or not self._pull_all(name, targets, holders):
            log.warning("snapshot %s is no longer complete", name)
            self.outcomes.lost(f"snapshot {name} is no longer complete")
            return None
        remove_file(self._file)  # if loading fails, the next attempt uses the checkpoint in the store
        self._trainers.call("load_snapshot", name)
        self._write(record)
        return Restored(record["step"], record["state"], "memory", attempt_of(name))

    def _replicate(self, taken: dict[str, Any], sources: dict[int, str], records: "Future[None]") -> str:
        """Bring a snapshot to the next pods and record it; return what it lacks there, or ""."""
        lacks = ""
        holders = {rank: [url] for rank, url in sources.items()}
        if not self._ask_all("/v1/snapshots/seals", taken["name"], holders):
            raise RuntimeError(f"snapshot {taken['name']} is not sealed")
        for distance in range(1, self._replicas + 1):
            further = next_pods(sources, distance)
            if self._pull_all(taken["name"], further, {rank: [url] for rank, url in sources.items()}):
                for rank, urls in further.items():
                    holders[rank] += urls
            else:
                lacks = f"snapshot {taken['name']} is missing in pods that should hold a copy"
        records.result()
        if taken is self._taken:  # else a new attempt has begun
            self._write(taken | {"holders": holders})
        return lacks

    def _pull_all(self, name: str, to: dict[int, list[str]], holders: dict[int, list[str]]) -> bool:
        bodies = {rank: {"holders": urls, "kept": self._kept} for rank, urls in holders.items()}
        return self._ask_all("/v1/snapshots", name, to, bodies)

    def _ask_all(
        self, route: str, name: str, to: dict[int, list[str]], bodies: dict[int, dict[str, Any]] | None = None
    ) -> bool:
        """Ask for each rank the agents at ``to``; return whether all did what they were asked."""

        def ask(rank: int, url: str) -> bool:
            body = {"job": self._job, "name": name, "rank": rank} | (bodies or {}).get(rank, {})
            try:
                answer = self._http.post(url + route, json=body, headers=headers())
            except httpx.HTTPError as error:
                log.warning("snapshot of rank %d to %s: %r", rank, url, error)
                return False
            if answer.status_code != HTTPStatus.OK:
                log.warning("snapshot of rank %d to %s: %s", rank, url, answer.text[:LONGEST])
            return answer.status_code == HTTPStatus.OK

        calls = [self._threads.submit(ask, rank, url) for rank, urls in to.items() for url in urls]
        answers = [call.result() for call in calls]  # all of them must have ended
        return all(answers)

    def _read(self) -> dict[str, Any] | None:
        """Return the record; None if there is none, or whoever wrote it has not the job's key.

        Others may write to the store too, and agents show the key to the holders that a record names.
        """
        if not has_file(self._file):
            return None
        record: dict[str, Any] = json.loads(self._file.read_text())
        seal = str(record.pop("seal", ""))
        if is_signed(_PURPOSE, [self._job, record], seal):
            return record
        log.warning("%s is not used: its seal is of another key or job", self._file)
        return None

    def _write(self, record: dict[str, Any]) -> None:
        content = json.loads(json.dumps(record))  # with the keys that a reader finds
        seal = signature(_PURPOSE, [self._job, content])
        write_text(self._file, json.dumps(content | {"seal": seal}))
        self._complete = record["name"]


def next_pods(sources: dict[int, str], distance: int) -> dict[int, list[str]]:
    """Return for each rank the pod ``distance`` pods after its own; none where that is its own pod again."""
    pods = sorted(set(sources.values()))
    if distance % len(pods) == 0:
        return {rank: [] for rank in sources}
    return {rank: [pods[(pods.index(url) + distance) % len(pods)]] for rank, url in sources.items()}
