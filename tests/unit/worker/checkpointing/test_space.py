"""What a store has room for, by its own account, and what may be removed for the next checkpoint."""

from pathlib import Path

import pytest

from grpo_worker.checkpointing.best import Best, keep_best
from grpo_worker.checkpointing.space import Space, checkpoint_bytes, make_room, space_of
from grpo_worker.checkpointing.store import (
    WEIGHTS,
    Origin,
    commit,
    complete_steps,
    directory,
    prune,
)

STATE, COPY = 1000, 70


def _save(root: Path, step: int) -> None:
    path = directory(root, step)
    (path / WEIGHTS).mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"s" * STATE)
    (path / WEIGHTS / "rank-0.bin").write_bytes(b"w" * COPY)
    commit(root, step, Origin("", ""))
    prune(root, 3)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        _save(tmp_path, step)
    return tmp_path


@pytest.mark.parametrize(
    ("space", "missing"),
    [
        (Space(10_000, 1020), 0),
        (Space(10_000, 1019), 1),
        (Space(10_000, 0), 1020),
        (Space(0, 0), 0),
        (Space(10_000, -1), 0),
        (Space(10_000, 2**63), 0),
        (Space(2**63, 2**62), 0),
        (Space(2000, 0, kept=2001), 0),
        (Space(2001, 0, kept=2001), 1020),
    ],
    ids=["just", "almost", "full", "no size", "negative", "more than all", "endless", "impossible", "small"],
)
def test_space_that_is_missing_is_counted_unless_the_store_does_not_know_it(
    space: Space, missing: int
) -> None:
    assert space.missing(1000) == missing


def test_only_the_newest_checkpoint_has_a_copy_of_the_weights(root: Path) -> None:
    assert checkpoint_bytes(directory(root, 3)) == STATE + COPY
    assert checkpoint_bytes(directory(root, 2)) == STATE
    assert space_of(root).kept == 3 * STATE + COPY
    assert space_of(root).missing(STATE) == 0, "of a real file system"


@pytest.mark.parametrize(
    ("keep", "missing", "left"),
    [(3, STATE, [2, 3]), (3, STATE + 1, [1, 2, 3]), (2, STATE, [3]), (1, 1, [3]), (4, 1, [1, 2, 3])],
    ids=["enough", "too few bytes", "two", "the only one stays", "not yet full"],
)
def test_the_oldest_make_room_if_the_next_one_removes_them_anyway(
    root: Path, keep: int, missing: int, left: list[int]
) -> None:
    assert make_room(root, keep, 0, missing) is (len(left) < 3)
    assert complete_steps(root) == left


def test_the_best_checkpoint_stays_beside_the_newest_and_makes_no_room(root: Path) -> None:
    keep_best(root, Best(1, "gcd"))
    assert not make_room(root, 2, 0, STATE + 1) and complete_steps(root) == [1, 2, 3]
    assert make_room(root, 2, 0, STATE) and complete_steps(root) == [1, 3]
    _save(root, 4)
    prune(root, 1)
    assert complete_steps(root) == [1, 4]
    keep_best(root, None)
    prune(root, 1)
    assert complete_steps(root) == [4]
