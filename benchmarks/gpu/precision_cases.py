"""Cases of precision.py that compute on the GPU with the trainer's model, each in a process of its own."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from kernel_models import BF16, ENGINE, FP8, Kind, setup
from models import JOB_MODEL
from precision_data import Chain, batch_of
from precision_figures import CURVE, HALVES
from precision_gap import PROMPT, TOKENS, answers_of_engines

from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.megatron.conversion.readers import SafetensorsWeights
from grpo_worker.megatron.export.config import Quantization
from grpo_worker.megatron.export.exporter import begin_export
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.profiling.background import join

# 0.4 billion parameters. All widths are whole blocks of 128, but for the keys' 576 that DeepSeek-V3 has too.
MODEL: dict[str, Any] = JOB_MODEL | {"vocab_size": 1024}
KINDS: dict[str, Kind] = {"bf16": (ENGINE, BF16), "fp8": (ENGINE, FP8)}
STEPS, EVERY = 200, 10  # optimizer steps, and steps between two points of a curve
ROWS, LENGTH, FIRST = (
    64,
    PROMPT + TOKENS,
    2,
)  # sequences of a step, their tokens, and the first ones, which are random
HELD_OUT = 0  # seed of the held-out sequences; those of the steps count up from it
OPTIMIZER = OptimizerSpec(lr=6e-4, min_lr=6e-5, lr_warmup_steps=20, lr_decay_style="cosine")
# Precision and tokens of a micro-batch. The sums of the control have another order, and nothing else differs.
CURVES = {
    CURVE: ("bf16", ROWS * LENGTH), HALVES: ("bf16", ROWS * LENGTH // 2), "fp8": ("fp8", ROWS * LENGTH),
}  # fmt: skip
TEMPERATURE = 1.0


def curve(name: str, folder: Path) -> dict[str, Any]:
    """Train on sequences of the chain; return the loss of held-out ones along the way.

    The first curve's model is exported to ``folder``, in bf16 and in blocks of FP8.
    """
    precision, tokens = CURVES[name]
    model = PolicyModel(
        setup(MODEL, KINDS[precision], max_tokens=tokens), OPTIMIZER, STEPS, with_reference=False
    )
    chain = Chain(MODEL["vocab_size"])
    held_out = batch_of(chain.sequences(ROWS, LENGTH, HELD_OUT), FIRST)
    found: dict[str, Any] = {"steps": [], "held_out": [], "train": [], "grad_norm": []}
    started = time.monotonic()
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            found["steps"].append(step)
            found["held_out"].append(_loss(log_probs_of(model, held_out)))
            print(name, step, found["held_out"][-1], flush=True)
        if step < STEPS:
            batch = batch_of(chain.sequences(ROWS, LENGTH, HELD_OUT + 1 + step), FIRST)
            for figure, value in _step(model, batch).items():
                found[figure].append(value)
    if name == CURVE:
        export(model, folder)
    parameters = sum(parameter.numel() for chunk in model.chunks for parameter in chunk.parameters())
    return found | {
        "final": found["held_out"][-1], "entropy": chain.entropy, "parameters": parameters,
        "tokens_per_step": ROWS * LENGTH, "seconds": time.monotonic() - started,
    }  # fmt: skip


def _step(model: PolicyModel, batch: Any) -> dict[str, float]:
    """Take a step as a job does, with the log-probabilities of a pass before it."""
    old = log_probs_of(model, batch)
    loss = PolicyLossConfig(use_kl_loss=False)
    metrics = model.update(batch.with_columns(old_log_probs=old), loss, 0.0, TEMPERATURE)
    return {"train": _loss(old), "grad_norm": metrics["actor/grad_norm"]}


def log_probs_of(model: PolicyModel, batch: Any) -> np.ndarray:
    """Return the log-probabilities of the response tokens, fp32."""
    return np.asarray(batch.response_of(model.log_probs(batch, TEMPERATURE)["log_probs"]))


def _loss(log_probs: np.ndarray) -> float:
    return -float(log_probs.mean(dtype=np.float64))


def export(model: PolicyModel, folder: Path) -> None:
    """Write the model for engines of both precisions, as a job exports it."""
    for answers in folder.glob("answers-*.json"):
        answers.unlink()  # of an earlier model
    formats: dict[str, Quantization] = {"bf16": "none", "fp8": "fp8-block128"}
    for name, quantization in formats.items():
        target = folder / "model" / name
        target.parent.mkdir(exist_ok=True)
        join(begin_export(target, MODEL, model.chunks, model.family, None, quantization, beside=False))


def log_probs(precision: str, folder: Path) -> dict[str, list[float]]:
    """Return the trainer's log-probabilities of each engine's answers, with the weights in bf16."""
    built = setup(MODEL, KINDS[precision], max_tokens=ROWS * LENGTH)
    reader = SafetensorsWeights(folder / "model" / "bf16")
    model = PolicyModel(replace(built, reader=reader), OPTIMIZER, STEPS, with_reference=False)
    found = {}
    for engine, answers in answers_of_engines(folder).items():
        tokens = np.array([answer["prompt"] + answer["output"] for answer in answers])
        found[engine] = log_probs_of(model, batch_of(tokens, PROMPT)).tolist()
    return found
