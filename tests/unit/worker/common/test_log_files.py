"""Log files of a job: who writes which, and which of them are removed."""

import logging
import re
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import pytest

from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.common.log_files import (
    AGENTS,
    ATTEMPTS,
    CONTROLLERS,
    keep_agent_lines,
    keep_controller_lines,
    keep_rank_lines,
    log_folder,
    outdated,
)
from grpo_worker.common.log_lines import LABELS, LogLabels
from grpo_worker.common.stored_log import StoredLog
from support.faults import until


@pytest.fixture(autouse=True)
def root() -> Iterator[logging.Logger]:
    """Return the root logger. The process has no labels; after the test, its handlers and labels are back."""
    found, labels = logging.getLogger(), asdict(LABELS)
    for name, value in asdict(LogLabels()).items():
        setattr(LABELS, name, value)
    yield found
    for name, value in labels.items():
        setattr(LABELS, name, value)
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


@pytest.mark.parametrize("kind", ["engine", "trainer-agent"])
def test_each_agent_has_a_file_of_its_start_and_pod(kind: str, root: logging.Logger, tmp_path: Path) -> None:
    LABELS.role, LABELS.version = f"{kind}s agent", 3
    stored = keep_agent_lines(tmp_path / "logs", kind, "tiny-moe-a.b-0")
    root.warning("message")
    assert stored in root.handlers
    _flush(root)
    (file,) = (tmp_path / "logs").iterdir()
    assert re.fullmatch(rf"{kind}\.\d{{8}}T\d{{6}}Z\.tiny-moe-a\.b-0\.log", file.name)
    labels = "engine=tiny-moe-a.b-0 version=3" if kind == "engine" else "version=3"
    assert f" WARNING {kind}s agent {labels}: message\n" in file.read_text()


def test_a_job_in_an_object_store_keeps_no_files(root: logging.Logger, tmp_path: Path) -> None:
    folder = log_folder(StoreSpec(uri="s3://bucket/jobs"), tmp_path)
    before = list(root.handlers)
    keep_controller_lines(folder)
    keep_rank_lines(folder, 3, 2)
    assert keep_agent_lines(folder, "engine", "pod") is None
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


@pytest.mark.parametrize("kind", ["engine", "trainer-agent"])
def test_files_of_the_oldest_starts_of_agents_are_outdated_however_long_their_names(kind: str) -> None:
    first = [f"{kind}.20261119T100000Z.pod-{name}.log{end}" for name in ("a", "longer") for end in ("", ".1")]
    later = [f"{kind}.2026112{n // 360}T1{n // 60 % 6}{n % 60:02d}00Z.pod.log" for n in range(AGENTS - 1)]
    assert len(set(later)) == AGENTS - 1
    found = outdated([*later, *first, "engine.log"])
    assert found == [f"{kind}.20261119T100000Z.pod-a.log{end}" for end in ("", ".1")]


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
