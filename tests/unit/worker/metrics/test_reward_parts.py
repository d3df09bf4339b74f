"""Metrics of the parts of rewards."""

from grpo_worker.common.reward_parts import Reward
from grpo_worker.metrics.reward_parts import PartMeans


def test_each_part_has_its_mean_over_the_samples_that_have_it() -> None:
    scores = [Reward(1.0, {"format": 1.0, "length": 40.0}), 0.5, Reward(0.0, {"format": 0.25})]
    assert PartMeans().of(scores) == {"reward/format/mean": 0.625, "reward/length/mean": 40.0}
    assert PartMeans().of([0.5, 1.0]) == {}


def test_the_number_of_metrics_of_a_run_is_bounded() -> None:
    means = PartMeans()
    first = means.of([Reward(0.0, {f"part {number:02}": 1.0}) for number in range(30)])
    assert len(first) == 30
    second = means.of([Reward(0.0, {f"new {number}": 2.0 for number in reversed(range(5))})])
    assert second == {"reward/new 0/mean": 2.0, "reward/new 1/mean": 2.0}
    again = means.of([Reward(0.0, {"later": 3.0, "part 07": 4.0, "new 1": 5.0})])
    assert again == {"reward/part 07/mean": 4.0, "reward/new 1/mean": 5.0}
