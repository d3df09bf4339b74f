"""Snapshots in pods' memory: replicas, losses, damage, and which attempt they are of."""

import time
from concurrent.futures import Future
from pathlib import Path

import httpx
import pytest

from grpo_worker.checkpointing.snapshot_seal import Snapshot, SnapshotError
from grpo_worker.checkpointing.snapshot_transfer import pull
from grpo_worker.controller.recovery.memory_tier import MemoryTier, next_pods
from support.snapshot_pods import RANKS, Gang, Pod, complete_snapshot, on_the_store, open_tier, until


def test_a_new_controller_brings_the_gang_back(tier: MemoryTier, gang: Gang, tmp_path: Path) -> None:
    complete_snapshot(tier, gang, 3)
    expected, gang.state = gang.state, [0] * RANKS
    restored = open_tier(gang, tmp_path).restore(after=2)
    assert restored is not None and (restored.step, restored.source) == (3, "memory")
    assert restored.controller_state == {"step": 3} and gang.state == expected


def test_a_lost_pod_gets_its_ranks_from_the_other(tier: MemoryTier, gang: Gang, pods: list[Pod]) -> None:
    complete_snapshot(tier, gang, 3)
    expected, gang.state = gang.state, [0] * RANKS
    pods[0].wipe()
    assert tier.restore(after=2) is not None
    assert gang.state == expected


def test_ranks_that_change_places_find_their_snapshots(tier: MemoryTier, gang: Gang, pods: list[Pod]) -> None:
    complete_snapshot(tier, gang, 3)
    expected, gang.state = gang.state, [0] * RANKS
    gang.pods = pods[::-1]
    assert tier.restore(after=2) is not None
    assert gang.state == expected


def test_nothing_is_restored_when_both_copies_are_gone_or_the_store_is_newer(
    tier: MemoryTier, gang: Gang, pods: list[Pod]
) -> None:
    complete_snapshot(tier, gang, 3)
    assert tier.restore(after=3) is None
    for pod in pods:
        pod.wipe()
    assert tier.restore(after=2) is None


def test_attempts_at_one_step_do_not_mix(tier: MemoryTier, gang: Gang, pods: list[Pod]) -> None:
    complete_snapshot(tier, gang, 3, attempt=1)
    expected = gang.state
    gang.state = [7] * RANKS
    tier.snapshot(3, 2, {"step": 3}, on_the_store())  # the controller dies before the replicas are there
    tier.begin_attempt()
    pods[1].wipe()
    assert tier.restore(after=2) is not None
    assert gang.state == expected


@pytest.mark.parametrize("problem", [None, OSError("No space left on device")], ids=["slow", "full"])
def test_a_snapshot_counts_once_its_records_are_on_the_store(
    tier: MemoryTier, gang: Gang, tmp_path: Path, problem: OSError | None
) -> None:
    records: Future[None] = Future()
    tier.snapshot(3, 1, {"step": 3}, records)
    for _ in range(20):
        tier.poll()
        time.sleep(0.01)
    assert not (tmp_path / "memory.json").exists() and not tier.due(4)
    if problem is None:
        records.set_result(None)
    else:
        records.set_exception(problem)

    def settled() -> bool:
        tier.poll()
        return tier.due(4)

    until(settled)
    assert (tmp_path / "memory.json").exists() == (problem is None)


def test_a_pod_never_holds_more_than_two_of_a_rank(tier: MemoryTier, gang: Gang, pods: list[Pod]) -> None:
    """The plan of the pods' memory counts on that."""
    for step in range(1, 6):
        complete_snapshot(tier, gang, step)
    assert gang.most == 2
    assert [pod.kept_of(0) for pod in pods] == [["4.1", "5.1"], ["4.1", "5.1"]]


def test_what_failed_is_removed_and_the_complete_one_stays(
    tier: MemoryTier, gang: Gang, pods: list[Pod]
) -> None:
    complete_snapshot(tier, gang, 3)
    expected = gang.state
    gang.broken = {3}
    for step in (4, 5, 6):
        complete_snapshot(tier, gang, step)
    assert gang.most == 2 and pods[1].kept_of(3) == ["3.1", "6.1"]
    gang.state = [0] * RANKS
    assert tier.restore(after=2) is not None and gang.state == expected


def test_a_late_request_of_an_earlier_attempt_removes_nothing_newer(gang: Gang, pods: list[Pod]) -> None:
    for name in ("5.1", "6.1", "4.2"):
        gang.call("take_snapshot", name, "5.1")
    body = {"job": "a", "name": "6.1", "rank": 0, "holders": [pods[0].url], "kept": "5.1"}
    httpx.post(f"{pods[1].url}/v1/snapshots", json=body)
    assert [pod.kept_of(2) for pod in pods] == [[], ["4.2", "5.1"]]


def test_a_pod_gives_nothing_but_snapshots(pods: list[Pod], tmp_path: Path) -> None:
    for name in ("../secret", "5", "%2e%2e"):
        assert httpx.get(f"{pods[0].url}/v1/snapshots/{name}/0.safetensors").status_code in (400, 404)
        body = {"job": "a", "name": name, "rank": 0, "holders": [pods[0].url], "kept": None}
        assert httpx.post(f"{pods[1].url}/v1/snapshots", json=body).status_code in (400, 404)
    for unclear in ({}, {"job": "a", "name": "1.1", "rank": "../0"}):
        assert httpx.post(f"{pods[0].url}/v1/snapshots/seals", json=unclear).status_code == 400
    with pytest.raises(SnapshotError, match="404"):
        pull(tmp_path / "c", Snapshot("a", "9.1", 0), [pods[0].url, "http://127.0.0.1:1"], 5)


def test_replicas_go_to_the_next_pod_and_one_pod_has_none() -> None:
    assert next_pods({0: "a", 1: "a", 2: "b", 3: "c"}, 1) == {0: ["b"], 1: ["b"], 2: ["c"], 3: ["a"]}
    assert next_pods({0: "a", 1: "a"}, 1) == {0: [], 1: []}
