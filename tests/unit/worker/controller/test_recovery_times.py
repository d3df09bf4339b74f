"""Recoveries: their parts add up to the time from the fault to the end of the interrupted step."""

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from grpo_worker.controller.status.gpu_time import SUSPENDED, GpuTime
from grpo_worker.controller.status.recovery_times import RecoveryTimes
from grpo_worker.controller.training.worker_group import GangError
from grpo_worker.metrics.recovery import Part
from support.clocks import FakeClock
from support.loop_world import World
from support.parking import away_during_generation, die_while_waiting


def _lines(store: Path) -> list[dict[str, Any]]:
    file = store / "recoveries.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _observed(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"grpo_recovery_{name}", labels) or 0.0


def _through(times: RecoveryTimes, clock: FakeClock, **seconds: float) -> None:
    """Pass through the parts of a recovery after STOP, which lasts 2 s."""
    clock.sleep(2)
    for part, spent in seconds.items():
        times.enters(Part(part))
        clock.sleep(spent)


def test_the_parts_add_up_and_reach_file_status_and_histograms(tmp_path: Path) -> None:
    clock = FakeClock()
    times = RecoveryTimes(tmp_path / "recoveries.jsonl", clock)
    before = _observed("seconds_sum", cause="infrastructure"), _observed("part_seconds_sum", part="load")
    times.begins("infrastructure", clock.now() - 4, "rank 3 has ended")
    _through(times, clock, start=8, load=16, replay=32)
    written = times.ends(7)
    assert written is not None and times.last is not None
    written.result(10)
    (line,) = _lines(tmp_path)
    assert line["parts"] == {"detect": 4, "stop": 2, "start": 8, "load": 16, "replay": 32}
    assert (line["cause"], line["step"], line["seconds"]) == ("infrastructure", 7, 62)
    assert line["why"] == "rank 3 has ended"
    assert (times.last.seconds, times.last.parts["replay"]) == ("62.0", "32.0")
    assert _observed("seconds_sum", cause="infrastructure") - before[0] == 62
    assert _observed("part_seconds_sum", part="load") - before[1] == 16
    assert times.ends(8) is None, "the next step belongs to no recovery"


def test_a_second_fault_prolongs_the_recovery_that_it_interrupts(tmp_path: Path) -> None:
    clock = FakeClock()
    times = RecoveryTimes(tmp_path / "recoveries.jsonl", clock)
    times.begins("infrastructure", clock.now() - 4)
    _through(times, clock, start=8, load=16)
    times.begins("job", clock.now() - 3)  # the last 3 s of loading
    _through(times, clock, start=1, load=1, replay=1)
    written = times.ends(7)
    assert written is not None
    written.result(10)
    (line,) = _lines(tmp_path)
    assert line["parts"] == {"detect": 7, "stop": 4, "start": 9, "load": 14, "replay": 1}
    assert (line["cause"], line["seconds"]) == ("infrastructure", 35)


@pytest.mark.parametrize("since", [2000.0, None], ids=["in the future", "unknown"])
def test_a_fault_whose_time_is_unknown_began_when_it_was_reported(tmp_path: Path, since: Any) -> None:
    clock = FakeClock()
    times = RecoveryTimes(tmp_path / "recoveries.jsonl", clock)
    times.begins("job", since)
    clock.sleep(5)
    times.ends(1)
    assert times.last is not None and (times.last.seconds, times.last.parts["detect"]) == ("5.0", "0.0")


def test_a_store_that_fails_delays_nothing_and_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "recoveries.jsonl"
    times = RecoveryTimes(file, FakeClock())
    for step in (1, 2, 3):
        times.begins("job")
        written = times.ends(step)
        assert written is not None and written.result(10) is None and times.last is not None
        assert not file.exists() or step == 3
        if step == 2:
            file.parent.mkdir()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3]
    times.begins("job")
    written = times.ends(4)
    assert written is not None and written.result(10) is None
    assert len(file.read_text().splitlines()) == 4, "each is written once"


def test_a_suspension_belongs_to_no_recovery(tmp_path: Path) -> None:
    clock = FakeClock()
    times = RecoveryTimes(tmp_path / "recoveries.jsonl", clock)
    gpus = GpuTime(tmp_path / "gpu_time.json", 1, 1, clock, suspends=times.discard)
    times.begins("job")
    gpus.stops(SUSPENDED)
    assert times.ends(1) is None


def test_a_calm_job_has_no_recovery(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run()
    assert _lines(tmp_path) == [] and world.board.get().last_recovery is None


def test_a_death_is_a_recovery_until_the_interrupted_step_is_finished(tmp_path: Path) -> None:
    world = World(tmp_path)
    seconds: dict[str, float] = {}

    def die(version: int) -> None:
        if version == 5 and world.starts == 1:
            seconds["died"] = world.clock.now()
            world.groups[0].died.set_result(None)
            raise TimeoutError("no engine serves")

    world.before_generation = die
    finish = world.board.update

    def note(**values: Any) -> None:
        finish(**values)
        if values.get("last_recovery") is not None:
            seconds.setdefault("reported", world.clock.now())

    world.board.update = note  # type: ignore[method-assign]
    world.run()
    last = world.board.get().last_recovery
    assert last is not None and (last.cause, last.step) == ("infrastructure", 6)
    assert float(last.seconds) == pytest.approx(seconds["reported"] - seconds["died"], abs=0.1)
    assert float(last.parts["replay"]) > 1, "step 5 was lost since the checkpoint of step 4, and is repeated"
    assert sum(map(float, last.parts.values())) == pytest.approx(float(last.seconds), abs=0.3)


def test_the_time_of_the_first_sign_of_a_fault_is_part_of_the_recovery(tmp_path: Path) -> None:
    world = World(tmp_path)

    def fail(updates: int) -> None:
        if updates == 2 and world.starts == 1:
            began = world.clock.now()
            world.clock.sleep(40)
            raise GangError("update_actor: no progress in 40 s", [], since=began)

    world.before_update = fail
    world.run()
    last = world.board.get().last_recovery
    assert last is not None and (last.cause, last.parts["detect"]) == ("job", "40.0")


def test_the_time_without_a_controller_is_part_of_the_recovery(tmp_path: Path) -> None:
    first = World(tmp_path)

    class KilledError(BaseException):
        """SIGKILL of the controller."""

    def kill(version: int) -> None:
        if version == 5:
            raise KilledError

    first.before_generation = kill
    with pytest.raises(KilledError):
        first.run()
    first.loop.gpus.save().result(10)
    file = tmp_path / "gpu_time.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps(state | {"at": state["at"] - 100}))
    second = World(tmp_path)
    second.run()
    last = second.board.get().last_recovery
    assert last is not None and (last.cause, last.step) == ("controller", 6)
    assert 100 <= float(last.parts["detect"]) < 130


def test_a_death_while_parked_is_a_recovery(tmp_path: Path) -> None:
    world = World(tmp_path)
    away_during_generation(world, version=3)
    die_while_waiting(world)
    world.run()
    last = world.board.get().last_recovery
    assert last is not None and last.cause == "infrastructure"
