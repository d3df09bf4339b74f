"""Configurations of NeMo-RL become jobs, or an error says why not."""

from typing import Any

import pytest

from grpo_operator.convert.choices import Choices
from grpo_operator.convert.convert import convert
from grpo_operator.convert.errors import ConvertError
from grpo_operator.convert.reading.readers import detect
from grpo_operator.convert.reading.source import Framework
from grpo_operator.convert.reading.yaml_config import parents
from support.nemo_rl_configs import BASE, converted, spec
from support.verl_scripts import value


@pytest.mark.parametrize(
    ("above", "path", "expected"),
    [
        ("{}", "data.trainBatchSize", 64),
        ("{}", "trainer.miniBatchSize", 32),
        ("{}", "trainer.maxTokensPerGpu", 8192),
        ("{}", "data.promptLength", 1024),
        ("{}", "data.responseLength", 3072),
        ("{}", "algorithm.klCtrl.klCoef", 0.01),
        ("{}", "algorithm.clipRatioHigh", 0.3),
        ("{}", "trainer.optimizer.lr", 5e-6),
        ("{}", "trainer.optimizer.lrWarmupSteps", 26),
        ("{}", "trainer.parallelism.auto", True),
        ("{}", "reward.builtin", "math"),
        ("{}", "totalSteps", 200),
        ("policy: {generation: {max_new_tokens: 1000}}", "data.responseLength", 1000),
        (
            "grpo: {adv_estimator: {name: reinforce_plus_plus, minus_baseline: false}}",
            "algorithm.advEstimator",
            "reinforce_plus_plus",
        ),
        ("grpo: {adv_estimator: {normalize_rewards: false}}", "algorithm.normAdvByStd", False),
        ("loss_fn: {token_level_loss: false}", "algorithm.lossAggMode", "seq-mean-token-mean"),
        ("loss_fn: {sequence_level_importance_ratios: true}", "algorithm.policyLoss", "gspo"),
        ("loss_fn: {reference_policy_kl_penalty: 0}", "algorithm.useKlLoss", False),
        ("loss_fn: {use_importance_sampling_correction: true}", "algorithm.rolloutCorrection.tisCap", 1000.0),
        (
            "grpo: {normalize_rewards: false, use_leave_one_out_baseline: true}",
            "algorithm.advEstimator",
            "rloo",
        ),
        (
            "grpo: {reward_scaling: {enabled: true, target_min: -1.0}, reward_shaping: {enabled: true, "
            "overlong_buffer_length: 128, overlong_buffer_penalty: 1}}",
            "algorithm.overlong.penalty",
            0.5,
        ),
        (
            "policy: {megatron_cfg: {enabled: true, pipeline_model_parallel_size: 2, optimizer: {lr: 1e-7}}}",
            "trainer.parallelism.pipeline",
            2,
        ),
        (
            "policy: {megatron_cfg: {enabled: true, pipeline_model_parallel_size: 2, optimizer: {lr: 1e-7}}}",
            "trainer.optimizer.lr",
            1e-7,
        ),
    ],
)
def test_an_option_becomes_a_field(above: str, path: str, expected: Any) -> None:
    assert value(spec(above), path) == expected


@pytest.mark.parametrize(
    ("above", "message"),
    [
        ("loss_fn: {use_cispo: true}", "loss_fn.use_cispo=true: the policy losses are vanilla and gspo"),
        ("loss_fn: {new_term: 1}", "loss_fn.new_term=1: it is unknown here and may change"),
        ("grpo: {adv_estimator: {name: gdpo}}", "grpo.adv_estimator.name=gdpo: no counterpart"),
        ("data: {default: {env_name: reward_model}}", "env_name=reward_model: jobs have no such verifier"),
        ("grpo: {overlong_filtering: true}", "grpo.overlong_filtering=true: responses of full length"),
        ("grpo: {max_rollout_turns: 5}", "grpo.max_rollout_turns=5: responses have one turn"),
        (
            "policy: {dtensor_cfg: {lora_cfg: {enabled: true}}}",
            "enabled=true: jobs train all weights",
        ),
        ("policy: {max_grad_norm: '${oc.env:NORM}'}", "${oc.env:NORM} is not in the configuration"),
        ("grpo: {async_grpo: {enabled: true, max_trajectory_age_steps: 4}}", "samples may be one step old"),
    ],
)
def test_what_would_train_something_else_is_an_error(above: str, message: str) -> None:
    with pytest.raises(ConvertError) as error:
        converted(above)
    assert message in str(error.value)


def test_engines_take_nodes_of_the_cluster() -> None:
    above = """
cluster: {num_nodes: 3}
policy:
  generation:
    colocated: {enabled: false, resources: {num_nodes: 1}}
    vllm_cfg: {tensor_parallel_size: 4}
grpo: {async_grpo: {enabled: true, max_trajectory_age_steps: 1}}
"""
    done = spec(above)
    assert value(done, "trainer.nodes") == 2 and value(done, "rollout.template.replicas") == 2
    assert value(done, "mode") == "static" and value(done, "staleness.maxVersionLag") == 1


def test_both_pools_may_be_on_one_node() -> None:
    above = "policy: {generation: {colocated: {enabled: false, resources: {gpus_per_node: 2}}}}"
    done = spec(above)
    assert value(done, "trainer.nodes") == 1 and value(done, "trainer.gpusPerNode") == 6
    assert value(done, "rollout.template.replicas") == 2


def test_the_leave_one_out_baseline_is_reported() -> None:
    missing = converted("grpo: {use_leave_one_out_baseline: true}").missing
    assert any("grpo.use_leave_one_out_baseline=true: a group's mean" in line for line in missing)


def test_other_methods_and_parents_are_recognized() -> None:
    assert detect(BASE) is Framework.NEMO_RL
    assert detect("defaults: base.yaml\ndata: {}\n") is Framework.NEMO_RL
    assert parents("defaults: ../base.yaml\ngrpo: {}\n") == ["../base.yaml"]
    with pytest.raises(ConvertError, match="no section grpo: it is of sft"):
        convert(Framework.NEMO_RL, ["sft: {max_num_steps: 1}\npolicy: {}\n"], Choices(), {})
