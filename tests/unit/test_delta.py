"""Deltas: what they lead to is the new blob to the byte, and what does not belong is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_worker.weightsync.delta import DeltaError, apply, encode


def pair(size: int, changed: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    old = generator.integers(0, 256, size, dtype=np.uint8)
    new = old.copy()
    where = generator.random(size) < changed
    new[where] = generator.integers(0, 256, int(where.sum()), dtype=np.uint8)
    return old, new


@settings(deadline=None, max_examples=60)
@given(size=st.integers(0, 400_000), changed=st.sampled_from([0.0, 0.02, 0.2]), seed=st.integers(0, 99))
def test_a_delta_leads_to_the_new_blob(size: int, changed: float, seed: int) -> None:
    old, new = pair(size, changed, seed)
    delta = encode(old, new, "old", "new", most=9)
    assert delta is not None
    head = apply(old, delta, "old")
    assert np.array_equal(old, new) and head.digest == "new"
    assert len(delta) < 300 + size // 32 + 4 * head.words


def test_too_many_changes_are_no_delta() -> None:
    old, new = pair(100_000, 0.6, 1)
    assert encode(old, new, "a", "b") is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d[:-1], "bytes, expected"),
        (lambda d: b"XXXX" + d[4:], "no delta"),
        (lambda d: d[:3], "no delta"),
        (lambda d: d.replace(b'"words": ', b'"wordz": '), "no delta"),
    ],
)
def test_a_damaged_delta_is_refused_before_it_writes(damage: object, message: str) -> None:
    old, new = pair(70_000, 0.01, 2)
    before = old.copy()
    delta = encode(old, new, "a", "b")
    with pytest.raises(DeltaError, match=message):
        apply(old, damage(delta), "a")  # type: ignore[operator]
    assert np.array_equal(old, before)


def test_a_delta_of_another_base_is_refused() -> None:
    old, new = pair(1000, 0.01, 3)
    delta = encode(old, new, "a", "b")
    assert delta is not None
    with pytest.raises(DeltaError, match=r"a delta of a .* not of c"):
        apply(old, delta, "c")
    with pytest.raises(DeltaError, match="have no delta"):
        encode(old, new[:-1], "a", "b")
