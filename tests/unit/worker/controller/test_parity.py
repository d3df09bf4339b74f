"""A trainer and engines that disagree are told, with the figure and the place."""

import numpy as np
import pytest

from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.controller.recovery.attempt_end import failure_of
from grpo_worker.controller.training.parity import (
    NotFiniteError,
    ParityError,
    check_configs,
    check_finite,
    check_log_probs,
    check_routers,
)
from grpo_worker.rollout.sampling import Sample


def _batch(gap: float) -> RaggedBatch:
    engine = np.array([-1, -2, -3], np.float32)
    trainer = engine.copy()
    trainer[1] += gap
    lengths = np.array([3, 2], np.int32)
    return RaggedBatch(np.array([1, 1], np.int32), lengths, 3,
                       response={"old_log_probs": trainer, "rollout_log_probs": engine})  # fmt: skip


def test_a_small_gap_passes() -> None:
    check_log_probs(_batch(0.29), 0.1)


@pytest.mark.parametrize("gap", [0.31, -5.0])
def test_a_large_one_is_refused(gap: float) -> None:
    with pytest.raises(ParityError, match=r"maxLogProbGap=0\.1 .* at sample 0, token 2"):
        check_log_probs(_batch(gap), 0.1)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("column", ["old_log_probs", "rollout_log_probs"])
def test_a_log_prob_that_is_no_number_names_engine_and_sample(column: str, value: float) -> None:
    samples = [Sample(7, 0, (1, 2), (-1.0, -2.0), 3, "engine-4"), Sample(7, 1, (3,), (-3.0,), 3, "engine-5")]
    batch = _batch(0.0)
    check_finite(batch, samples)
    batch.response[column][1] = value
    with pytest.raises(NotFiniteError, match=r"engine-4 computed .* for sample 7\.0, token 1 of") as caught:
        check_finite(batch, samples)
    ours = column == "old_log_probs"
    assert caught.value.engines == (frozenset() if ours else {"engine-4"})
    said = str(caught.value)
    assert said.startswith("the trainer" if ours else "engine-4") and "1 of 2 samples" in said
    failure = failure_of(caught.value)
    assert (failure.cause, failure.final) == ("job", False)


CONFIG = {"model_type": "deepseek_v3", "rope_theta": 10000.0, "torch_dtype": "bfloat16"}


def test_equal_configurations_pass_whatever_their_dtype_says() -> None:
    check_configs(CONFIG, {"engine-0": CONFIG, "engine-1": CONFIG | {"torch_dtype": "float32"}})


def test_a_configuration_that_differs_is_refused_by_field_and_engine() -> None:
    other = {"model_type": "deepseek_v3", "rope_theta": 50000.0, "n_group": 8}
    with pytest.raises(ParityError) as caught:
        check_configs(CONFIG, {"engine-0": CONFIG, "engine-1": other})
    said = str(caught.value)
    assert "engine-1 runs another model" in said
    assert "rope_theta: trainer 10000.0, engine 50000.0" in said
    assert "n_group: trainer None, engine 8" in said


def test_routers_that_disagree_are_refused() -> None:
    check_routers(0.95, 0.9)
    for agreement in (0.5, float("nan")):
        with pytest.raises(ParityError, match=r"minRouterAgreement=0\.9"):
            check_routers(agreement, 0.9)
