"""The line of a step in the controller's log."""

import pytest

from grpo_worker.controller.step_records import step_line


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
