"""Snapshots of a rank: which ones stay in the pod, and whose error is reported."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_worker.checkpointing.snapshot_seal import Snapshot
from grpo_worker.checkpointing.snapshots import check, file_of, seal
from grpo_worker.checkpointing.state_tree import StateError
from grpo_worker.megatron.checkpoint import snapshot
from grpo_worker.roles import checkpoints
from grpo_worker.roles.checkpoints import CheckpointMethods
from grpo_worker.roles.dispatch import RankInfo


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointMethods:
    """Rank 3, whose state is one number."""
    monkeypatch.setattr(checkpoints, "SNAPSHOTS", tmp_path)
    monkeypatch.setattr(snapshot, "capture", lambda parts: {"parts": parts})
    result = CheckpointMethods()
    result.rank_info = RankInfo(rank=3, tp_rank=0, pp_rank=0, cp_rank=0, dp_rank=3, pp_size=1, dp_size=4)
    result._models = SimpleNamespace(parts=[7])  # type: ignore[assignment]
    return result


def _written(rank: CheckpointMethods, name: str) -> Any:
    deadline = time.monotonic() + 30
    while not (answer := rank.snapshot_written(name)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return answer


def test_the_complete_snapshot_and_the_new_one_stay(rank: CheckpointMethods, tmp_path: Path) -> None:
    for name, kept in (("1.1", None), ("2.1", "1.1"), ("3.1", "1.1"), ("2.2", "3.1")):
        rank.take_snapshot(name, kept)
        assert _written(rank, name) is True
        seal(tmp_path, Snapshot("job", name, 3))
        check(tmp_path, Snapshot("job", name, 3))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["2.2", "3.1"]


def test_an_error_is_that_of_the_snapshot_which_failed(
    rank: CheckpointMethods, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_of(tmp_path, "1.1", 3).mkdir(parents=True)  # where a file must be written
    rank.take_snapshot("1.1", None)
    assert "rank 3 cannot write" in _written(rank, "1.1")
    rank.take_snapshot("2.1", None)
    assert _written(rank, "2.1") is True


def test_what_a_rank_loads_is_what_it_took_and_no_pickle(
    rank: CheckpointMethods, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(snapshot, "restore", lambda _, state: loaded.append(state))
    rank.take_snapshot("1.1", None)
    assert _written(rank, "1.1") is True
    rank.load_snapshot("1.1")
    assert loaded == [{"parts": [7]}]
    torch.save({"parts": [8]}, file_of(tmp_path, "1.1", 3))
    with pytest.raises(StateError, match=r"1.1/rank-3.safetensors is a pickle"):
        rank.load_snapshot("1.1")
    assert len(loaded) == 1
