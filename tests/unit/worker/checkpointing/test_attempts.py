"""Attempts of several controllers of one job: no two get the same number, and one of them goes on."""

import json
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from unittest.mock import patch

import pytest

from grpo_worker.checkpointing import attempts
from grpo_worker.checkpointing.attempts import ATTEMPTS, SupersededError
from grpo_worker.controller.recovery.run_record import RunRecord

ROUNDS = 60
SPAWN = multiprocessing.get_context("spawn")


def _claims(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / ATTEMPTS).iterdir())


def _controllers(file: Path, start: Barrier, answer: Connection) -> None:
    """Begin as a new controller in each round, and then an attempt of the same controller."""
    for _ in range(ROUNDS):
        own = list[int]()
        start.wait(60)
        record = RunRecord.load(file)
        start.wait(60)  # both have read the record, and claim at the same moment
        try:
            for _ in range(2):
                record.begin_attempt()
                own.append(record.attempt)
        except SupersededError:
            own.append(0)
        start.wait(60)
        try:
            record.check()
        except SupersededError:
            own.append(0)
        answer.send(own)


def test_two_controllers_that_begin_together_never_get_the_same_number(tmp_path: Path) -> None:
    file, start = tmp_path / "run.json", SPAWN.Barrier(2)
    pipes = [SPAWN.Pipe() for _ in range(2)]
    processes = [SPAWN.Process(target=_controllers, args=(file, start, there)) for _, there in pipes]
    for process in processes:
        process.start()
    contested, newest = 0, 0
    for _ in range(ROUNDS):
        assert all(here.poll(60) for here, _ in pipes)
        answers = [here.recv() for here, _ in pipes]
        numbers = [number for own in answers for number in own if number]
        assert len(set(numbers)) == len(numbers), f"two controllers with the same number: {answers}"
        assert all(number > newest for number in numbers), "a number was used again"
        newest = max(numbers)
        left = [own for own in answers if 0 not in own]
        assert len(left) == 1, f"exactly one goes on: {answers}"
        contested += sum(0 in own for own in answers)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert contested == ROUNDS and RunRecord.load(file).attempt == newest
    assert len(_claims(tmp_path)) == 1 and sorted(os.listdir(tmp_path)) == [ATTEMPTS, "run.json"]


def _die_between_claim_and_save(file: Path) -> None:
    record = RunRecord.load(file)
    with patch.object(RunRecord, "save", lambda _: os.kill(os.getpid(), signal.SIGKILL)):
        record.begin_attempt()


def test_a_death_between_the_claim_and_the_record_costs_one_number(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    old = RunRecord.load(file)
    old.begin_attempt()
    process = SPAWN.Process(target=_die_between_claim_and_save, args=(file,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert json.loads(file.read_text())["attempt"] == 1 and attempts.newest(tmp_path) == 2
    with pytest.raises(SupersededError, match="attempt 2 has begun"):
        old.check()
    record = RunRecord.load(file)
    record.begin_controller()
    record.begin_attempt()
    assert (record.attempt, json.loads(file.read_text())["attempt"]) == (3, 3)


def test_a_controller_that_runs_is_superseded_and_not_the_one_that_starts(tmp_path: Path) -> None:
    old, new = RunRecord.load(tmp_path / "run.json"), RunRecord.load(tmp_path / "run.json")
    old.begin_attempt()
    old.begin_attempt()
    new.begin_attempt()  # it had read the record before
    assert new.attempt == 3
    with pytest.raises(SupersededError, match="attempt 3 has begun in another controller; this one is"):
        old.begin_attempt()
    new.begin_attempt()
    assert new.attempt == 4


def test_a_record_that_an_older_controller_overwrote_hides_no_attempt(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    old, new = RunRecord.load(file), RunRecord.load(file)
    old.begin_attempt()
    text = file.read_text()
    new.begin_attempt()
    file.write_text(text)  # its write was on the way to the store when the other one began
    with pytest.raises(SupersededError):
        old.check()
    new.check()
    new.begin_attempt()
    assert new.attempt == 3


def test_a_claim_whose_answer_was_lost_belongs_to_who_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RunRecord.load(tmp_path / "run.json")
    record.begin_attempt()
    rename = Path.rename

    def lost(path: Path, target: Path) -> Path:
        rename(path, target)
        raise OSError(110, "Connection timed out")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", lost)
        with pytest.raises(OSError, match="timed out"):
            record.begin_attempt()
    record.begin_attempt()
    assert record.attempt == 3, "nobody else has begun"


def test_writers_that_check_while_their_controller_begins_an_attempt_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RunRecord.load(tmp_path / "run.json")
    record.begin_attempt()
    claim, numbers = attempts.claim, list[int]()

    def claim_and_check(folder: Path, attempt: int, owner: str) -> bool:
        claimed = claim(folder, attempt, owner)
        record.check_claims()  # as the thread of a log does, at any moment
        numbers.append(record.attempt)
        return claimed

    with monkeypatch.context() as patched:
        patched.setattr(attempts, "claim", claim_and_check)
        record.begin_attempt()
    assert numbers == [1] and record.attempt == 2, "the check came after the claim and before the count"
    RunRecord.load(tmp_path / "run.json").begin_attempt()
    with pytest.raises(SupersededError, match="attempt 3 has begun in another controller"):
        record.check_claims()


def test_a_forgotten_number_is_not_used_again(tmp_path: Path) -> None:
    record = RunRecord.load(tmp_path / "run.json")
    for _ in range(4):
        record.begin_attempt()
    assert _claims(tmp_path) == ["00000004"]
    assert not attempts.claim(tmp_path, 2, "another")
    assert attempts.newest(tmp_path) == 4
    record.note_restored(7)
    for _ in range(2):
        record.begin_attempt()
    assert _claims(tmp_path) == ["00000004", "00000006"], "it is known from where attempt 4 started"
    assert attempts.restored(tmp_path) == (4, 7)
    record.note_restored(9)
    record.begin_attempt()
    assert attempts.restored(tmp_path) == (6, 9) and _claims(tmp_path) == ["00000006", "00000007"]


def test_a_job_of_an_earlier_version_goes_on_with_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"attempt": 7}')
    record = RunRecord.load(tmp_path / "run.json")
    record.begin_attempt()
    assert record.attempt == 8


def test_a_draft_that_an_older_attempt_removes_is_written_again(tmp_path: Path) -> None:
    record = RunRecord.load(tmp_path / "run.json")
    record.begin_attempt()
    rename, removed = Path.rename, list[Path]()

    def remove_first(draft: Path, target: Path) -> Path:
        if draft.suffix == ".tmp" and not removed:
            removed.append(draft)
            draft.unlink()
        return rename(draft, target)

    with patch.object(Path, "rename", remove_first):
        record.count_restart("infrastructure")
    assert removed and RunRecord.load(tmp_path / "run.json").infrastructure_restarts == 1


def test_a_store_that_is_gone_is_an_error(tmp_path: Path) -> None:
    record = RunRecord.load(tmp_path / "run.json")
    record.begin_attempt()
    with (
        patch.object(Path, "rename", side_effect=FileNotFoundError("gone")),
        pytest.raises(FileNotFoundError),
    ):
        record.save()
