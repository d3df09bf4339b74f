"""Ranks on a store that is full: the error names it, with the system's number, on all ranks."""

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo_worker.checkpointing.space import checkpoint_bytes, estimated_bytes
from grpo_worker.checkpointing.store import Origin, commit, complete_steps, directory
from grpo_worker.controller.recovery.store_room import StoreRoom
from support.ranks.launcher import run as run_on_ranks
from support.small_store import small_store

TP2_EP2 = {"tensor": 2, "expert": 2, "expert_tensor": 1}
MIB = 2**20


@pytest.mark.fault(
    row="21",
    point="a real file system without room",
    witness="ENOSPC on all ranks",
    bound="at the save",
    partial="detection only",
)
def test_a_checkpoint_that_does_not_fit_fails_on_all_ranks_with_the_systems_number(tmp_path: Path) -> None:
    with small_store(tmp_path / "store", 16) as store:
        found = run_on_ranks("policy_cases:save_on_a_full_store", 2, root=str(store), layout=TP2_EP2)
    for message, number in found:
        assert message.startswith("checkpoint.store: rank ") and str(store) in message
        assert number == errno.ENOSPC, message


def test_the_ranks_estimate_of_the_first_checkpoint_is_what_it_takes(tmp_path: Path) -> None:
    count, other = run_on_ranks("policy_cases:saved_parameters", 2, root=str(tmp_path), layout=TP2_EP2)
    assert count == other
    estimate = estimated_bytes(count, 4, critic=False, reference=False, copy=False)
    heads = checkpoint_bytes(directory(tmp_path, 1)) - estimate  # of some hundred archives, one a tensor
    assert estimate == 16 * count and 0 <= heads < MIB


def test_room_is_measured_on_a_real_file_system(tmp_path: Path) -> None:
    with small_store(tmp_path / "store", 16) as store, ThreadPoolExecutor(1) as thread:
        room = StoreRoom(store, 2, "checkpoint.store.pvc=runs", thread.submit)
        room.estimate = 20 * MIB
        assert "has 0.0156 GiB free of the 0.0195 GiB" in room.measured()
        room.estimate = 15 * MIB
        assert room.measured() == ""
        for step in (1, 2):
            directory(store, step).mkdir()
            (directory(store, step) / "0.distcp").write_bytes(bytes(4 * MIB))
            commit(store, step, Origin("", ""))
        assert room.measured() == "", "4 MiB are needed now, and 8 MiB are free"
        filler = store / "of-others"
        filler.write_bytes(bytes(6 * MIB))
        assert room.measured() == "" and complete_steps(store) == [2], "the oldest made room"
        filler.write_bytes(bytes(10 * MIB))
        assert "checkpoint.store.pvc=runs has" in room.measured() and complete_steps(store) == [2]
        filler.unlink()
        assert room.measured() == ""
