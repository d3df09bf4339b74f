"""TRL's GRPOTrainer on the tiny job's model, prompts and hyperparameters; a process of its own.

``python peer.py MODEL_DIRECTORY SEED STEPS FILE`` writes the mean reward of each step as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from grpo_devcluster.paths import REPO
from grpo_operator.api.grpojob import GRPOJobSpec
from grpo_worker.data.tasks import open_gym
from grpo_worker.data.tokenizer import TextTokenizer


def main() -> None:
    model, seed, steps, file = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    spec = GRPOJobSpec.model_validate(
        yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())["spec"]
    )
    task = open_gym(spec.data.train, seed)
    prompts = spec.data.train_batch_size
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(model / "tokenizer.json"), eos_token="<eos>", pad_token="<pad>"
    )
    own = TextTokenizer(model / "tokenizer.json", tokenizer.eos_token_id, tokenizer.pad_token_id)

    def reward(completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        answers = [own.decode(ids).strip() for ids in completion_ids]
        return [task.score(item, answer) for item, answer in zip(index, answers, strict=True)]

    questions = [str(task.dataset[i]["question"]) + "\n" for i in range(prompts * steps)]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=_config(spec, seed, steps, file.with_suffix(".trl")),
        train_dataset=Dataset.from_dict({"prompt": questions, "index": list(range(prompts * steps))}),
        processing_class=tokenizer,
    )
    trainer.train()
    file.write_text(json.dumps([entry["reward"] for entry in trainer.state.log_history if "reward" in entry]))


def _config(spec: GRPOJobSpec, seed: int, steps: int, folder: Path) -> GRPOConfig:
    algorithm, optimizer = spec.algorithm, spec.trainer.optimizer
    return GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=spec.data.train_batch_size * algorithm.samples_per_prompt,
        num_generations=algorithm.samples_per_prompt,
        max_completion_length=spec.data.response_length,
        temperature=algorithm.temperature,
        shuffle_dataset=False,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_grad,
        beta=algorithm.kl_ctrl.kl_coef,
        epsilon=algorithm.clip_ratio_low,
        epsilon_high=algorithm.clip_ratio_high,
        loss_type="dapo",  # mean over the batch's tokens: our token-mean
        scale_rewards="group",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
