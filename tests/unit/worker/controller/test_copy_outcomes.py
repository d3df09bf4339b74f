"""Copies in the pods' memory that fail are counted until one is complete in all of its pods."""

from concurrent.futures import Future
from pathlib import Path

import pytest

from grpo_operator.api.messages import MemoryCopies
from grpo_worker.controller.recovery.copy_outcomes import CopyOutcomes
from grpo_worker.controller.recovery.memory_tier import MemoryTier
from support.snapshot_pods import Gang, Pod, complete_snapshot, on_the_store, open_tier, until


def _counts(tier: MemoryTier) -> tuple[int | None, int]:
    return tier.outcomes.report.step, tier.outcomes.report.failures


def test_every_change_is_published() -> None:
    seen: list[MemoryCopies] = []
    outcomes = CopyOutcomes(seen.append)
    outcomes.found(None)
    outcomes.failed("no memory")
    outcomes.complete(5, "a pod is missing")
    outcomes.complete(6)
    assert [(one.step, one.failures, one.problem) for one in seen] == [
        (None, 0, ""), (None, 1, "no memory"), (5, 2, "a pod is missing"), (6, 0, ""),
    ]  # fmt: skip


def test_copies_that_ranks_cannot_make_are_counted_until_one_is_complete(
    tier: MemoryTier, gang: Gang
) -> None:
    complete_snapshot(tier, gang, 3)
    assert _counts(tier) == (3, 0)
    gang.broken = {3}
    for step in (4, 5):
        complete_snapshot(tier, gang, step)
    assert _counts(tier) == (3, 2)
    assert tier.outcomes.report.problem == "snapshot 5.1 failed on 1 ranks: rank 3 has no memory"
    gang.broken = set()
    complete_snapshot(tier, gang, 6)
    assert _counts(tier) == (6, 0) and tier.outcomes.report.problem == ""


def test_a_copy_that_is_missing_in_the_next_pod_counts_but_is_a_failure(
    tier: MemoryTier, gang: Gang, pods: list[Pod]
) -> None:
    for step in (3, 4):
        (pods[1].snapshots / f"{step}.1" / "rank-0.pulled").mkdir(parents=True)  # takes the place of the file
        complete_snapshot(tier, gang, step)
    assert _counts(tier) == (4, 2) and pods[1].kept_of(0) == []
    assert tier.outcomes.report.problem == "snapshot 4.1 is missing in pods that should hold a copy"
    complete_snapshot(tier, gang, 5)
    assert _counts(tier) == (5, 0) and pods[1].kept_of(0) == ["5.1"]


def test_records_that_do_not_reach_the_store_fail_a_copy(tier: MemoryTier) -> None:
    records: Future[None] = Future()
    records.set_exception(OSError("No space left on device"))
    tier.snapshot(3, 1, {"step": 3}, records)

    def settled() -> bool:
        tier.poll()
        return tier.due(4)

    until(settled)
    assert _counts(tier) == (None, 1) and "No space left on device" in tier.outcomes.report.problem


def test_checkpoints_that_overtake_a_copy_are_counted(tier: MemoryTier, gang: Gang) -> None:
    """However long a copy takes: it is of no use any more when the store has a later step."""
    records: Future[None] = Future()
    tier.snapshot(9, 1, {"step": 9}, records)
    tier.note_stored(8)
    assert _counts(tier) == (None, 0), "the copy will be newer"
    tier.note_stored(10)
    tier.note_stored(20)
    assert _counts(tier) == (None, 2) and "checkpoint of step 20" in tier.outcomes.report.problem
    records.set_result(None)

    def settled() -> bool:
        tier.poll()
        return tier.due(21)

    until(settled)
    assert _counts(tier) == (9, 0)
    tier.note_stored(30)
    assert _counts(tier) == (9, 0), "no copy is under way"


def test_a_new_attempt_begins_with_the_copy_that_it_finds(
    tier: MemoryTier, gang: Gang, pods: list[Pod], tmp_path: Path
) -> None:
    complete_snapshot(tier, gang, 3)
    successor = open_tier(gang, tmp_path)
    assert successor.restore(after=2) is not None and _counts(successor) == (3, 0)
    tier.snapshot(4, 1, {"step": 4}, on_the_store())
    tier.begin_attempt()
    tier.note_stored(10)
    assert _counts(tier) == (3, 0), "the copy of an attempt that has ended is not awaited"


def test_a_copy_that_cannot_be_loaded_is_a_failure_and_none_is_known(
    tier: MemoryTier, gang: Gang, pods: list[Pod], tmp_path: Path
) -> None:
    complete_snapshot(tier, gang, 3)
    for pod in pods:
        pod.wipe()
    assert tier.restore(after=2) is None
    assert _counts(tier) == (None, 1) and tier.outcomes.report.problem == "snapshot 3.1 is no longer complete"


@pytest.mark.parametrize("after", [0, 3])
def test_without_a_record_no_copy_is_known(tier: MemoryTier, after: int) -> None:
    assert tier.restore(after) is None and _counts(tier) == (None, 0)
