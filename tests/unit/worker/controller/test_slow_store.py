"""A store that answers nothing for a while: steps go on, and nothing is lost or counts too early."""

import threading
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.controller.training.worker_group import GangError
from grpo_worker.rollout.batch_file import RolloutBatch
from support.loop_world import World

AHEAD: dict[str, Any] = {"staleness": {"maxVersionLag": 1}}


class _Blocked:
    """Opens of the controller's files in the store, which wait from ``begin`` until ``end``."""

    def __init__(self, store: Path, patch: pytest.MonkeyPatch) -> None:
        self._opened = threading.Event()
        self._opened.set()
        self.waited: set[str] = set()  # names of files
        original = Path.open

        def opens(path: Path, *args: Any, **kwargs: Any) -> Any:
            own = path.is_relative_to(store) and not path.is_relative_to(store / "checkpoints")  # the ranks'
            if own and not self._opened.is_set():
                assert threading.current_thread() is not threading.main_thread(), f"a step waits for {path}"
                self.waited.add(path.name.removesuffix(".index"))
                assert self._opened.wait(60)
            return original(path, *args, **kwargs)

        patch.setattr(Path, "open", opens)
        self.begin, self.end = self._opened.clear, self._opened.set


@pytest.mark.fault(
    row="21,nfs-stale",
    point="all opens of the controller's files block for four steps",
    witness="the files that waited",
    bound="no virtual time of a step",
    compared="ledger of an undisturbed run",
    partial="stand-in ranks; the ranks' files do not block",
)
@pytest.mark.parametrize(
    ("changes", "replay"),
    [({}, False), (AHEAD, False), (AHEAD, True)],
    ids=["on-policy", "ahead", "ahead-with-experts"],
)
def test_a_store_that_blocks_takes_no_time_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], replay: bool
) -> None:
    calm = World(tmp_path / "calm", **changes)
    calm.routing_replay = replay
    ledger = calm.run()
    world = World(tmp_path / "slow", **changes)
    world.routing_replay = replay
    blocked = _Blocked(world.store, monkeypatch)
    update, complete = world.board.update, []

    def at_step(**values: Any) -> None:
        update(**values)
        if values.get("step") == 1:
            blocked.begin()
        if values.get("step") == 5:  # a checkpoint was due after step 4
            complete.append(world.board.get().last_checkpoint)
            blocked.end()

    world.board.update = at_step  # type: ignore[method-assign]
    assert world.run() == ledger, "each sample once"
    status = world.board.get()
    assert (status.step, status.attempt, status.times_parked) == (6, 1, 0)
    assert complete[0] is None, "without its records"
    assert changes or world.clock.now() == calm.clock.now(), "nothing was waited for"
    assert {"run.json", "ledger.jsonl"} <= blocked.waited
    assert status.last_checkpoint == 6
    pending = sorted(file.name for file in (world.store / "pending").glob("*.npz"))
    assert pending == sorted(file.name for file in (calm.store / "pending").glob("*.npz"))
    assert ("step-00000004.attempt-1.npz" in pending) == bool(changes)
    assert ("rank-0.bin" in blocked.waited) == replay
    if replay:
        saved = RolloutBatch.read(world.store / "pending" / "step-00000004.attempt-1.npz").samples
        assert saved and all(sample.routed and Path(sample.routed.location).is_file() for sample in saved)


def test_an_export_takes_no_time_of_a_step_and_precedes_the_checkpoints_after_it(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"checkpoint": {"store": {"path": "/data"}, "exportEverySteps": 3}}
    world = World(tmp_path, steps=10, **changes)
    seen: list[tuple[int, int | None]] = []
    world.exported = lambda: world.updates >= 7
    update = world.board.update

    def at_step(**values: Any) -> None:
        update(**values)
        if "reward_mean" in values:
            seen.append((world.board.get().step, world.board.get().last_checkpoint))

    world.board.update = at_step  # type: ignore[method-assign]
    world.run()
    assert world.exports == [("step-00000003", 3), ("step-00000007", 7), ("step-00000009", 9)], "6 was due"
    counted = dict(seen)
    assert [counted[step] for step in (4, 5, 6)] == [None] * 3, "the export of step 3 is not complete"
    assert counted[8] in (None, 4), "its records may still be written"
    assert world.board.get().last_checkpoint == 10


def test_an_export_that_fails_ends_the_attempt_and_is_repeated(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"checkpoint": {"store": {"path": "/data"}, "exportEverySteps": 3}}
    world = World(tmp_path, steps=6, **changes)
    failed: list[int] = []

    def exported() -> bool:
        if not failed:
            failed.append(world.updates)
            raise GangError("poll_export: checkpoint.store: /data was not exported: No space left", [])
        return True

    world.exported = exported
    world.run()
    status = world.board.get()
    assert failed and (status.step, status.attempt) == (6, 2) and "No space left" in status.last_failure
    assert world.exports == [("step-00000003", 3), ("step-00000003", 3), ("step-00000006", 6)]


def test_progress_after_a_failure_is_saved_beside_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    blocked, update = _Blocked(world.store, monkeypatch), world.board.update
    died: list[int] = []

    def before(version: int) -> None:
        if version == 1 and not died:
            died.append(version)
            world.groups[0].died.set_result(None)

    def at_step(**values: Any) -> None:
        update(**values)
        training = world.board.get().attempt == 2 and world.board.get().phase == Phase.TRAINING
        if training and values.get("step") == 1:
            blocked.begin()
        if training and values.get("step") == 3:
            blocked.end()

    world.before_generation, world.board.update = before, at_step  # type: ignore[method-assign]
    world.run()
    status = world.board.get()
    assert (status.step, status.attempt, world.starts) == (6, 2, 2)
    assert "run.json" in blocked.waited
