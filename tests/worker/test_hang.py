"""A rank that never joins a collective, and a frozen one: both are named before the timeout."""

import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_worker.controller.training.worker_group import GangError, WorkerGroup
from grpo_worker.profiling.progress import PROGRESS
from grpo_worker.roles.dispatch import Dispatch, RankInfo, register
from grpo_worker.roles.trainer import TrainerWorker
from support.ray_gangs import ray_gang

HANG = 4.0


class Links:
    """Links over which rank 1 never sends, so that rank 0 and the engine give up."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def send(self, names: list[str], parts: list[Any], patience: float) -> list[str]:
        if self._rank == 1:
            self.read_a_lost_disk()
        time.sleep(patience)
        return ["trainer rank 0: not done within the deadline"] * len(names)

    def read_a_lost_disk(self) -> None:
        time.sleep(600)


class Sums(TrainerWorker):
    """A real rank that only sums, and whose transfers hang."""

    def _build(self, rank: int, world: int, config: dict[str, Any]) -> RankInfo:
        weights = SimpleNamespace(on_device=nullcontext)
        policy = SimpleNamespace(trainable=SimpleNamespace(weights=weights), held_shards=list)
        self._models: Any = SimpleNamespace(policy=policy, links=Links(rank))
        return RankInfo(rank, 0, 0, 0, rank, 1, world)

    @register(Dispatch.ONE_TO_ALL)
    def total(self, idle: int | None) -> float:
        if self._rank == idle:
            self.look_for_something()
        value = torch.ones(())
        torch.distributed.all_reduce(value)
        return float(value)

    def look_for_something(self) -> None:
        time.sleep(600)

    @register(Dispatch.ONE_TO_ALL)
    def late_total(self, pieces: int) -> float:
        """Rank 1 does ``pieces`` pieces of work of a second each before it joins the collective."""
        for _ in range(pieces if self._rank == 1 else 0):
            time.sleep(1)
            PROGRESS.add("pieces")
        return self.total(None)


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[WorkerGroup]:
    with ray_gang(Sums, 2, HANG, flight_records=str(tmp_path / "hang")) as group:
        yield group


@pytest.mark.fault(
    row="4",
    point="a rank never joins a collective",
    witness="stack and flight records name it",
    bound="the limit of 4 s and a look",
    partial="no restart",
)
def test_a_hanging_rank_and_its_process_group_are_named(gang: WorkerGroup, tmp_path: Path) -> None:
    assert gang.call("total", None) == [2.0, 2.0]
    with pytest.raises(GangError) as caught:
        gang.call("total", 1)
    assert caught.value.lost == []
    message = str(caught.value)
    assert re.search(r"rank 1 on \S+ \([\d.]+\) is stuck in .*look_for_something", message)
    assert re.search(r"group .*\[0, 1\]: \d+ collectives begun, others \d+", message)
    assert "rank 0 " not in message
    begun = [_all_reduces(tmp_path / "hang" / f"rank_{rank}") for rank in range(2)]
    assert begun == [2, 1], "the flight recorders show what rank 1 never began"


@pytest.mark.fault(
    row="4,14",
    point="a rank hangs in the middle of a direct transfer",
    witness="its line is named",
    bound="64 s",
    partial="no restart; links are stand-ins",
)
@pytest.mark.slow  # half a minute; the gang and its limit are those of the test above
def test_a_rank_that_hangs_in_a_direct_transfer_is_named(gang: WorkerGroup) -> None:
    """The others give up their engine and return; only the rank that hangs is left."""
    began = time.monotonic()
    with pytest.raises(GangError, match=r"rank 1 on \S+ \([\d.]+\) is stuck in .*read_a_lost_disk"):
        gang.call("send_weights", ["link"], HANG)
    assert HANG < time.monotonic() - began < HANG + 60


def _all_reduces(file: Path) -> int:
    entries = pickle.loads(file.read_bytes())["entries"]
    return sum(entry["profiling_name"] == "gloo:all_reduce" for entry in entries)


@pytest.mark.slow
def test_a_rank_that_works_longer_than_the_limit_is_not_a_hang(gang: WorkerGroup) -> None:
    began = time.monotonic()
    assert gang.call("late_total", int(3 * HANG)) == [2.0, 2.0]
    assert time.monotonic() - began >= 3 * HANG


@pytest.mark.fault(
    row="1",
    point="SIGKILL of a rank while no call runs",
    witness="the death is reported",
    bound="10 s",
    partial="detection only",
)
def test_a_death_is_noticed_within_seconds_although_no_call_runs(gang: WorkerGroup) -> None:
    gang.call("total", None)
    assert not gang.died.done()
    os.kill(gang.pids[1], signal.SIGKILL)
    gang.died.result(timeout=10)
    death = gang.death()
    assert death.lost == [1] and death.outside
    assert str(death).startswith("the processes of rank 1 on ")


@pytest.mark.slow
def test_a_killed_gang_leaves_no_thread_that_calls_ray(gang: WorkerGroup) -> None:
    assert "rank-deaths" in [thread.name for thread in threading.enumerate()]
    gang.kill()
    assert "rank-deaths" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.fault(
    row="4",
    point="SIGSTOP of a rank",
    witness="the message says that it does not respond",
    bound="the limit of 4 s and a look",
    partial="no restart",
)
@pytest.mark.slow  # three quarters of a minute until Ray gives a rank up
def test_a_frozen_rank_is_named(gang: WorkerGroup) -> None:
    os.kill(gang.pids[0], signal.SIGSTOP)
    try:
        with pytest.raises(GangError, match=r"rank 0 on .* does not respond"):
            gang.call("total", None)
    finally:
        os.kill(gang.pids[0], signal.SIGCONT)
