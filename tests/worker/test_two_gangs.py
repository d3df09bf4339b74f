"""Trainer ranks of two attempts save the same step: the restored state is that of the newer one."""

import json
from pathlib import Path

import pytest

from support.ranks.launcher import run as run_on_ranks


@pytest.mark.fault(
    row="18",
    point="ranks of an old attempt save the same step",
    witness="the older one's commit is refused",
    bound="at the commit",
    compared="state of the newer attempt and its restored steps, bitwise",
    partial="ranks only",
)
@pytest.mark.parametrize(
    "layout", [{"tensor": 2, "expert": 2}, {"pipeline": 2, "layers_in_first_stage": 1}], ids=str
)
def test_a_gang_that_goes_on_writing_changes_no_bit_of_what_the_next_one_saves(
    layout: dict[str, int], tmp_path: Path
) -> None:
    found = run_on_ranks("fence_cases:save_beside_an_old_gang", 2, folder=str(tmp_path), layout=layout)
    for rank in found:
        assert rank["equal"] and rank["resumed"] == rank["undisturbed"]
        assert json.loads(rank["state"]) == {"attempt": 2}
    assert found[0]["refused"] == "attempt 2 has begun in another controller; this one is attempt 1"
    names = [path.parent.name for path in (tmp_path / "checkpoints").glob("*/COMMITTED")]
    assert names == ["step-00000002.attempt-2"]
