"""Ranks on a store that is full: the error names it, with the system's number, on all ranks."""

import errno
from pathlib import Path

from support.ranks.launcher import run as run_on_ranks
from support.small_store import small_store

TP2_EP2 = {"tensor": 2, "expert": 2, "expert_tensor": 1}


def test_a_checkpoint_that_does_not_fit_fails_on_all_ranks_with_the_systems_number(tmp_path: Path) -> None:
    with small_store(tmp_path / "store", 16) as store:
        found = run_on_ranks("policy_cases:save_on_a_full_store", 2, root=str(store), layout=TP2_EP2)
    for message, number in found:
        assert message.startswith("checkpoint.store: rank ") and str(store) in message
        assert number == errno.ENOSPC, message
