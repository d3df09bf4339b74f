"""Configurations of NeMo-RL, and what becomes of them."""

from typing import Any

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.convert.choices import Choices
from grpo_operator.convert.convert import Conversion, convert
from grpo_operator.convert.reading.source import Framework

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


def spec(above: str = "{}", **choices: Any) -> GRPOJobSpec:
    return GRPOJobSpec.model_validate(converted(above, **choices).manifest["spec"])
