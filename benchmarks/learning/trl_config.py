"""The hyperparameters of a job under TRL's names."""

from pathlib import Path
from typing import Any

from trl import GRPOConfig

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec


def trl_config(spec: GRPOJobSpec, steps: int, folder: Path, **own: Any) -> GRPOConfig:
    """Return TRL's configuration. ``own``: fields without a counterpart in the job, such as a batch size."""
    algorithm, optimizer = spec.algorithm, spec.trainer.optimizer
    shared = {
        "output_dir": str(folder),
        "max_steps": steps,
        "num_generations": algorithm.samples_per_prompt,
        "max_completion_length": spec.data.response_length,
        "temperature": algorithm.temperature,
        "shuffle_dataset": False,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.clip_grad,
        "beta": algorithm.kl_ctrl.kl_coef,
        "epsilon": algorithm.clip_ratio_low,
        "epsilon_high": algorithm.clip_ratio_high,
        "loss_type": "dapo",  # mean over the batch's tokens: our token-mean
        "scale_rewards": "group",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    return GRPOConfig(**(shared | own))
