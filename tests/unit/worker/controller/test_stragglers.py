"""Stragglers from the own times of ranks: who is compared with whom, when one is named, and at what cost."""

import json
from pathlib import Path

import pytest

from grpo_operator.api.v1alpha1.restart_policy import StragglerPolicy
from grpo_operator.api.v1alpha1.status import MAX_STRAGGLERS
from grpo_worker.controller.training.stragglers import Member, StragglerWatch
from grpo_worker.profiling.own_time import OwnTime
from support.loop_world import World

POLICY = StragglerPolicy(factor=1.5, steps=3)


def _watch(*stages: int) -> StragglerWatch:
    members = [Member(rank, stage, f"trainer-{rank // 8}") for rank, stage in enumerate(stages)]
    return StragglerWatch(POLICY, members)


def _times(*seconds: float) -> list[OwnTime]:
    return [OwnTime(own / 4, own * 3 / 4) for own in seconds]


def _named(watch: StragglerWatch) -> list[int]:
    return [one.rank for one in watch.stragglers]


def test_a_rank_is_named_after_some_slow_steps_in_a_row_and_forgotten_after_another_one() -> None:
    watch, slow, calm = _watch(0, 0, 0, 0), _times(1, 1, 1.6, 1), _times(1, 1, 1.5, 1)
    for times, named in [
        (slow, []),
        (slow, []),
        (calm, []),
        (slow, []),
        (slow, []),
        (slow, [2]),
        (slow, [2]),
    ]:
        watch.observe(times)
        assert _named(watch) == named
    (one,) = watch.stragglers
    assert (one.pod, one.ratio, one.steps) == ("trainer-0", 1.6, 4)
    watch.observe(calm)
    assert _named(watch) == []


def test_ranks_are_compared_within_their_pipeline_stage() -> None:
    """The last stage computes the logits, too: its ranks are not stragglers."""
    watch = _watch(0, 0, 1, 1)
    for _ in range(3):
        watch.observe(_times(1, 1, 4, 4))
    assert _named(watch) == []
    for _ in range(3):
        metrics = watch.observe(_times(1, 1, 4, 8))
    assert _named(watch) == [3] and metrics["own_time_s/largest_ratio"] == 2.0


def test_one_of_two_ranks_can_be_named_and_a_rank_alone_in_its_stage_cannot() -> None:
    watch, alone = _watch(0, 0), _watch(0, 1)
    for _ in range(3):
        watch.observe(_times(1, 2))
        alone.observe(_times(1, 9))
    assert (_named(watch), _named(alone)) == ([1], [])


@pytest.mark.parametrize("own", [0.0, 1e-9])
def test_a_step_without_work_names_nobody(own: float) -> None:
    watch = _watch(0, 0)
    for _ in range(5):
        watch.observe(_times(own, own))
    assert _named(watch) == []


def test_the_metrics_of_256_ranks_are_as_many_as_those_of_two() -> None:
    large, small = _watch(*(rank % 16 for rank in range(256))), _watch(0, 0)
    slow = {rank: 2.0 + rank / 100 for rank in range(0, 256, 5)}  # of 16 ranks of a stage, 3 or 4
    for _ in range(3):
        metrics = large.observe(_times(*(slow.get(rank, 1.0) for rank in range(256))))
    assert metrics.keys() == small.observe(_times(1, 1)).keys() and len(metrics) == 8
    assert metrics["own_time_s/stragglers"] == len(slow) == large.count
    assert _named(large) == sorted(slow, reverse=True)[:MAX_STRAGGLERS], "the slowest, first"
    wire = json.dumps([one.wire() for one in large.stragglers])
    assert len(wire) < 1000, "the status does not grow with the gang"
    assert metrics["own_time_s/update_median"] == 0.75


def test_the_loop_reports_a_straggler_until_its_gang_ends(tmp_path: Path) -> None:
    world = World(tmp_path, steps=6, restartPolicy={"stragglers": {"steps": 3}})
    world.own_times = [OwnTime(1.0, 1.0), OwnTime(1.0, 5.0)]
    world.run()
    seen = [(status.step, [one.rank for one in status.stragglers]) for status in world.seen]
    assert [rank for step, ranks in seen if step < 3 for rank in ranks] == []
    assert all(ranks == [1] for step, ranks in seen if 3 < step < 6)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["own_time_s/stragglers"] for line in lines] == [0, 0, 1, 1, 1, 1]
    assert lines[0]["own_time_s/update_max"] == 5.0 and lines[0]["own_time_s/update_min"] == 1.0
