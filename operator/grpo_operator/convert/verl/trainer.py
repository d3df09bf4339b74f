"""Options of verl for the trainer."""

from grpo_operator.convert.remedies import MEMORY, NO_PROFILE, PROFILES
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
from grpo_operator.convert.verl.names import ACTOR, REF, ROLLOUT, TRANSFORMER


def _sizes(prefix: str) -> Table:
    """Return the rules of Megatron's parallel sizes."""
    return {
        f"{prefix}.tensor_model_parallel_size": Fact("tensor", "trainer.parallelism.tensor", integer),
        f"{prefix}.pipeline_model_parallel_size": Fact("pipeline", "trainer.parallelism.pipeline", integer),
        f"{prefix}.context_parallel_size": Fact("context", "trainer.parallelism.context", integer),
        f"{prefix}.expert_model_parallel_size": Fact("expert", "trainer.parallelism.expert", integer),
        f"{prefix}.expert_tensor_parallel_size": Fact(
            "expert_tensor", "trainer.parallelism.expertTensor", optional(integer)
        ),
        f"{prefix}.virtual_pipeline_model_parallel_size": Fact(
            "virtual_pipeline", "trainer.parallelism.virtualPipeline", optional(integer)
        ),
        f"{prefix}.sequence_parallel": Always("on with tensor > 1", (True,)),
        f"{prefix}.param_offload": Fact("offload_parameters", "trainer.offload.parameters", truth),
        f"{prefix}.grad_offload": Fact("offload_gradients", "trainer.offload.gradients", truth),
        f"{prefix}.optimizer_offload": Fact("offload_optimizer", "trainer.offload.optimizer", truth),
        f"{prefix}.use_mbridge": Always("weights are read from the model's directory"),
        f"{prefix}.vanilla_mbridge": Always("weights are read from the model's directory"),
        f"{prefix}.use_dist_checkpointing": Always("weights are read from the model's directory"),
        f"{prefix}.dist_checkpointing_path": Always("weights are read from the model's directory"),
        f"{prefix}.seed": Always("as seed"),
        f"{prefix}.*": Missing("no field here: see spec.trainer.megatron"),
    }


TRAINER: Table = {
    **_sizes(f"{ACTOR}.megatron"),
    f"{TRANSFORMER}.recompute_granularity": Take(
        "trainer.recompute", optional(choice(full="full", selective="selective"))
    ),
    f"{TRANSFORMER}.recompute_method": Fact("recompute_method", "trainer.recomputeLayers", same),
    f"{TRANSFORMER}.recompute_num_layers": Fact(
        "recompute_layers", "trainer.recomputeLayers", optional(integer)
    ),
    f"{TRANSFORMER}.recompute_modules": Fact("recompute_modules", "trainer.recomputeModules", same),
    f"{TRANSFORMER}.num_layers_in_first_pipeline_stage": Fact(
        "first_stage", "trainer.parallelism.layersInFirstStage", optional(integer)
    ),
    f"{TRANSFORMER}.num_layers_in_last_pipeline_stage": Fact(
        "last_stage", "trainer.parallelism.layersInLastStage", optional(integer)
    ),
    f"{TRANSFORMER}.account_for_embedding_in_pipeline_split": Fact(
        "embedding_counts", "trainer.parallelism.layersInFirstStage", truth
    ),
    f"{TRANSFORMER}.account_for_loss_in_pipeline_split": Fact(
        "loss_counts", "trainer.parallelism.layersInLastStage", truth
    ),
    f"{TRANSFORMER}.moe_token_dispatcher_type": Always(
        "trainer.moe.dispatcher: auto takes DeepEP where it is"
    ),
    f"{TRANSFORMER}.moe_enable_deepep": Always("trainer.moe.dispatcher: auto takes DeepEP where it is"),
    f"{TRANSFORMER}.moe_aux_loss_coeff": Take("trainer.moe.auxLossCoefficient", real),
    f"{TRANSFORMER}.moe_router_bias_update_rate": Take("trainer.moe.biasUpdateRate", real),
    f"{ACTOR}.strategy": Always("the trainer is Megatron-Core"),
    f"{ACTOR}.fsdp_config.param_offload": Fact("offload_parameters", "trainer.offload.parameters", truth),
    f"{ACTOR}.fsdp_config.optimizer_offload": Fact("offload_optimizer", "trainer.offload.optimizer", truth),
    f"{ACTOR}.fsdp_config.*": Always("Megatron-Core's distributed optimizer shards the state"),
    f"{ACTOR}.ulysses_sequence_parallel_size": Always(
        "sequences are split by parallelism.tensor and parallelism.context"
    ),
    f"{ACTOR}.ppo_mini_batch_size": Fact("mini_batch", "trainer.miniBatchSize", integer),
    f"{ACTOR}.ppo_micro_batch_size": Missing("deprecated in verl: write ppo_micro_batch_size_per_gpu"),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": Fact(
        "micro_batch", "trainer.microBatchSizePerGpu", optional(integer)
    ),
    f"{ACTOR}.use_dynamic_bsz": Fact("packed", "trainer.maxTokensPerGpu", truth),
    f"{ACTOR}.ppo_max_token_len_per_gpu": Fact("max_tokens", "trainer.maxTokensPerGpu", integer),
    f"{ROLLOUT}.log_prob_micro_batch_size": Missing("deprecated in verl: write ..._per_gpu"),
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": Fact(
        "log_prob_micro_batch", "trainer.logProbMicroBatchSizePerGpu", optional(integer)
    ),
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": Always("as trainer.maxTokensPerGpu"),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": Fact(
        "log_prob_tokens", "trainer.logProbMaxTokensPerGpu", integer
    ),
    f"{ACTOR}.optim.lr": Take("trainer.optimizer.lr", real),
    f"{ACTOR}.optim.min_lr": Take("trainer.optimizer.minLr", real),
    f"{ACTOR}.optim.lr_warmup_steps": Fact(
        "warmup_steps", "trainer.optimizer.lrWarmupSteps", optional(integer)
    ),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": Fact("warmup_ratio", "trainer.optimizer.lrWarmupSteps", real),
    f"{ACTOR}.optim.lr_decay_style": Take(
        "trainer.optimizer.lrDecayStyle", choice(constant="constant", linear="linear", cosine="cosine")
    ),
    f"{ACTOR}.optim.lr_scheduler_type": Take(
        "trainer.optimizer.lrDecayStyle", choice(constant="constant", cosine="cosine")
    ),
    f"{ACTOR}.optim.warmup_style": Take(
        "trainer.optimizer.lrDecayStyle", optional(choice(constant="constant", cosine="cosine"))
    ),
    f"{ACTOR}.optim.weight_decay": Take("trainer.optimizer.weightDecay", real),
    f"{ACTOR}.optim.betas": Fact("betas", "trainer.optimizer.adamBeta1 and adamBeta2", list),
    f"{ACTOR}.optim.clip_grad": Take("trainer.optimizer.clipGrad", real),
    f"{ACTOR}.grad_clip": Take("trainer.optimizer.clipGrad", real),
    f"{ACTOR}.optim.override_optimizer_config.*": Missing(
        "set trainer.offload.optimizer or trainer.precisionAwareOptimizer"
    ),
    f"{ACTOR}.optim.*": Missing("the optimizer is AdamW: see spec.trainer.optimizer"),
    f"{ACTOR}.checkpoint.*": Always("checkpoints hold weights, optimizer and position; see exportEverySteps"),
    f"{ACTOR}.profiler.*": Missing(PROFILES, (*NO_PROFILE, [])),
    f"{ACTOR}.use_torch_compile": Always("trainer.kernels chooses the kernels"),
    f"{ACTOR}.entropy_checkpointing": Missing(MEMORY),
    f"{ACTOR}.entropy_from_logits_with_chunking": Missing(MEMORY),
    f"{ACTOR}.calculate_entropy": Always("metrics show the entropy"),
    f"{ACTOR}.use_prefix_grouper": Missing("groups are computed sequence by sequence"),
    f"{ACTOR}.calculate_sum_pi_squared": Missing("belongs to an estimator that jobs do not have"),
    f"{ACTOR}.rollout_n": Always("as algorithm.samplesPerPrompt"),
    f"{REF}.model.path": Refused("the reference is the policy at its start: remove it"),
    f"{REF}.*": Always("the reference model has the policy's layout and batches"),
    "actor_rollout_ref.hybrid_engine": Always("mode: colocated", (True,)),
    "actor_rollout_ref.nccl_timeout": Missing("restartPolicy.hangSeconds is planned from the model's size"),
}
