"""The account of GPU time: its parts add up to wall time x GPUs, whatever happens to the job."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_devcluster.results import record_from_test
from grpo_worker.controller.status.gpu_time import SUSPENDED, GpuTime
from grpo_worker.metrics.gpu_time import LOST, GpuAccount, Use
from support.clocks import FakeClock
from support.loop_world import World
from support.parking import OUTAGE, away_during_generation, die_while_waiting

_CHANGES = st.one_of(
    st.tuples(st.just("trains"), st.sampled_from([Use.TRAIN, Use.SYNC, Use.WAIT])),
    st.tuples(st.just("stops"), st.sampled_from(["job", "infrastructure", "engines"])),
    st.tuples(st.just("generates"), st.booleans()),
    st.tuples(st.just("finish_step"), st.booleans()),
    st.tuples(st.just("interrupt"), st.booleans()),
)


def test_the_parts_add_up_exactly() -> None:
    errors: list[int] = []

    @given(st.integers(1, 512), st.integers(0, 512), st.lists(st.tuples(st.integers(0, 10**12), _CHANGES)))
    def account_of(trainers: int, engines: int, changes: list[Any]) -> None:
        account, wall = GpuAccount(trainers, engines), 0
        for nanoseconds, (change, value) in changes:
            account.add(nanoseconds)
            wall += nanoseconds
            getattr(account, change)(value)
            account = _reloaded(account, trainers, engines) if change == "stops" else account
        errors.append(abs(sum(account.total.values()) - wall * (trainers + engines)))
        assert errors[-1] == 0
        assert sum(account.lost.values()) == sum(account.total[use] for use in LOST)
        assert min([*account.total.values(), *account.lost.values(), 0]) == 0

    account_of()
    record_from_test("reliability", {"goodput_identity_error": max(errors), "goodput_cases": len(errors)})


def _reloaded(account: GpuAccount, trainers: int, engines: int) -> GpuAccount:
    """Return the account as another controller goes on with it."""
    new = GpuAccount(trainers, engines)
    new.load(account.state())
    new.stops("controller")
    return new


def test_each_pool_has_its_own_use() -> None:
    account = GpuAccount(2, 3)
    account.trains(Use.WAIT)
    account.generates(True)
    account.add(10)
    account.trains(Use.TRAIN)
    account.add(5)  # one step ahead: both work
    account.generates(False)
    account.add(1)
    account.trains(Use.SYNC)
    account.add(2)
    uses = {Use.WAIT: 20, Use.GENERATE: 45, Use.TRAIN: 12, Use.BUBBLE: 3, Use.SYNC: 10}
    assert account.total == uses and not account.lost


def test_a_step_has_the_seconds_in_which_each_pool_was_idle() -> None:
    account, shared = GpuAccount(2, 3), GpuAccount(4, 0)
    for one in (account, shared):
        one.trains(Use.WAIT)
        one.generates(True)
        one.add(10 * 10**9)
        one.generates(False)
        one.add(10**9)  # the store is waited for
        one.trains(Use.TRAIN)
        one.add(4 * 10**9)
    assert account.idle() == {"timing_s/trainers_idle": 11, "timing_s/engines_idle": 5}
    assert shared.idle() == {"timing_s/trainers_idle": 1}
    account.stops("job")
    account.add(5 * 10**9)
    account.interrupt(keeps_answers=False)
    assert set(account.idle().values()) == {0}, "the time of a recovery belongs to no step"


def test_shared_gpus_do_one_thing_at_a_time() -> None:
    account = GpuAccount(4, 0)
    account.trains(Use.WAIT)
    account.generates(True)
    account.add(10)
    account.generates(False)
    account.trains(Use.TRAIN)
    account.add(5)
    assert account.total == {Use.GENERATE: 40, Use.TRAIN: 20}


def test_an_interrupted_step_is_lost_and_its_repetition_is_not() -> None:
    account = GpuAccount(1, 1)
    account.trains(Use.TRAIN)
    account.add(7)
    account.stops("infrastructure")
    account.add(3)
    account.interrupt(keeps_answers=False)
    account.trains(Use.TRAIN)
    account.add(9)
    account.finish_step(replayed=True)  # a step that had been finished since the checkpoint
    account.add(9)
    account.finish_step(replayed=False)
    assert account.total == {Use.REPLAYED: 14 + 18, Use.IDLE: 6, Use.TRAIN: 9, Use.BUBBLE: 9}
    assert account.lost == {"infrastructure": 14 + 18 + 6}


def test_spares_are_held_whatever_the_others_do() -> None:
    account = GpuAccount(2, 1, spares=4)
    account.trains(Use.TRAIN)
    account.add(10)
    account.stops("infrastructure")
    account.add(5)
    account.interrupt(keeps_answers=False)
    account.absent(1, "controller")
    assert account.total[Use.SPARE] == 4 * 16 and sum(account.total.values()) == 7 * 16
    assert sum(account.lost.values()) == 3 * 16, "a spare is no loss"


def _gpu_time(file: Path, clock: FakeClock, wall: list[float]) -> GpuTime:
    return GpuTime(file, 1, 2, clock, lambda: wall[0])


@pytest.mark.parametrize(("cause", "counted"), [("job", True), (SUSPENDED, False)])
def test_the_time_without_a_controller_counts_unless_the_job_is_suspended(
    tmp_path: Path, cause: str, counted: bool
) -> None:
    clock, wall = FakeClock(), [5000.0]
    first = _gpu_time(tmp_path / "gpu_time.json", clock, wall)
    first.trains(Use.TRAIN)
    clock.sleep(10)
    first.finish_step(4)
    first.stops(cause)
    first.save().result()
    wall[0] += 100
    second = _gpu_time(tmp_path / "gpu_time.json", clock, wall)
    report = second.report()
    assert report["gpu_seconds"]["train"] == 10 and report["gpu_seconds"]["bubble"] == 20
    assert report["lost_gpu_seconds"].get("controller", 0) == (300 if counted else 0)
    second.trains(Use.TRAIN)
    clock.sleep(1)
    second.finish_step(4)
    assert second.report()["gpu_seconds"]["replayed"] == 3, "step 4 had been finished by the first one"


def test_a_job_that_goes_on_after_a_suspension_is_not_suspended_any_more(tmp_path: Path) -> None:
    clock, wall = FakeClock(), [5000.0]
    first = _gpu_time(tmp_path / "gpu_time.json", clock, wall)
    first.stops(SUSPENDED)
    first.trains(Use.WAIT)
    first.save().result()
    wall[0] += 100
    second = _gpu_time(tmp_path / "gpu_time.json", clock, wall)
    assert second.report()["lost_gpu_seconds"]["controller"] == 300


@pytest.mark.fault(
    row="28",
    point="the clock is set back by 100 s between two controllers",
    witness="the account is read with that clock",
    partial="the account of GPU time only",
)
def test_a_clock_that_was_set_back_loses_nothing(tmp_path: Path) -> None:
    clock, wall = FakeClock(), [5000.0]
    _gpu_time(tmp_path / "gpu_time.json", clock, wall).save().result()
    wall[0] -= 100
    assert sum(_gpu_time(tmp_path / "gpu_time.json", clock, wall).report()["gpu_seconds"].values()) == 0


def _total(world: World) -> int:
    return sum(world.board.get().gpu_seconds.values())


def test_a_calm_job_loses_only_its_start(tmp_path: Path) -> None:
    world = World(tmp_path)
    started = world.clock.now()
    world.run()
    status = world.board.get()
    gpus = world.spec.trainer.world + 1
    assert _total(world) == pytest.approx((world.clock.now() - started) * gpus, abs=len(Use))
    assert status.gpu_seconds["train"] == 6 * world.spec.trainer.world, "a second for each of six updates"
    assert status.gpu_seconds["generate"] > 0 and status.gpu_seconds["replayed"] == 0
    assert status.lost_gpu_seconds.keys() <= {"start"}


def test_an_outage_of_engines_is_lost_to_engines(tmp_path: Path) -> None:
    world = World(tmp_path)
    away_during_generation(world, version=2)
    world.run()
    lost = world.board.get().lost_gpu_seconds
    assert lost["engines"] >= OUTAGE * world.spec.trainer.world
    assert world.board.get().gpu_seconds["idle"] >= lost["engines"]


def test_a_death_while_parked_repeats_nothing_that_was_saved(tmp_path: Path) -> None:
    world = World(tmp_path)
    away_during_generation(world, version=3)
    die_while_waiting(world)
    world.run()
    status = world.board.get()
    assert status.restarts.infrastructure == 1 and status.gpu_seconds["train"] == 6 * world.spec.trainer.world


def test_steps_that_are_repeated_after_a_death_are_lost_to_it(tmp_path: Path) -> None:
    world = World(tmp_path)

    def die(version: int) -> None:
        if version == 5 and world.starts == 1:
            world.groups[0].died.set_result(None)
            raise TimeoutError("no engine serves")

    world.before_generation = die
    world.run()
    status = world.board.get()
    assert status.restarts.infrastructure == 1, "restored from the checkpoint of step 4"
    gpus = world.spec.trainer.world
    assert status.gpu_seconds["train"] == 6 * gpus, "the updates that count"
    assert status.gpu_seconds["replayed"] >= gpus, "step 5 was updated twice"
    assert status.lost_gpu_seconds["infrastructure"] == pytest.approx(
        status.gpu_seconds["replayed"] + status.gpu_seconds["idle"] - status.lost_gpu_seconds.get("start", 0),
        abs=2,
    )
