"""Checkpoints, claims and logs in an object store. fsspec's store in memory stands in for S3's server."""

import errno
import json
from pathlib import Path

import pytest
from upath import UPath

from grpo_worker.checkpointing import attempts
from grpo_worker.checkpointing.object_files import ObjectFiles, upload
from grpo_worker.checkpointing.state_writes import write_file
from grpo_worker.checkpointing.store import (
    DamagedCheckpointError,
    Origin,
    commit,
    complete,
    complete_steps,
    directory,
    newest_sound,
    prune,
    remove_remains,
    verify,
)
from grpo_worker.common.step_log import StepLog
from grpo_worker.common.store_path import children, patiently
from grpo_worker.controller.recovery.run_record import RunRecord

MODEL = "tiny"


@pytest.fixture
def job(tmp_path: Path) -> UPath:
    return UPath(f"memory:/{tmp_path}/job")


def _save(job: UPath, step: int, attempt: int = 1) -> UPath:
    """Save a checkpoint of one file with two pieces."""
    root = job / "checkpoints"
    place = directory(root, step, attempt)
    written = upload(place / "__0_0.distcp", [lambda s: s.write(b"first"), lambda s: s.write(bytes(20))])
    assert written == [5, 20]
    (place / "controller.json").write_text(json.dumps({"step": step}))
    commit(root, step, Origin(MODEL, "", attempt))
    return place


def test_checkpoints_are_complete_with_their_marker_and_only_the_newest_stay(job: UPath) -> None:
    root = job / "checkpoints"
    assert complete(root) == {} and newest_sound(root, MODEL) is None
    for step in (1, 2, 3):
        place = _save(job, step)
        assert verify(place, MODEL, contents=True).attempt == 1
    (directory(root, 4, 1) / "__0_0.distcp").write_bytes(b"begun")
    prune(root, 2, 1)
    assert complete_steps(root) == [2, 3]
    assert children(root) == [directory(root, step, 1).name for step in (2, 3, 4)]
    remove_remains(root, 2)
    assert complete_steps(root) == [2, 3] and not (directory(root, 4, 1) / "__0_0.distcp").exists()


def test_a_damaged_checkpoint_gives_way_to_the_one_before(job: UPath) -> None:
    older, newer = _save(job, 1), _save(job, 2)
    (newer / "controller.json").write_text('{"step": 9}')
    assert newest_sound(job / "checkpoints", MODEL) == older
    assert complete_steps(job / "checkpoints") == [1] and (newer / "DAMAGED").exists()


def test_pieces_are_read_as_they_were_written(job: UPath) -> None:
    files = ObjectFiles(_save(job, 1))
    spans = [("__0_0.distcp", 0, 5), ("__0_0.distcp", 5, 20)]
    files.expect(spans)
    assert [files.read(*span) for span in spans] == [b"first", bytes(20)]
    assert files.read(*spans[0]) == b"first", "one that was not expected now"


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_0.distcp.sha256"])
def test_a_changed_bit_is_found_by_the_digests(job: UPath, name: str) -> None:
    place = _save(job, 1)
    content = bytearray((place / name).read_bytes())
    content[7] ^= 1
    (place / name).write_bytes(bytes(content))
    files = ObjectFiles(place)
    with pytest.raises(DamagedCheckpointError, match=rf"{name} was changed after the save"):
        files.read("__0_0.distcp", 5, 20)


def test_a_copy_of_files_has_the_digests_of_their_pieces(job: UPath, tmp_path: Path) -> None:
    place, disk = directory(job / "checkpoints", 1), tmp_path / "__0_0.distcp"
    write_file(disk, [lambda s: s.write(b"first"), lambda s: s.write(bytes(20))])
    for file in tmp_path.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    commit(job / "checkpoints", 1, Origin(MODEL, ""))
    assert ObjectFiles(place).read("__0_0.distcp", 0, 5) == b"first"
    (place / "__0_0.distcp").write_bytes(b"other" + bytes(20))
    with pytest.raises(DamagedCheckpointError, match="the xxh3 of its 5 bytes there is"):
        ObjectFiles(place).read("__0_0.distcp", 0, 5)


def test_an_object_without_digests_is_refused(job: UPath) -> None:
    place = directory(job / "checkpoints", 1)
    (place / "__0_0.distcp").write_bytes(b"first")
    commit(job / "checkpoints", 1, Origin(MODEL, ""))
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp has no digests beside it"):
        ObjectFiles(place).read("__0_0.distcp", 0, 5)


def test_a_missing_file_is_found(job: UPath) -> None:
    place = _save(job, 1)
    files = ObjectFiles(place)
    (place / "__0_0.distcp").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp is missing"):
        files.read("__0_0.distcp", 5, 20)
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp is missing or not 25 bytes long"):
        verify(place, MODEL)


def test_an_attempt_is_claimed_once(job: UPath) -> None:
    assert attempts.newest(job) == 0
    assert attempts.claim(job, 1, "a") and not attempts.claim(job, 1, "b")
    attempts.note_restored(job, 1, 0)
    assert attempts.claim(job, 2, "b") and not attempts.claim(job, 1, "c")
    assert attempts.newest(job) == 2 and attempts.restored(job) == (1, 0)
    with pytest.raises(attempts.SupersededError):
        commit(job / "checkpoints", 3, Origin(MODEL, "", 1))


def test_the_run_record_is_kept_in_an_object(job: UPath) -> None:
    first = RunRecord.load(job / "run.json")
    first.begin_controller()
    first.begin_attempt()
    second = RunRecord.load(job / "run.json")
    assert second.begin_controller(), "the one before has died"
    second.begin_attempt()
    with pytest.raises(attempts.SupersededError):
        first.save()


def _steps(job: UPath) -> list[int]:
    names = sorted(children(job / "log.jsonl"))
    lines = "".join((job / "log.jsonl" / name).read_text() for name in names).splitlines()
    return [json.loads(line)["step"] for line in lines]


def _log(disk: Path, job: UPath) -> StepLog:
    disk.mkdir(exist_ok=True)
    return StepLog(disk / "log.jsonl", pieces=job)


def test_a_log_goes_on_from_an_empty_disk(job: UPath, tmp_path: Path) -> None:
    log = _log(tmp_path / "first", job)
    for step in (1, 2, 3):
        log.append(step, [{}])
        if step != 2:
            log.flush()
    log.append(4, [{}])  # is lost with the disk
    assert _steps(job) == [1, 2, 3] and len(children(job / "log.jsonl")) == 2
    again = _log(tmp_path / "second", job)
    again.truncate(2)  # which is in the middle of a piece
    assert _steps(job) == [1, 2]
    again.append(3, [{"again": True}])
    again.flush()
    again.flush()
    assert _steps(job) == [1, 2, 3]


def test_a_log_whose_disk_is_still_there_loses_nothing(job: UPath, tmp_path: Path) -> None:
    log = _log(tmp_path / "disk", job)
    for step in (1, 2):
        log.append(step, [{}])
    log._queue.join()
    again = _log(tmp_path / "disk", job)  # the container was restarted
    again.truncate(2)
    again.append(3, [{}])
    again.flush()
    assert _steps(job) == [1, 2, 3]


def test_only_a_store_that_does_not_answer_is_asked_again() -> None:
    pauses: list[float] = []
    answers = [OSError(errno.EIO, "no"), OSError(errno.ETIMEDOUT, "no"), PermissionError(errno.EACCES, "no")]

    def ask() -> None:
        raise answers[len(pauses)]

    with pytest.raises(PermissionError):
        patiently(ask, "asking", pauses.append)
    assert pauses == [1.0, 2.0]
