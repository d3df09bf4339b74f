"""Checkpoints of real ranks that change after the save: what is read is named, and the one before is used."""

from pathlib import Path
from typing import Any

import pytest

from support.ranks.launcher import run as run_on_ranks

TP2_EP2 = {"tensor": 2, "expert": 2, "expert_tensor": 1}


def _loaded(root: Path, damage: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_on_ranks(
        "damage_cases:load_around", 2, root=str(root), layout=TP2_EP2, damage=damage
    )
    return found


@pytest.mark.fault(
    row="22",
    point="a byte of a tensor in the newest checkpoint changes, or it becomes that of the step before",
    witness="all ranks name file, bytes and both digests",
    bound="at the load",
    compared="weights of the checkpoint before, bitwise",
)
@pytest.mark.parametrize("damage", ["flipped", "older"])
def test_what_ranks_do_not_read_as_it_was_written_makes_them_take_the_checkpoint_before(
    damage: str, tmp_path: Path
) -> None:
    for rank in _loaded(tmp_path, damage):
        assert (rank["steps"], rank["restored"]) == ([1], [1])
        (message,) = rank["messages"]
        assert "step-00000002" in message and ".distcp was changed after the save, between bytes" in message
        found, _, saved = message.partition("the xxh3 of its ")[2].partition(", and ")
        digests = found.split()[-1], saved.split()[0]
        assert [len(digest) for digest in digests] == [32, 32] and digests[0] != digests[1], message


def test_a_truncated_file_makes_the_controller_take_the_checkpoint_before(tmp_path: Path) -> None:
    for rank in _loaded(tmp_path, "truncated"):
        assert rank == {"messages": [], "steps": [1], "restored": [1]}


def test_checkpoints_of_earlier_versions_are_loaded_and_checked_as_before(tmp_path: Path) -> None:
    for rank in _loaded(tmp_path / "sound", "old-format"):
        assert rank == {"messages": [], "steps": [1, 2], "restored": [2]}
    for rank in _loaded(tmp_path / "changed", "old-format-flipped"):
        assert (rank["steps"], rank["restored"]) == ([1], [1])
        (message,) = rank["messages"]
        assert ".distcp was changed after the save" in message and "xxh3" not in message
