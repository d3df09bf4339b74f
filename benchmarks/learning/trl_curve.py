"""TRL's GRPOTrainer on the tiny job's model, prompts and hyperparameters, in its own process.

``python trl_curve.py MODEL_DIRECTORY RESULT.json --seed 1 --steps 120`` writes the mean reward of each step.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOTrainer
from trl_config import trl_config

from grpo_devcluster.paths import REPO
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.data.tasks import open_gym
from grpo_worker.data.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    model, seed, steps, file = args.model, args.seed, args.steps, args.result
    torch.set_num_threads(1)
    spec = GRPOJobSpec.model_validate(
        yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())["spec"]
    )
    task = open_gym(spec.data.train, seed)
    prompts = spec.data.train_batch_size
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(model / "tokenizer.json"), eos_token="<eos>", pad_token="<pad>"
    )
    own = load_tokenizer(str(model))

    def reward(completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        answers = [own.decode(ids).strip() for ids in completion_ids]
        return [task.score(item, answer) for item, answer in zip(index, answers, strict=True)]

    questions = [str(task.dataset[i]["question"]) + "\n" for i in range(prompts * steps)]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=trl_config(
            spec,
            steps,
            file.with_suffix(".trl"),
            seed=seed,
            per_device_train_batch_size=prompts * spec.algorithm.samples_per_prompt,
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": questions, "index": list(range(prompts * steps))}),
        processing_class=tokenizer,
    )
    trainer.train()
    file.write_text(json.dumps([entry["reward"] for entry in trainer.state.log_history if "reward" in entry]))


if __name__ == "__main__":
    main()
