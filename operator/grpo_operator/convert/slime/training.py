"""Options of slime for the trainer, the engines and the run."""

from typing import Any

from grpo_operator.convert.remedies import ENGINES, LORA, VALIDATION
from grpo_operator.convert.rules import (
    Always,
    Fact,
    Missing,
    Refused,
    Table,
    Take,
    choice,
    integer,
    real,
    same,
    truth,
)

_KERNELS = Always("trainer.kernels chooses the kernels")
_WEIGHTS = Always("weights are read from the model's directory")
_DISPATCHER = Always("trainer.moe.dispatcher: auto takes DeepEP where it is")


def _beta(value: Any) -> float:
    return real(value)


def _megabytes(value: Any) -> int:
    return max(1, integer(value) // 2**20)


TRAINER: Table = {
    "program": Fact("program", "staleness.maxVersionLag", str),
    "--tensor-model-parallel-size": Fact("tensor", "trainer.parallelism.tensor", integer),
    "--pipeline-model-parallel-size": Fact("pipeline", "trainer.parallelism.pipeline", integer),
    "--context-parallel-size": Fact("context", "trainer.parallelism.context", integer),
    "--expert-model-parallel-size": Fact("expert", "trainer.parallelism.expert", integer),
    "--expert-tensor-parallel-size": Fact("expert_tensor", "trainer.parallelism.expertTensor", integer),
    "--decoder-first-pipeline-num-layers": Fact(
        "first_stage", "trainer.parallelism.layersInFirstStage", integer
    ),
    "--decoder-last-pipeline-num-layers": Fact(
        "last_stage", "trainer.parallelism.layersInLastStage", integer
    ),
    "--sequence-parallel": Always("on with tensor > 1"),
    "--recompute-granularity": Take("trainer.recompute", choice(full="full", selective="selective")),
    "--recompute-method": Fact("recompute_method", "trainer.recomputeLayers", same),
    "--recompute-num-layers": Fact("recompute_layers", "trainer.recomputeLayers", integer),
    "--recompute-modules": Fact("recompute_modules", "trainer.recomputeModules", same),
    "--use-dynamic-batch-size": Fact("packed", "trainer.maxTokensPerGpu", truth),
    "--max-tokens-per-gpu": Fact("max_tokens", "trainer.maxTokensPerGpu", integer),
    "--log-probs-max-tokens-per-gpu": Fact("log_prob_tokens", "trainer.logProbMaxTokensPerGpu", integer),
    "--micro-batch-size": Fact("micro_batch", "trainer.microBatchSizePerGpu", integer),
    "--log-probs-chunk-size": Missing("the planner and trainer.recompute decide about memory"),
    "--optimizer": Missing("the optimizer is AdamW", ("adam",)),
    "--lr": Take("trainer.optimizer.lr", real),
    "--min-lr": Take("trainer.optimizer.minLr", real),
    "--lr-decay-style": Take(
        "trainer.optimizer.lrDecayStyle", choice(constant="constant", linear="linear", cosine="cosine")
    ),
    "--lr-warmup-iters": Fact("warmup_steps", "trainer.optimizer.lrWarmupSteps", integer),
    "--lr-warmup-fraction": Fact("warmup_ratio", "trainer.optimizer.lrWarmupSteps", real),
    "--weight-decay": Take("trainer.optimizer.weightDecay", real),
    "--adam-beta1": Take("trainer.optimizer.adamBeta1", _beta),
    "--adam-beta2": Take("trainer.optimizer.adamBeta2", _beta),
    "--clip-grad": Take("trainer.optimizer.clipGrad", real),
    "--optimizer-cpu-offload": Fact("offload_optimizer", "trainer.offload.optimizer", truth),
    "--overlap-cpu-optimizer-d2h-h2d": Always("trainer.offload.optimizer copies beside computation"),
    "--use-precision-aware-optimizer": Missing("see trainer.precisionAwareOptimizer for its formats"),
    "--enable-mtp-training": Take("model.multiTokenPrediction", truth),
    "--mtp-loss-scaling-factor": Missing(
        "the MTP layer learns from the responses and leaves the policy as it is"
    ),
    "--mtp-num-layers": Always("config.json says so"),
    "--train-backend": Always("the trainer is Megatron-Core"),
    "--lora-rank": Refused(LORA),
    "--attention-dropout": Always("there is no dropout", (0, 0.0)),
    "--hidden-dropout": Always("there is no dropout", (0, 0.0)),
    "--accumulate-allreduce-grads-in-fp32": Always("gradients are fp32"),
    "--attention-softmax-in-fp32": _KERNELS,
    "--attention-backend": _KERNELS,
    "--transformer-impl": _KERNELS,
    "--no-check-for-nan-in-loss-and-grad": Missing("a loss that is no number ends the job"),
    "--moe-token-dispatcher-type": _DISPATCHER,
    "--moe-enable-deepep": _DISPATCHER,
    "--moe-aux-loss-coeff": Take("trainer.moe.auxLossCoefficient", real),
    "--moe-router-bias-update-rate": Take("trainer.moe.biasUpdateRate", real),
}
ENGINES_OF_SLIME: Table = {
    "--rollout-num-gpus": Fact("rollout_gpus", "rollout.template", integer),
    "--rollout-num-gpus-per-engine": Fact("engine_gpus", "rollout.template.engine", integer),
    "--num-gpus-per-node": Always("trainer.gpusPerNode"),
    "--sglang-mem-fraction-static": Fact("memory_fraction", "engine.memoryFraction", real),
    "--sglang-ep-size": Fact("engine_expert", "engine.expertParallel", integer),
    "--sglang-expert-parallel-size": Fact("engine_expert", "engine.expertParallel", integer),
    "--sglang-dp-size": Fact("attention_replicas", "engine.attentionDataParallel", integer),
    "--sglang-enable-dp-attention": Always("engine.attentionDataParallel above 1"),
    "--sglang-moe-dense-tp-size": Always("engine.attentionDataParallel above 1"),
    "--sglang-max-running-requests": Take("rollout.template.engine.maxRunningRequests", integer),
    "--sglang-enable-deterministic-inference": Take("rollout.template.engine.deterministic", truth),
    "--sglang-speculative-algorithm": Missing(
        "set engine.speculative: mtp and model.multiTokenPrediction: true"
    ),
    "--update-weight-buffer-size": Take("weightSync.bucketMegabytes", _megabytes),
    "--update-weight-mode": Take("weightSync.mode", choice(full="full", delta="delta")),
}
RUN: Table = {
    "--actor-num-nodes": Fact("nodes", "trainer.nodes", integer),
    "--actor-num-gpus-per-node": Fact("gpus_per_node", "trainer.gpusPerNode", integer),
    "--colocate": Fact("colocated", "mode", truth),
    "--offload": Always("mode: colocated"),
    "--hf-checkpoint": Fact("model", "model.path", str, text=True),
    "--ref-load": _WEIGHTS,
    "--load": _WEIGHTS,
    "--save": Always("checkpoint.store has a folder for each job"),
    "--save-interval": Fact("save_every", "checkpoint.everySteps", integer),
    "--balance-data": Always("ranks get about the same number of tokens"),
    "--use-wandb": Fact("wandb", "observability.wandb", truth),
    "--wandb-project": Fact("wandb_project", "observability.wandb.project", str, text=True),
    "--wandb-group": Fact("name", "metadata.name", str, text=True),
    "--wandb-team": Take("observability.wandb.entity", str),
    "--wandb-key": Missing("set WANDB_API_KEY in controller.podTemplate"),
    "--use-tensorboard": Always("observability.tensorboard"),
    "--eval-interval": Missing(VALIDATION),
    "--eval-prompt-data": Missing(VALIDATION),
    "--n-samples-per-eval-prompt": Missing(VALIDATION),
    "--eval-max-response-len": Missing(VALIDATION),
    "--eval-top-p": Missing(VALIDATION),
    "--eval-top-k": Missing(VALIDATION),
    "--eval-temperature": Missing(VALIDATION),
    "--sglang-*": Missing(ENGINES),
}
