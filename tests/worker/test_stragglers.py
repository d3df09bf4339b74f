"""Ranks that compute slowly, although collectives make all ranks take equally long: they are named."""

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest
import torch

from grpo_operator.api.v1alpha1.restart_policy import StragglerPolicy
from grpo_worker.controller.training.stragglers import StragglerWatch, members_of
from grpo_worker.controller.training.worker_group import WorkerGroup
from grpo_worker.profiling.own_time import OWN_TIME
from grpo_worker.roles.dispatch import Dispatch, RankInfo, register
from grpo_worker.roles.host import RankHost
from grpo_worker.roles.trainer import TrainerWorker
from support.ranks.launcher import run as run_on_ranks
from support.ray_gangs import ray_gang

STEPS = 4
NOBODY = -1


def _watched(found: list[dict[str, Any]]) -> tuple[list[set[int]], list[float]]:
    """Return the ranks named after each step, and the largest ratio of each."""
    hosts = [RankHost(f"10.0.0.{rank}", 1, f"trainer-{rank}") for rank in range(len(found))]
    watch = StragglerWatch(
        StragglerPolicy(factor=2.0, steps=3), members_of([f["info"] for f in found], hosts)
    )
    named, ratios = [], []
    for step in range(STEPS):
        metrics = watch.observe([f["times"][step] for f in found])
        named.append({one.rank for one in watch.stragglers})
        ratios.append(metrics["own_time_s/largest_ratio"])
    return named, ratios


@pytest.mark.fault(
    row="9",
    point="a rank is stopped for a part of the time",
    witness="pauses counted",
    bound="named after 3 slow steps",
    partial="detection only; no step time after a swap",
)
@pytest.mark.parametrize(
    ("layout", "world", "slow"),
    [
        ({}, 2, 1),
        ({"tensor": 2, "expert": 2, "expert_tensor": 1}, 2, 0),
        ({"pipeline": 2, "layers_in_first_stage": 1}, 4, 3),
    ],
    ids=["dp2", "tp2-ep2", "pp2-dp2"],
)
def test_a_rank_that_is_paused_is_named_and_no_other(layout: dict[str, int], world: int, slow: int) -> None:
    found = run_on_ranks("straggler_cases:own_times", world, layout=layout, count=STEPS, slow=slow)
    assert found[slow]["pauses"] > 10, "the rank was not stopped"
    durations = [median(f["seconds"]) for f in found]
    assert max(durations) < 1.5 * min(durations), "collectives make all ranks take equally long"
    named, _ = _watched(found)
    assert named == [set(), set(), {slow}, {slow}]


def test_without_pauses_nobody_is_named() -> None:
    layout = {"tensor": 2, "expert": 2, "expert_tensor": 1}
    found = run_on_ranks("straggler_cases:own_times", 2, layout=layout, count=STEPS, slow=NOBODY)
    named, _ = _watched(found)
    assert named == [set()] * STEPS
    for rank in found:
        assert all(
            0 < time.update < seconds for time, seconds in zip(rank["times"], rank["seconds"], strict=True)
        )


class Sums(TrainerWorker):
    """A real rank whose update is a sum over all ranks, before which one of them loses time."""

    def _build(self, rank: int, world: int, config: dict[str, Any]) -> RankInfo:
        return RankInfo(rank, 0, 0, 0, rank, 1, world)

    @register(Dispatch.ONE_TO_ALL)
    @OWN_TIME.phase("update")
    def total(self, slow: int) -> float:
        time.sleep(0.3 if self._rank == slow else 0.05)
        value = torch.ones(())
        torch.distributed.all_reduce(value)
        return float(value)


@pytest.fixture
def gang() -> Iterator[WorkerGroup]:
    with ray_gang(Sums, 4, 120.0) as group:
        yield group


@pytest.mark.fault(
    row="9",
    point="a rank sleeps before a collective",
    witness="the others waited for it",
    bound="named after 3 slow steps",
    partial="detection only",
)
def test_the_gang_names_the_slow_rank_with_its_pod(gang: WorkerGroup) -> None:
    watch = StragglerWatch(StragglerPolicy(steps=3), members_of(gang.ranks, gang.hosts))
    gang.call("total", NOBODY)
    gang.call("own_time")  # without the first collective, which connects the ranks
    for slow in (2, 2, 2, NOBODY):
        began = time.monotonic()
        assert gang.call("total", slow) == [4.0] * 4
        assert slow == NOBODY or time.monotonic() - began > 0.3, "all ranks waited for the slow one"
        metrics = watch.observe(gang.call("own_time"))
        if slow != NOBODY:
            assert metrics["own_time_s/update_max"] > 0.3
            assert metrics["own_time_s/update_median"] < 0.25
            named = watch.stragglers
    assert [(one.rank, one.pod, one.steps) for one in named] == [(2, gang.hosts[2].pod, 3)]
    assert not watch.stragglers, "a rank that is no longer slow is no straggler"
