"""Options of NeMo-RL, and what they become."""

from typing import Any

from grpo_operator.convert.remedies import ENGINES, LORA, PROFILES, TURNS, UNKNOWN, VALIDATION
from grpo_operator.convert.rules import (
    Always,
    Fact,
    Missing,
    Refused,
    Table,
    Take,
    choice,
    integer,
    optional,
    real,
    same,
    truth,
)

_REWARDS = "change the reward function: see docs/guides/prompts-and-rewards.md"
_CHECKPOINTS = "see spec.checkpoint"
_ZERO = (None, 0, 0.0, False)


def _top_k(value: Any) -> int:
    return -1 if value in (None, -1, 0) else integer(value)


_GRPO: Table = {
    "grpo.num_prompts_per_step": Take("data.trainBatchSize", integer),
    "grpo.num_generations_per_prompt": Take("algorithm.samplesPerPrompt", integer),
    "grpo.max_rollout_turns": Refused(TURNS, (1, None, 999999)),
    "grpo.max_num_epochs": Fact("epochs", "totalSteps", integer),
    "grpo.max_num_steps": Fact("steps", "totalSteps", integer),
    "grpo.normalize_rewards": Take("algorithm.normAdvByStd", truth),
    "grpo.use_leave_one_out_baseline": Fact("leave_one_out", "algorithm.advEstimator", truth),
    "grpo.overlong_filtering": Refused(
        "responses of full length are trained on: write false, or use the penalty"
    ),
    "grpo.advantage_clip_low": Refused("advantages are not clipped: write null", (None,)),
    "grpo.advantage_clip_high": Refused("advantages are not clipped: write null", (None,)),
    "grpo.seed": Take("seed", integer),
    "grpo.use_dynamic_sampling": Fact("filter_groups", "algorithm.filterGroups", truth),
    "grpo.dynamic_sampling_max_gen_batches": Fact(
        "filter_batches", "algorithm.filterGroups.maxNumGenBatches", integer
    ),
    "grpo.batch_multiplier": Always("more prompts are generated as filterGroups needs them"),
    "grpo.reward_shaping.enabled": Fact("overlong_enable", "algorithm.overlong", truth),
    "grpo.reward_shaping.overlong_buffer_length": Fact(
        "overlong_length", "algorithm.overlong.bufferLength", integer
    ),
    "grpo.reward_shaping.overlong_buffer_penalty": Fact(
        "overlong_penalty", "algorithm.overlong.penalty", real
    ),
    "grpo.reward_shaping.max_response_length": Always("as data.responseLength"),
    "grpo.reward_shaping.stop_properly_penalty_coef": Refused(_REWARDS, (None,)),
    "grpo.reward_scaling.enabled": Fact(
        "scaled", "algorithm.overlong.penalty, relative to the rewards", truth
    ),
    "grpo.reward_scaling.source_min": Fact("source_min", "algorithm.overlong.penalty", real),
    "grpo.reward_scaling.source_max": Fact("source_max", "algorithm.overlong.penalty", real),
    "grpo.reward_scaling.target_min": Fact("target_min", "algorithm.overlong.penalty", real),
    "grpo.reward_scaling.target_max": Fact("target_max", "algorithm.overlong.penalty", real),
    "grpo.adv_estimator.name": Take(
        "algorithm.advEstimator", choice(grpo="grpo", reinforce_plus_plus="reinforce_plus_plus_baseline")
    ),
    "grpo.adv_estimator.normalize_rewards": Take("algorithm.normAdvByStd", truth),
    "grpo.adv_estimator.use_leave_one_out_baseline": Fact("leave_one_out", "algorithm.advEstimator", truth),
    "grpo.adv_estimator.minus_baseline": Fact("minus_baseline", "algorithm.advEstimator", truth),
    "grpo.adv_estimator.*": Always("as in the section grpo"),
    "grpo.seq_logprob_error_threshold": Refused("no sample is masked by its log-probabilities: write null"),
    "grpo.invalid_tool_call_advantage": Refused(TURNS),
    "grpo.malformed_thinking_advantage": Refused(_REWARDS),
    "grpo.async_grpo.enabled": Fact("asynchronous", "staleness", truth),
    "grpo.async_grpo.max_trajectory_age_steps": Fact("lag", "staleness.maxVersionLag", integer),
    "grpo.async_grpo.in_flight_weight_updates": Fact("in_flight", "staleness.partialRollouts", truth),
    "grpo.async_grpo.*": Missing("engines keep or drop their KV cache by themselves", (0, None, False)),
    "grpo.val_*": Missing(VALIDATION),
    "grpo.max_val_samples": Missing(VALIDATION),
    "grpo.stop_at_*": Missing(VALIDATION),
    "grpo.skip_reference_policy_logprobs_calculation": Always("without a KL term there is no reference"),
    "grpo.*": Missing("no field here: see docs/reference/grpojob.md"),
    "reward_penalties.*": Refused(_REWARDS),
    "loss_fn.reference_policy_kl_penalty": Fact("kl_loss_coef", "algorithm.klCtrl.klCoef", real),
    "loss_fn.reference_policy_kl_type": Take("algorithm.klLossType", choice(k1="k1", k2="k2", k3="k3")),
    "loss_fn.kl_input_clamp_value": Missing("the KL term is not clamped", (None,)),
    "loss_fn.kl_output_clamp_value": Missing("the KL term is not clamped", (None,)),
    "loss_fn.ratio_clip_min": Take("algorithm.clipRatioLow", real),
    "loss_fn.ratio_clip_max": Take("algorithm.clipRatioHigh", real),
    "loss_fn.ratio_clip_c": Take("algorithm.clipRatioC", real),
    "loss_fn.use_on_policy_kl_approximation": Missing("the KL term is that of the samples"),
    "loss_fn.use_importance_sampling_correction": Fact("importance", "algorithm.rolloutCorrection", truth),
    "loss_fn.truncated_importance_sampling_ratio": Fact(
        "tis_cap", "algorithm.rolloutCorrection.tisCap", optional(real)
    ),
    "loss_fn.truncated_importance_sampling_ratio_min": Refused(
        "weights have an upper limit only: write null"
    ),
    "loss_fn.truncated_importance_sampling_type": Refused(
        "weights are truncated per token: write tis", (None, "tis")
    ),
    "loss_fn.sequence_level_importance_ratios": Fact("sequence_ratios", "algorithm.policyLoss", truth),
    "loss_fn.token_level_loss": Fact("token_loss", "algorithm.lossAggMode", truth),
    "loss_fn.force_on_policy_ratio": Always("with one update in a step the ratio is 1"),
    "loss_fn.use_kl_in_reward": Always("algorithm.useKlInReward"),
    "loss_fn.use_cispo": Refused("the policy losses are vanilla and gspo: write false"),
    "loss_fn.disable_ppo_ratio": Refused("the loss has the importance ratio: write false"),
    "loss_fn.positive_example_nll_weight": Refused("the loss has no such term: write 0", _ZERO),
    "loss_fn.*": Refused(UNKNOWN),
}
_POLICY: Table = {
    "policy.model_name": Fact("model", "model.path", str, text=True),
    "policy.tokenizer.chat_template_kwargs": Missing("set data.chatTemplateKwargs"),
    "policy.tokenizer.*": Always("the tokenizer is that of the model"),
    "policy.hf_config_overrides": Missing("change config.json in the model's directory"),
    "policy.hf_config_overrides.*": Missing("change config.json in the model's directory"),
    "policy.train_global_batch_size": Fact("mini_batch_samples", "trainer.miniBatchSize", integer),
    "policy.train_micro_batch_size": Fact("micro_batch", "trainer.microBatchSizePerGpu", integer),
    "policy.logprob_batch_size": Fact("log_prob_micro_batch", "trainer.logProbMicroBatchSizePerGpu", integer),
    "policy.generation_batch_size": Always("engines take all prompts of a step"),
    "policy.max_total_sequence_length": Fact("total_length", "data.promptLength and responseLength", integer),
    "policy.precision": Missing("weights are bf16, main weights fp32", ("bfloat16",)),
    "policy.max_grad_norm": Take("trainer.optimizer.clipGrad", real),
    "policy.dynamic_batching.enabled": Fact("dynamic", "trainer.maxTokensPerGpu", truth),
    "policy.dynamic_batching.train_mb_tokens": Fact("dynamic_tokens", "trainer.maxTokensPerGpu", integer),
    "policy.dynamic_batching.logprob_mb_tokens": Fact(
        "dynamic_log_prob_tokens", "trainer.logProbMaxTokensPerGpu", integer
    ),
    "policy.dynamic_batching.*": Always("trainer.maxTokensPerGpu packs sequences"),
    "policy.sequence_packing.enabled": Fact("packed", "trainer.maxTokensPerGpu", truth),
    "policy.sequence_packing.train_mb_tokens": Fact("max_tokens", "trainer.maxTokensPerGpu", integer),
    "policy.sequence_packing.logprob_mb_tokens": Fact(
        "log_prob_tokens", "trainer.logProbMaxTokensPerGpu", integer
    ),
    "policy.sequence_packing.*": Always("trainer.maxTokensPerGpu packs sequences"),
    "policy.generation.max_new_tokens": Fact("new_tokens", "data.responseLength", integer),
    "policy.generation.temperature": Take("algorithm.temperature", real),
    "policy.generation.top_p": Take("algorithm.topP", real),
    "policy.generation.top_k": Take("algorithm.topK", _top_k),
    "policy.generation.stop_token_ids": Take("algorithm.stopTokenIds", list),
    "policy.generation.stop_strings": Fact("stop", "algorithm.stop", list),
    "policy.generation.backend": Missing(
        "engines are SGLang's: the samples' distribution is the same", ("sglang",)
    ),
    "policy.generation.vllm_cfg.tensor_parallel_size": Fact(
        "engine_gpus", "rollout.template.engine", integer
    ),
    "policy.generation.vllm_cfg.expert_parallel_size": Fact(
        "engine_expert", "engine.expertParallel", integer
    ),
    "policy.generation.vllm_cfg.gpu_memory_utilization": Fact(
        "memory_fraction", "engine.memoryFraction", real
    ),
    "policy.generation.vllm_cfg.max_model_len": Always("engine.contextLength: prompt and response"),
    "policy.generation.vllm_cfg.precision": Missing("see engine.quantization", ("bfloat16",)),
    "policy.generation.colocated.enabled": Fact("colocated", "mode", truth),
    "policy.generation.colocated.resources.gpus_per_node": Fact(
        "engine_node_gpus", "rollout.template", optional(integer)
    ),
    "policy.generation.colocated.resources.num_nodes": Fact(
        "engine_nodes", "rollout.template.replicas", optional(integer)
    ),
    "policy.generation.val_*": Missing(VALIDATION),
    "policy.generation.vllm_cfg.*": Missing(ENGINES),
    "policy.generation.*": Missing(ENGINES),
    "policy.draft.enabled": Missing("engines draft with an MTP layer: engine.speculative"),
    "policy.draft.*": Always("belongs to policy.draft.enabled"),
    "policy.dtensor_cfg.lora_cfg.enabled": Refused(LORA),
    "policy.dtensor_cfg.activation_checkpointing": Take(
        "trainer.recompute", lambda value: "full" if truth(value) else "none"
    ),
    "policy.dtensor_cfg.cpu_offload": Fact("offload_optimizer", "trainer.offload.optimizer", truth),
    "policy.dtensor_cfg.*": Always("the trainer is Megatron-Core"),
    "policy.scheduler": Fact("scheduler", "trainer.optimizer", same),
    "policy.make_sequence_length_divisible_by": Always("sequences are padded as the layout needs"),
    "policy.*": Missing("no field here: see spec.trainer"),
}
_REST: Table = {
    "checkpointing.save_period": Fact("save_every", "checkpoint.everySteps", integer),
    "checkpointing.keep_top_k": Take("checkpoint.keep", integer),
    "checkpointing.enabled": Always("jobs save checkpoints", (True,)),
    "checkpointing.checkpoint_dir": Always("checkpoint.store has a folder for each job"),
    "checkpointing.*": Missing(_CHECKPOINTS),
    "cluster.gpus_per_node": Fact("gpus_per_node", "trainer.gpusPerNode", integer),
    "cluster.num_nodes": Fact("nodes", "trainer.nodes", integer),
    "cluster.*": Always("KubeRay starts Ray: see spec.scheduling"),
    "data.env_name": Fact("environment", "reward", str),
    "data.default.env_name": Fact("environment", "reward", str),
    "data.train.env_name": Fact("environment", "reward", str),
    "data.train*": Always("data.train: see below"),
    "data.dataset_name": Always("data.train: see below"),
    "data.shuffle": Missing("epochs are shuffled: data.order names a function that keeps the order", (True,)),
    "data.max_input_seq_length": Always("data.promptLength"),
    "data.validation*": Missing(VALIDATION),
    "data.*": Missing("prompts are columns of the files: write them with system prompt and form"),
    "env.*": Missing("the reward is spec.reward"),
    "logger.wandb_enabled": Fact("wandb", "observability.wandb", truth),
    "logger.wandb.project": Fact("wandb_project", "observability.wandb.project", str, text=True),
    "logger.wandb.name": Fact("name", "metadata.name", str, text=True),
    "logger.*": Always("see spec.observability"),
    "data_plane.*": Always("samples go through Ray's object store"),
    "on_policy_distillation": Refused("jobs have no teacher: write null"),
    "on_policy_distillation.*": Refused("jobs have no teacher: remove it"),
    "async_rl.sampler.*": Refused(UNKNOWN),
    "async_rl.*": Missing("see spec.staleness and spec.restartPolicy"),
    "nsight.*": Missing(PROFILES),
}
TABLE: Table = {**_GRPO, **_POLICY, **_REST}


def backend_table(megatron: bool) -> Table:
    """Return the rules of layout and optimizer, which the two backends name differently."""
    if not megatron:
        prefix = "policy.optimizer"
        return {
            f"{prefix}.name": Missing("the optimizer is AdamW", ("torch.optim.AdamW",)),
            f"{prefix}.kwargs.lr": Take("trainer.optimizer.lr", real),
            f"{prefix}.kwargs.weight_decay": Take("trainer.optimizer.weightDecay", real),
            f"{prefix}.kwargs.betas": Fact("betas", "trainer.optimizer.adamBeta1 and adamBeta2", list),
            f"{prefix}.*": Always("see spec.trainer.optimizer"),
        }
    prefix, sizes = "policy.megatron_cfg", "trainer.parallelism"
    return {
        f"{prefix}.enabled": Always("the trainer is Megatron-Core"),
        f"{prefix}.tensor_model_parallel_size": Fact("tensor", f"{sizes}.tensor", integer),
        f"{prefix}.pipeline_model_parallel_size": Fact("pipeline", f"{sizes}.pipeline", integer),
        f"{prefix}.context_parallel_size": Fact("context", f"{sizes}.context", integer),
        f"{prefix}.expert_model_parallel_size": Fact("expert", f"{sizes}.expert", integer),
        f"{prefix}.expert_tensor_parallel_size": Fact("expert_tensor", f"{sizes}.expertTensor", integer),
        f"{prefix}.num_layers_in_first_pipeline_stage": Fact(
            "first_stage", f"{sizes}.layersInFirstStage", integer
        ),
        f"{prefix}.num_layers_in_last_pipeline_stage": Fact(
            "last_stage", f"{sizes}.layersInLastStage", integer
        ),
        f"{prefix}.activation_checkpointing": Take(
            "trainer.recompute", lambda value: "full" if truth(value) else "none"
        ),
        f"{prefix}.freeze_moe_router": Missing(
            "routers are trained with the other weights, where a model has them"
        ),
        f"{prefix}.moe_router_bias_update_rate": Fact("bias_rate", "trainer.moe.biasUpdateRate", real),
        f"{prefix}.optimizer.lr": Take("trainer.optimizer.lr", real),
        f"{prefix}.optimizer.min_lr": Take("trainer.optimizer.minLr", real),
        f"{prefix}.optimizer.weight_decay": Take("trainer.optimizer.weightDecay", real),
        f"{prefix}.optimizer.adam_beta1": Take("trainer.optimizer.adamBeta1", real),
        f"{prefix}.optimizer.adam_beta2": Take("trainer.optimizer.adamBeta2", real),
        f"{prefix}.optimizer.optimizer_cpu_offload": Fact(
            "offload_optimizer", "trainer.offload.optimizer", truth
        ),
        f"{prefix}.optimizer.*": Always("see spec.trainer.optimizer and precisionAwareOptimizer"),
        f"{prefix}.scheduler.lr_warmup_iters": Fact(
            "warmup_steps", "trainer.optimizer.lrWarmupSteps", integer
        ),
        f"{prefix}.scheduler.lr_decay_style": Take(
            "trainer.optimizer.lrDecayStyle", choice(constant="constant", linear="linear", cosine="cosine")
        ),
        f"{prefix}.scheduler.*": Always("see spec.trainer.optimizer"),
        f"{prefix}.peft.enabled": Refused(LORA),
        f"{prefix}.fp8_cfg.enabled": Missing("see trainer.precision: fp8-block128"),
        f"{prefix}.*": Always("trainer.kernels and the planner decide about it"),
        "policy.optimizer*": Always("policy.megatron_cfg.optimizer holds"),
    }
