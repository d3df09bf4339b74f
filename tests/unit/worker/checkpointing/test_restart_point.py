"""Restart point: the store tells which version the trainers would publish if they started now."""

import json
from pathlib import Path

import pytest

from grpo_worker.checkpointing.restart_point import CHECKPOINTS, LEDGER, MEMORY, RUN, restart_point
from grpo_worker.checkpointing.store import WEIGHTS, Origin, commit, complete, directory, prune, verify
from grpo_worker.common.step_log import StepLog, first_record_of_last_step
from grpo_worker.controller.recovery.run_record import RunRecord


class Job:
    """A job's folder, written as by its controller and its ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = RunRecord(folder / RUN)
        self._ledger = StepLog(folder / LEDGER)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self._ledger.append(
                step, [{"attempt": self.record.attempt, "uid": f"{step}/{n}"} for n in (0, 1)]
            )
        self._ledger.flush()

    def save(self, step: int, keep: int = 2) -> None:
        path = self.checkpoint(step)
        (path / WEIGHTS).mkdir(parents=True)
        (path / WEIGHTS / "rank-0.bin").write_bytes(b"w")
        (path / "__0_0.distcp").write_bytes(b"state")
        commit(self.folder / CHECKPOINTS, step, self.origin)
        prune(self.folder / CHECKPOINTS, keep, self.record.attempt)

    def checkpoint(self, step: int) -> Path:
        return directory(self.folder / CHECKPOINTS, step, self.record.attempt)

    @property
    def origin(self) -> Origin:
        return Origin("model", "TP1", self.record.attempt)

    def restart(self, step: int) -> None:
        """Start again from a checkpoint."""
        self.record.begin_attempt()
        self.record.note_restored(step)
        self._ledger.truncate(step)

    @property
    def found(self) -> tuple[int, int] | None:
        """Attempt and version of the restart point."""
        point = restart_point(self.folder)
        if point is None:
            return None
        assert point.weights == complete(self.folder / CHECKPOINTS)[point.version] / WEIGHTS
        return point.attempt, point.version


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path)
    job.record.begin_attempt()
    return job


def test_a_job_without_a_checkpoint_has_none(job: Job) -> None:
    job.steps(1, 2)
    assert job.found is None


def test_the_checkpoint_is_no_restart_point_once_a_later_step_is_finished(job: Job) -> None:
    job.steps(1, 4)
    job.save(4)
    assert job.found == (1, 4)
    job.steps(5, 5)
    assert job.found is None, "the trainers have version 5"


def test_a_new_attempt_starts_from_the_checkpoint_although_later_steps_were_finished(job: Job) -> None:
    job.steps(1, 4)
    job.save(4)
    job.steps(5, 6)
    job.record.begin_attempt()  # the ledger still has the steps that are lost
    assert job.found == (2, 4)
    job.restart(4)
    assert job.found == (3, 4)
    job.steps(5, 5)
    assert job.found is None


def test_a_newer_copy_in_the_pods_memory_may_be_what_the_trainers_start_from(job: Job) -> None:
    job.steps(1, 6)
    job.save(4)
    job.record.begin_attempt()
    (job.folder / MEMORY).write_text(json.dumps({"name": "6.1", "step": 6, "holders": {}}))
    assert job.found is None
    (job.folder / MEMORY).write_text(json.dumps({"name": "4.1", "step": 4, "holders": {}}))
    assert job.found == (2, 4)


def test_an_incomplete_checkpoint_does_not_count(job: Job) -> None:
    job.steps(1, 4)
    job.save(2)
    job.checkpoint(4).mkdir()
    job.record.begin_attempt()
    assert job.found == (2, 2)


def test_only_the_newest_checkpoint_keeps_its_weights_and_all_remain_whole(job: Job) -> None:
    for step in (2, 4, 6):
        job.save(step)
    root = job.folder / CHECKPOINTS
    assert sorted(root.iterdir()) == [job.checkpoint(4), job.checkpoint(6)]
    assert [file.parent.parent for file in root.glob(f"*/{WEIGHTS}/*")] == [job.checkpoint(6)]
    for step in (4, 6):
        assert verify(job.checkpoint(step), "model") == job.origin


def test_a_checkpoint_that_lost_its_weights_is_whole_for_the_trainers(job: Job) -> None:
    job.save(2)
    (job.checkpoint(2) / WEIGHTS / "rank-0.bin").unlink()
    assert verify(job.checkpoint(2), "model") == job.origin


def test_the_last_step_of_a_log_is_read_without_the_others(tmp_path: Path) -> None:
    assert first_record_of_last_step(tmp_path / "log") is None
    log = StepLog(tmp_path / "log")
    assert first_record_of_last_step(tmp_path / "log") is None
    for step in (1, 2):
        log.append(step, [{"n": 10 * step + n} for n in range(3)])
    log.flush()
    assert first_record_of_last_step(tmp_path / "log") == {"step": 2, "n": 20}
    log.append(3, [])
    log.flush()
    assert first_record_of_last_step(tmp_path / "log") is None, "nobody knows whose step it was"
