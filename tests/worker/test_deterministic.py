"""spec.trainer.deterministic on CPUs, where every step adds in a fixed order anyway."""

import pytest
import torch

from support.ranks.launcher import run as run_on_ranks


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(1, {}), (4, {"tensor": 2, "expert": 2, "expert_tensor": 1})],
    ids=["one", "tp2-ep2"],
)
def test_the_choice_changes_no_bit_on_cpus(ranks: int, layout: dict[str, int]) -> None:
    """No operation of a step, forward or backward, is refused for want of a deterministic form."""
    plain, chosen = (
        run_on_ranks(
            "overlap_cases:updates",
            ranks,
            layout=layout,
            overlap=False,
            shard=2000,
            deterministic=deterministic,
        )
        for deterministic in (False, True)
    )
    for expected, found in zip(plain, chosen, strict=True):
        assert found["history"] == expected["history"]
        assert found["weights"].keys() == expected["weights"].keys()
        assert all(torch.equal(found["weights"][name], value) for name, value in expected["weights"].items())
