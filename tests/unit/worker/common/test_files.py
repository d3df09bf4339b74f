"""Small files that a crash of their server does not undo."""

import os
from pathlib import Path

import pytest

from grpo_worker.common.files import write_text
from grpo_worker.common.step_log import StepLog


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, frozenset[str]]]:
    """Collect the inode that each fsync waits for, and the names in the working folder at that time."""
    calls: list[tuple[int, frozenset[str]]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        calls.append((os.fstat(descriptor).st_ino, frozenset(os.listdir("."))))

    monkeypatch.setattr(os, "fsync", noted)
    return calls


def test_a_file_is_on_the_store_before_its_name_and_then_the_name(
    synced: list[tuple[int, frozenset[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.json"
    write_text(path, "{}")
    assert synced == [
        (path.stat().st_ino, frozenset({"run.tmp"})),
        (tmp_path.stat().st_ino, frozenset({"run.json"})),
    ]


def test_records_are_on_the_store_before_their_index_and_both_before_a_flush_returns(
    synced: list[tuple[int, frozenset[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ledger.jsonl"
    log = StepLog(path)
    assert synced == [(tmp_path.stat().st_ino, frozenset({"ledger.jsonl", "ledger.jsonl.index"}))]
    log.append(1, [{"sample": 0}])
    log.flush()
    index = path.with_name(f"{path.name}.index")
    assert [inode for inode, _ in synced[1:3]] == [path.stat().st_ino, index.stat().st_ino]
