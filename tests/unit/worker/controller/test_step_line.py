"""The line of a step in the controller's log."""

import logging
from pathlib import Path

import pytest

from grpo_worker.common.log_lines import LABELS
from grpo_worker.controller.step_records import step_line
from grpo_worker.roles.dispatch import Columns
from grpo_worker.roles.shared_batch import SharedRows
from support.loop_world import Ranks, World


@pytest.mark.parametrize(("oldest", "weights"), [(6.0, "v6"), (5.0, "v5 to v6")])
def test_a_step_is_one_line_with_reward_weights_pace_and_the_long_phases(oldest: float, weights: str) -> None:
    metrics = {
        "critic/score/mean": 0.51234, "timing_s/step": 12.34, "perf/throughput": 812.6, "timing_s/gen": 8.0,
        "timing_s/update_actor": 3.0, "timing_s/update_weights": 0.1, "timing_s/save_checkpoint": 0.001,
        "rollout/oldest_version": oldest, "rollout/newest_version": 6.0,
    }  # fmt: skip
    assert step_line(7, metrics) == (
        f"step 7: reward 0.512 with weights {weights}, 12.3 s (generate 8.0 s, update 3.0 s, weights 0.1 s), "
        "813 tokens/s and GPU"
    )


def test_controller_and_ranks_know_attempt_and_step_of_their_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    for name in ("attempt", "step"):
        monkeypatch.setattr(LABELS, name, None)
    world, log_probs = World(tmp_path, 3), Ranks._log_probs
    seen = set[tuple[int | None, ...]]()

    def note(ranks: Ranks, rows: SharedRows) -> Columns:
        seen.add((LABELS.attempt, LABELS.step, rows._shared.step))
        return log_probs(ranks, rows)

    monkeypatch.setattr(Ranks, "_log_probs", note)
    world.run()
    assert seen == {(1, step, step) for step in (1, 2, 3)}
    lines = [record for record in caplog.records if record.getMessage().startswith("step ")]
    assert len(lines) == 3, "a line for each step"
    for step, record in enumerate(lines, 1):  # they are written beside the next step
        assert record.getMessage().startswith(f"step {step}: ") and vars(record)["step"] == step
