"""The comparison of gradients notices what a maximum would pass over."""

import pytest
import torch

from support.ranks.compare import largest_gap


def test_the_largest_gap_is_relative_to_the_largest_entry_of_its_tensor() -> None:
    expected = {"a": torch.tensor([1.0, 10.0]), "b": torch.tensor([100.0])}
    actual = {"a": torch.tensor([1.0, 11.0]), "b": torch.tensor([101.0])}
    gap, name = largest_gap(actual, expected)
    assert name == "a" and gap == pytest.approx(0.1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["actual", "expected"])
def test_an_entry_that_is_not_finite_fails_wherever_it_stands(bad: float, place: str) -> None:
    sides = {
        side: {name: torch.ones(2) for name in ("first", "middle", "z-last")}
        for side in ("actual", "expected")
    }
    sides[place]["middle"][1] = bad
    with pytest.raises(AssertionError, match=f"middle: 1 of 2 {place} entries are not finite"):
        largest_gap(sides["actual"], sides["expected"])


def test_other_tensors_fail() -> None:
    with pytest.raises(AssertionError, match="lost"):
        largest_gap({}, {"lost": torch.ones(1)})
