"""Two versions of Megatron-Core: equal gradients, and checkpoints of one that the other resumes.

``make test-megatron-next`` runs this with the later version and names the Python that has the one of uv.lock.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from support.ranks.compare import largest_gap
from support.ranks.launcher import run as run_on_ranks
from support.ranks.launcher import run_with

OTHER = os.environ.get("GRPO_LOCKED_PYTHON", "")
pytestmark = pytest.mark.skipif(not OTHER, reason="make test-megatron-next sets GRPO_LOCKED_PYTHON")

LAYOUTS: dict[str, dict[str, int]] = {
    "tp2-ep2": {"tensor": 2, "expert": 2},
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
}
# The versions may add the same products in another order: equal within the rounding of fp32.
ROUNDING = 1e-5


def test_the_versions_differ() -> None:
    (mine,) = run_on_ranks("version_cases:version", 1)
    (other,) = run_with(OTHER, "version_cases:version", 1, {})
    assert mine != other


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_equal_with_both_versions(name: str) -> None:
    arguments: dict[str, Any] = {"layout": LAYOUTS[name]}
    mine = run_on_ranks("mtp_cases:gradients", 2, **arguments)
    other = run_with(OTHER, "mtp_cases:gradients", 2, arguments)
    for found, expected in zip(mine, other, strict=True):
        assert found.keys() == expected.keys(), "the same Hugging Face names"
        assert largest_gap(found, expected) < (ROUNDING,)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("later_saves", [True, False], ids=["later-to-locked", "locked-to-later"])
def test_a_checkpoint_of_one_version_resumes_with_the_other(
    name: str, later_saves: bool, tmp_path: Path
) -> None:
    saving, resuming = (sys.executable, OTHER) if later_saves else (OTHER, sys.executable)
    arguments: dict[str, Any] = {"root": str(tmp_path), "layout": LAYOUTS[name]}
    expected = run_with(saving, "mtp_cases:save", 2, arguments)
    for rank, history in zip(run_with(resuming, "mtp_cases:resume", 2, arguments), expected, strict=True):
        for mine, reference in zip(rank, history, strict=True):
            for metric, value in reference.items():
                assert mine[metric] == pytest.approx(value, rel=ROUNDING, abs=1e-6), metric
