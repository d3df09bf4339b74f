"""Metrics outside of their ranges end a job, or send it back behind the prompts that it has drawn since."""

import math
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.divergence import DivergenceSpec
from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.checkpointing import rollbacks
from grpo_worker.controller.validation.divergence import DivergenceWatch
from grpo_worker.controller.validation.setback import DivergedError
from grpo_worker.rollout.sampling import Sample
from support.going_back import MOMENTS, losses, skipping
from support.loop_world import World
from support.parking import without_attempts

STEPS = 12
SAVED, LAST = 4, 8  # the newest checkpoint from before the divergence, and its last step
BAD = (5, 6, 7)  # versions whose samples score nothing: steps 6 to 8
LOW = {"limits": [{"metric": "critic/score/mean", "minimum": 0.01}], "steps": 3}


def _world(folder: Path, action: str = "rollback", always: bool = False, **changes: Any) -> World:
    """Return a job that diverges once. ``always``: again after each rollback."""
    divergence = LOW | {"onDivergence": action} | changes.pop("divergence", {})
    world = World(folder, changes.pop("steps", STEPS), divergence=divergence, **changes)
    score = world.engines.score

    def scored(samples: list[Sample]) -> list[float]:
        bad = always or not (folder / rollbacks.ROLLBACKS).exists()
        return [0.0] * len(samples) if bad and samples[0].version in BAD else score(samples)

    world.engines.score = scored  # type: ignore[method-assign]
    return world


def test_a_job_goes_back_to_the_newest_checkpoint_from_before_and_skips_prompts(tmp_path: Path) -> None:
    world = _world(tmp_path / "job")
    ledger, status = world.run(), world.board.get()
    assert (status.phase, status.restarts.job, status.restarts.rollback) == (Phase.SUCCEEDED, 0, 1)
    drawn = LAST * world.spec.data.train_batch_size
    expected = skipping(tmp_path / "skipping", SAVED, drawn, STEPS)
    assert without_attempts(ledger) == without_attempts(expected)
    assert losses(tmp_path / "job") == losses(tmp_path / "skipping")
    why = rollbacks.rollbacks(tmp_path / "job")[0].why
    assert "critic/score/mean was below 0.01, or no number, in 3 steps in a row" in why and "step 8" in why


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_controller_that_dies_meanwhile_leaves_the_rollback_to_the_next_one_once(
    tmp_path: Path, moment: str
) -> None:
    calm = without_attempts(_world(tmp_path / "calm").run())
    folder = tmp_path / "job"
    with pytest.MonkeyPatch.context() as patch:
        MOMENTS[moment](patch, lambda: (folder / rollbacks.ROLLBACKS).exists())
        with pytest.raises(SystemExit):
            _world(folder).run()
    again = _world(folder)
    assert without_attempts(again.run()) == calm
    assert again.board.get().restarts.rollback == 1 and losses(folder) == losses(tmp_path / "calm")


def test_a_job_that_only_stops_says_that_it_has_diverged_and_goes_on_when_it_is_resumed(
    tmp_path: Path,
) -> None:
    world = _world(tmp_path, "stop")
    world.run()
    status = world.board.get()
    assert (status.phase, status.diverged, status.regressed, world.starts) == (Phase.FAILED, True, False, 1)
    assert status.message.startswith("divergence: critic/score/mean was below 0.01") and status.step == LAST
    again = _world(tmp_path, "stop")
    again.resumes = 1
    again.run()
    assert (again.board.get().phase, again.board.get().diverged) == (Phase.SUCCEEDED, False)


def test_rollbacks_of_a_divergence_are_limited_too(tmp_path: Path) -> None:
    world = _world(tmp_path, always=True)
    world.run()
    status = world.board.get()
    assert (status.phase, status.diverged, status.restarts.rollback) == (Phase.FAILED, True, 1)
    assert status.message.startswith("divergence.rollbacks (1) used up: divergence: critic/score/mean was")


@pytest.mark.parametrize(
    "changes",
    [
        {"divergence": {"steps": 4}},
        {"steps": LAST},
        {"divergence": {"limits": [{"metric": "x", "maximum": 1}]}},
    ],
    ids=["too-few-steps", "last-step", "other-metric"],
)
def test_other_jobs_go_on(tmp_path: Path, changes: dict[str, Any]) -> None:
    world = _world(tmp_path, **changes)
    world.run()
    assert world.board.get().phase == Phase.SUCCEEDED and world.starts == 1


def _watch(**limit: float) -> DivergenceWatch:
    spec = {"limits": [{"metric": "kl"} | limit], "steps": 2, "onDivergence": "rollback"}
    return DivergenceWatch(DivergenceSpec.model_validate(spec))


@pytest.mark.parametrize(
    ("values", "diverged"),
    [
        ([0.1, 2.0, 2.0], True),
        ([2.0, 0.1, 2.0], False),
        ([2.0, 2.0, 0.1], False),
        ([0.1, math.nan, math.inf], True),
        ([1.0, 1.0, 1.0], False),
    ],
)
def test_steps_in_a_row_outside_of_a_range_are_a_divergence(values: list[float], diverged: bool) -> None:
    live, again = _watch(maximum=1.0), _watch(maximum=1.0)
    for step, value in enumerate(values, 1):
        live.note(step, {"kl": value})
    again.begin_attempt([{"step": step, "kl": value} for step, value in enumerate(values, 1)], -1)
    for watch in (live, again):
        watch.check(3, {})  # no last step is a divergence
        if not diverged:
            watch.check(9, {"cursor": 7})
            continue
        with pytest.raises(DivergedError, match="kl was above 1, or no number, in 2 steps in a row") as error:
            watch.check(9, {"cursor": 7})
        back = error.value.back
        assert back is not None and back.choose([0, 1, 2, 3]) == 1 and back.choose([2, 3]) is None


def test_steps_before_a_resumption_and_metrics_that_are_missing_say_nothing() -> None:
    watch = _watch(minimum=0.5, maximum=1.0)
    watch.begin_attempt([{"step": 1, "kl": 2.0}, {"step": 2, "kl": 0.1}], 1)
    watch.check(9, {})
    watch.note(3, {"loss": 1.0})
    watch.check(9, {})
    watch.note(4, {"kl": 0.1})
    with pytest.raises(DivergedError, match=r"kl was below 0\.5 or above 1, or no number, in 2 steps"):
        watch.check(9, {})
