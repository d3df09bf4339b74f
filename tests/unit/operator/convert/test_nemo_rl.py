"""Configurations of NeMo-RL become jobs, or an error says why not."""

from typing import Any

import pytest

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.convert.choices import Choices
from grpo_operator.convert.convert import Conversion, convert
from grpo_operator.convert.errors import ConvertError
from grpo_operator.convert.reading.readers import detect
from grpo_operator.convert.reading.source import Framework
from grpo_operator.convert.reading.yaml_config import parents

BASE = """
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 8, max_num_steps: 200, normalize_rewards: true}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.3, ratio_clip_c: null}
policy:
  model_name: Qwen/Qwen3-8B
  train_global_batch_size: 256
  train_micro_batch_size: 2
  max_total_sequence_length: 4096
  precision: bfloat16
  max_grad_norm: 1.0
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.999]}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_iters: 13}}
    - {milestones: [13]}
  sequence_packing:
    enabled: true
    train_mb_tokens: "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}"
  generation:
    max_new_tokens: ${policy.max_total_sequence_length}
    temperature: 1.0
    val_temperature: ${.temperature}
    top_k: null
    colocated: {enabled: true}
    vllm_cfg: {tensor_parallel_size: 1, gpu_memory_utilization: 0.6}
data: {train: {dataset_name: OpenMathInstruct-2}}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


def converted(above: str = "{}", **choices: Any) -> Conversion:
    return convert(Framework.NEMO_RL, [BASE, above], Choices(**choices), {})


def value(conversion: Conversion, path: str) -> Any:
    found: Any = GRPOJobSpec.model_validate(conversion.manifest["spec"]).wire()
    for name in path.split("."):
        found = found[name]
    return found


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
    assert value(converted(above), path) == expected


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
    done = converted(above)
    assert value(done, "trainer.nodes") == 2 and value(done, "rollout.template.replicas") == 2
    assert value(done, "mode") == "static" and value(done, "staleness.maxVersionLag") == 1


def test_both_pools_may_be_on_one_node() -> None:
    above = "policy: {generation: {colocated: {enabled: false, resources: {gpus_per_node: 2}}}}"
    done = converted(above)
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
