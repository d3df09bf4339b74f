"""Log files of a job: who writes which, and which of them are removed."""

import logging
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.common.log_files import (
    ATTEMPTS,
    CONTROLLERS,
    keep_controller_lines,
    keep_rank_lines,
    log_folder,
    outdated,
)
from grpo_worker.common.log_lines import LABELS
from grpo_worker.common.stored_log import StoredLog
from support.faults import until


@pytest.fixture(autouse=True)
def root() -> Iterator[logging.Logger]:
    """Return the root logger, which has the same handlers and labels after the test."""
    found, labels = logging.getLogger(), (LABELS.role, LABELS.rank, LABELS.attempt, LABELS.step)
    yield found
    LABELS.role, LABELS.rank, LABELS.attempt, LABELS.step = labels
    for handler in [each for each in found.handlers if isinstance(each, StoredLog)]:
        found.removeHandler(handler)
        handler.close()


def _flush(root: logging.Logger) -> None:
    for handler in root.handlers:
        if isinstance(handler, StoredLog):
            handler.flush()


def test_a_rank_writes_labelled_lines_to_the_file_of_its_attempt(
    root: logging.Logger, tmp_path: Path
) -> None:
    LABELS.role = "trainer"
    keep_rank_lines(log_folder(StoreSpec(pvc="checkpoints"), tmp_path), 3, 2)
    LABELS.step = 17
    root.warning("message")
    _flush(root)
    (file,) = (tmp_path / "logs").iterdir()
    assert file.name == "trainer-3.attempt-2.log"
    assert re.search(r",\d{3} WARNING trainer rank=3 attempt=2 step=17: message\n$", file.read_text())


def test_each_controller_has_a_file_of_its_start(root: logging.Logger, tmp_path: Path) -> None:
    keep_controller_lines(log_folder(StoreSpec(path="/data"), tmp_path))
    root.warning("message")
    _flush(root)
    (file,) = (tmp_path / "logs").iterdir()
    assert re.fullmatch(r"controller\.\d{8}T\d{6}Z\.log", file.name) and "message" in file.read_text()


def test_a_job_in_an_object_store_keeps_no_files(root: logging.Logger, tmp_path: Path) -> None:
    folder = log_folder(StoreSpec(uri="s3://bucket/jobs"), tmp_path)
    before = list(root.handlers)
    keep_controller_lines(folder)
    keep_rank_lines(folder, 3, 2)
    assert folder is None and root.handlers == before
    assert (LABELS.rank, LABELS.attempt) == (3, 2), "its lines have labels all the same"


def test_files_of_old_attempts_and_controllers_are_outdated() -> None:
    ranks = {
        n: [f"trainer-{r}.attempt-{n}.log{e}" for r in (0, 10) for e in ("", ".1")] for n in (1, 7, 9, 10, 12)
    }
    starts = [f"controller.20261128T1000{second:02d}Z.log" for second in range(CONTROLLERS + 2)]
    others = ["notes.txt", "trainer-0.attempt-0.log.gz", "controller.log"]
    found = outdated([*starts, *others, *chain.from_iterable(ranks.values())])
    assert len(ranks) == ATTEMPTS + 1 and set(found) == {*ranks[1], *starts[:2]}
    assert outdated([*ranks[12], *starts[:1]]) == []


def test_the_first_rank_of_an_attempt_removes_the_files_of_old_ones(
    root: logging.Logger, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    for attempt in range(1, 7):
        (tmp_path / "logs" / f"trainer-1.attempt-{attempt}.log").touch()
    keep_rank_lines(tmp_path / "logs", 1, 7)
    root.warning("message")
    _flush(root)
    assert len(list((tmp_path / "logs").iterdir())) == 7
    keep_rank_lines(tmp_path / "logs", 0, 7)
    until("they are removed", lambda: len(list((tmp_path / "logs").iterdir())) == ATTEMPTS, 10)
