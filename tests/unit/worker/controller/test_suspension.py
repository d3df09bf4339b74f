"""Suspension of a job whose ranks do not start: nobody could save anything, so it is not waited for."""

from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.messages import ControllerStatus
from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.controller.training.worker_group import GangError
from support.loop_world import Ranks, World

WAIT = 10.0  # seconds between two reports of a wait for pods


class Suspended:
    """A job that is resumed as soon as it is suspended. ``seen``: status and time of each suspension."""

    def __init__(self, world: World) -> None:
        self.seen: list[tuple[ControllerStatus, float]] = []
        self._world = world
        world.board.wait_until_resumed = self._resume  # type: ignore[method-assign]

    def _resume(self) -> None:
        self.seen.append((self._world.board.get(), self._world.clock.now()))
        self._world.board.request_suspend(False)


def _lose_a_rank(world: World, updates: int) -> None:
    def lose(now: int) -> None:
        if now == updates and world.starts == 1:
            world.groups[0].died.set_result(None)

    world.before_update = lose


@pytest.mark.parametrize(("memory", "count"), [(False, 1), (True, 12)])
def test_a_job_that_waits_for_pods_is_suspended_and_goes_on(tmp_path: Path, memory: bool, count: int) -> None:
    world = World(tmp_path, memory=memory)
    suspended = Suspended(world)
    _lose_a_rank(world, 5)
    waits: list[float] = []

    def acquire(resource: str, ranks: int, gpus: int = 0, report: Any = None) -> object:
        while world.starts == 1 and not suspended.seen:
            world.clock.sleep(WAIT)
            waits.append(world.clock.now())
            if len(waits) == 1:
                world.board.request_suspend(True)
            report("pool trainer: 1 of 2 ranks registered")
        return object()

    world.acquire = acquire  # type: ignore[method-assign]
    world.run()
    ((status, at),) = suspended.seen
    assert status.phase is Phase.SUSPENDED
    assert status.message == "no ranks run; the job resumes from its last checkpoint"
    assert len(waits) == count and at == waits[-1], "steps in memory have time to be saved"
    phases = [seen.phase for seen in world.seen]
    assert phases[phases.index(Phase.SUSPENDED) + 1] is Phase.RECOVERING
    assert (world.board.get().phase, world.board.get().step) == (Phase.SUCCEEDED, 6)


def test_a_job_whose_ranks_end_when_they_start_is_suspended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, restartPolicy={"maxRestarts": 100, "maxSameFailures": 100})
    suspended = Suspended(world)
    _lose_a_rank(world, 5)
    start, failed = Ranks.start, []

    def fail(ranks: Ranks, config: dict[str, Any]) -> None:
        start(ranks, config)
        if world.starts > 1 and not suspended.seen:
            failed.append(world.starts)
            if len(failed) == 3:
                world.board.request_suspend(True)
            raise GangError("start: the pod of rank 1 was out of memory", [1])

    monkeypatch.setattr(Ranks, "start", fail)
    world.run()
    ((status, _),) = suspended.seen
    assert status.phase is Phase.SUSPENDED and len(failed) == 3
    assert (world.board.get().phase, world.board.get().step) == (Phase.SUCCEEDED, 6)
