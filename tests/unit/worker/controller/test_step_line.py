"""The line of a step in the controller's log."""

from grpo_worker.controller.step_records import step_line


def test_a_step_is_one_line_with_reward_pace_and_the_long_phases() -> None:
    metrics = {
        "critic/score/mean": 0.51234, "timing_s/step": 12.34, "perf/throughput": 812.6, "timing_s/gen": 8.0,
        "timing_s/update_actor": 3.0, "timing_s/update_weights": 0.1, "timing_s/save_checkpoint": 0.001,
    }  # fmt: skip
    line = "step 7: reward 0.512, 12.3 s (generate 8.0 s, update 3.0 s, weights 0.1 s), 813 tokens/s and GPU"
    assert step_line(7, metrics) == line
