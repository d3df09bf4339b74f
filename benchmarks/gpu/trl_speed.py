"""TRL's GRPOTrainer on the GPUs of this host, for benchmarks/gpu/job.py.

    torchrun --nproc-per-node N trl_speed.py SPEC.json MODEL PROMPTS.jsonl RESULT.json --steps 5 --rows 8

It generates with transformers, without vLLM. RESULT.json gets the tokens and the clock of each step.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learning"))

from reward import compute_score
from trl_config import trl_config

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec


class Clock(TrainerCallback):  # type: ignore[misc]
    """Clock at the start and after each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter())

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter())


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [compute_score("", text, truth, {}) for text, truth in zip(completions, answer, strict=True)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path, help="JSON of a GRPOJob's spec")
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True, help="sequences of one forward pass")
    return parser.parse_args()


def main() -> None:
    args = parse()
    spec = GRPOJobSpec.model_validate(json.loads(args.spec.read_text()))
    model, file = str(args.model), args.result
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=f"{model}/tokenizer.json", eos_token="<eos>", pad_token="<pad>"
    )
    samples = spec.data.train_batch_size * spec.algorithm.samples_per_prompt
    gpus = torch.cuda.device_count()
    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16),
        reward_funcs=reward,
        args=trl_config(
            spec,
            args.steps,
            file.with_suffix(".trl"),
            seed=spec.seed,
            per_device_train_batch_size=args.rows,
            gradient_accumulation_steps=samples // args.rows // gpus,
            bf16=True,
        ),
        train_dataset=load_dataset("json", data_files=str(args.prompts), split="train"),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        counted = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
        lengths = [e["completions/mean_length"] for e in trainer.state.log_history if "num_tokens" in e]
        file.write_text(json.dumps({"at": clock.seconds, "tokens": counted, "lengths": lengths}))


if __name__ == "__main__":
    main()
