"""Fields of the job's file that change while the job runs: what is read, and what the loop makes of it."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.restart_policy import RestartPolicySpec
from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.checkpointing.store import complete_steps
from grpo_worker.controller.live_fields import LiveFields
from grpo_worker.controller.status.page_file import FILE as PAGE
from support.loop_world import World


class Mount:
    """A mounted ConfigMap, written as kubelet does: a folder for each change, a link to the newest."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._number = folder, 0
        self.file = folder / "job.json"
        self.file.symlink_to("..data/job.json")

    def write(self, text: str) -> None:
        self._number += 1
        place = self._folder / f"..{self._number}"
        place.mkdir()
        (place / "job.json").write_text(text)
        link = self._folder / "..data_tmp"
        link.symlink_to(place.name)
        link.rename(self._folder / "..data")

    def set(self, **spec: Any) -> None:
        self.write(json.dumps({"name": "job", "spec": {"totalSteps": 6} | spec}))


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    made = Mount(tmp_path / "etc")
    made.set()
    return made


def test_changes_are_read_once_and_logged(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    live = LiveFields(6, RestartPolicySpec(), mount.file)
    live.look()
    assert caplog.messages == [], "the file is that of the start"
    policy = live.restart_policy
    mount.set(totalSteps=9, restartPolicy={"maxRestarts": 2, "avoidNodes": {"failures": 7}, "ofTomorrow": 1})
    live.look()
    assert (live.total_steps, live.restart_policy.max_restarts) == (9, 2)
    assert live.restart_policy.avoid_nodes.failures == 7 and policy.max_restarts == 10
    assert caplog.messages == [
        "spec.restartPolicy.avoidNodes.failures is now 7 (before: 2)",
        "spec.restartPolicy.maxRestarts is now 2 (before: 10)",
        "spec.totalSteps is now 9 (before: 6)",
    ]
    policy = live.restart_policy
    mount.set(totalSteps=8, restartPolicy={"maxRestarts": 2, "avoidNodes": {"failures": 7}})
    live.look()
    assert live.total_steps == 8 and live.restart_policy is policy


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "Invalid JSON"),
        ('{"spec": {"totalSteps": 0}}', "job.json.spec.totalSteps"),
        (
            '{"spec": {"totalSteps": 7, "restartPolicy": {"backoffSeconds": -1}}}',
            "restartPolicy.backoffSeconds",
        ),
    ],
)
def test_a_wrong_file_is_named_once_and_changes_nothing(
    mount: Mount, caplog: pytest.LogCaptureFixture, text: str, named: str
) -> None:
    live = LiveFields(6, file=mount.file)
    mount.write(text)
    for _ in range(3):
        live.look()
    (message,) = caplog.messages
    assert named in message and live.total_steps == 6 and live.restart_policy == RestartPolicySpec()
    mount.set(totalSteps=7)
    live.look()
    assert live.total_steps == 7


def test_a_file_that_is_away_is_read_when_it_is_back(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    live = LiveFields(6, file=mount.file)
    mount.set(totalSteps=7)
    data = mount.file.parent / "..data"
    target = os.readlink(data)
    data.unlink()
    live.look()
    assert live.total_steps == 6 and "is read again" in caplog.text
    data.symlink_to(target)
    live.look()
    assert live.total_steps == 7


def test_a_file_that_does_not_change_costs_one_stat(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveFields(6, file=mount.file)
    live.look()
    read: list[Path] = []
    monkeypatch.setattr(Path, "read_bytes", read.append)
    for _ in range(100):
        live.look()
    assert read == []


def _world(tmp_path: Path, mount: Mount, version: int, changes: dict[str, Any], **spec: Any) -> World:
    """Return a job of 6 steps whose file changes while it generates with ``version``."""
    world = World(tmp_path / "store", **spec)
    world.job_file = mount.file

    def change(now: int) -> None:
        if now == version and changes:
            mount.set(**changes)
            changes.clear()

    world.before_generation = change
    return world


def _steps(ledger: list[dict[str, Any]]) -> list[int]:
    return sorted({entry["step"] for entry in ledger})


def test_a_job_with_fewer_steps_ends_after_the_present_one(tmp_path: Path, mount: Mount) -> None:
    sets = [{"name": "gcd", "data": "reasoning-gym:gcd", "prompts": 2}]
    world = _world(tmp_path, mount, 2, {"totalSteps": 1}, validation={"sets": sets, "everySteps": 5})
    world.spec = world.spec.model_copy(
        update={"checkpoint": world.spec.checkpoint.model_copy(update={"export_at_end": True})}
    )
    assert _steps(world.run()) == [1, 2, 3]
    status = world.board.get()
    assert (status.phase, status.step, status.total_steps) == (Phase.SUCCEEDED, 3, 3)
    assert complete_steps(world.store / "checkpoints")[-1] == 3
    assert world.exports == [("step-00000003", 3)]
    assert {version for _, version in world.validated} == {0, 3}, "the final weights are validated"
    assert '"step":3,"total":3' in (world.store / PAGE).read_text()


def test_a_job_with_more_steps_goes_on_as_if_it_had_always_had_them(tmp_path: Path, mount: Mount) -> None:
    mount.set(totalSteps=9)
    calm = World(tmp_path / "calm", steps=9)
    expected = calm.run()
    mount.set()
    world = _world(tmp_path, mount, 5, {"totalSteps": 9})
    assert world.run() == expected, "also after the step that was to be the last one"
    status = world.board.get()
    assert (status.phase, status.step, status.total_steps, status.attempt) == (Phase.SUCCEEDED, 9, 9, 1)
    assert world.starts == 1 and calm.decays == []
    assert world.decays == [(6, calm.spec.updates)], "before the first update of the longer job"
    totals = [seen.total_steps for seen in world.seen]
    assert totals == sorted(totals) and set(totals) <= {0, 6, 9}


def test_ranks_that_start_again_get_the_number_of_steps(tmp_path: Path, mount: Mount) -> None:
    world = _world(tmp_path, mount, 1, {"totalSteps": 8})
    configs: list[int] = []

    def lose_a_rank(updates: int) -> None:
        if updates == 4 and world.starts == 1:
            world.groups[0].died.set_result(None)

    world.before_update = lose_a_rank
    start = World._group

    def noted(self: World, pool: Any) -> Any:
        group = start(self, pool)
        begin = group.start

        def begin_noted(config: dict[str, Any]) -> None:
            configs.append(config["spec"]["totalSteps"])
            begin(config)

        group.start = begin_noted  # type: ignore[method-assign]
        return group

    world._group = noted.__get__(world)  # type: ignore[method-assign]
    world.run()
    assert configs == [6, 8] and world.board.get().step == 8


def test_limits_of_restarts_are_those_of_the_time_of_the_failure(tmp_path: Path, mount: Mount) -> None:
    policy = {"maxRestarts": 1, "maxSameFailures": 9, "backoffSeconds": 7}
    world = World(tmp_path / "store", restartPolicy={"maxRestarts": 0})
    world.job_file = mount.file

    def fail(updates: int) -> None:
        if updates == 2:
            if world.starts == 1:
                mount.set(restartPolicy=policy)
            raise RuntimeError("the loss is strange")

    world.before_update = fail
    began = world.clock.time
    world.run()
    status = world.board.get()
    assert status.phase is Phase.FAILED and "maxRestarts (1) used up" in status.message
    assert status.restarts.job == 2 and world.starts == 2 and world.clock.time - began >= 7


def test_a_longer_limit_of_silence_holds_for_the_next_ranks_and_for_engines(
    tmp_path: Path, mount: Mount
) -> None:
    changed = {"restartPolicy": {"hangSeconds": 600, "stragglers": {"steps": 2}}}
    world = _world(tmp_path, mount, 1, changed)
    world.run()
    assert vars(world.engines)["hang_seconds"] == 600.0
    assert world.loop.trainers._spec.restart_policy.hang_limit == 600
