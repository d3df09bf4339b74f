"""A store that is full or read-only for hours: the job waits and loses nothing, and it is not its fault."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.controller.training.worker_group import GangError
from support.loop_world import Ranks, World
from support.parking import OUTAGE, without_attempts


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return without_attempts(World(tmp_path_factory.mktemp("calm")).run())


def _failing(world: World, number: int) -> Any:
    """Return whether the store refuses writes now, for the first hours after something was to be written."""
    began: list[float] = []

    def check() -> None:
        if not began:
            began.append(world.clock.now())
        if world.clock.now() < began[0] + OUTAGE:
            raise OSError(number, os.strerror(number))

    return check


@pytest.mark.fault(
    row="21",
    point="saves answer ENOSPC, EDQUOT or EROFS for two hours",
    witness="the message names store and error",
    compared="ledger of an undisturbed run",
    partial="stand-in ranks",
)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS], ids=errno.errorcode.get)
def test_ranks_that_cannot_write_for_hours_never_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: list[dict[str, Any]], number: int
) -> None:
    world = World(tmp_path)
    check, save = _failing(world, number), Ranks._save_checkpoint

    def save_or_fail(ranks: Ranks, *args: Any) -> None:
        try:
            check()
        except OSError as error:
            raise GangError(f"save_checkpoint: {error}", []) from error
        save(ranks, *args)

    monkeypatch.setattr(Ranks, "_save_checkpoint", save_or_fail)
    assert without_attempts(world.run()) == calm, "each sample once"
    status = world.board.get()
    assert (status.phase, status.step, status.restarts.job) == (Phase.SUCCEEDED, 6, 0)
    assert world.clock.now() >= 1000 + OUTAGE and status.restarts.infrastructure < 40, "with a back-off"
    assert status.last_failure.startswith("save_checkpoint") and os.strerror(number) in status.last_failure
    assert world.spec.checkpoint.store.label in status.last_failure, "the store is named"
    assert ": free space in it" in status.last_failure or ": make it writable" in status.last_failure


def test_a_controller_that_cannot_write_for_hours_never_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: list[dict[str, Any]]
) -> None:
    world = World(tmp_path)
    check, opens, update = _failing(world, errno.ENOSPC), Path.open, world.board.update

    def at_step(**values: Any) -> None:
        update(**values)
        assert world.starts < 100, "there is no back-off"
        if "reward_mean" in values:
            world.loop.files.ledger._log._queue.join()  # a real step is longer than a write

    world.board.update = at_step  # type: ignore[method-assign]

    def open_or_fail(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if world.board.get().step >= 2 and mode != "r" and path.name in ("ledger.jsonl", "run.tmp"):
            check()
        return opens(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_or_fail)
    assert without_attempts(world.run()) == calm
    status = world.board.get()
    assert (status.phase, status.step, status.restarts.job) == (Phase.SUCCEEDED, 6, 0)
    assert world.clock.now() >= 1000 + OUTAGE and "is full: free space" in status.last_failure
