"""Folders of jobs whose runs have pages: metrics, restarts and samples, written as controllers write them."""

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_operator.api.v1alpha1.observability import SamplesSpec
from grpo_worker.checkpointing.best import Best, keep_best
from grpo_worker.common.reward_parts import Reward
from grpo_worker.common.step_log import StepLog
from grpo_worker.common.store_path import JobFolder, StorePath
from grpo_worker.controller.validation.scores import SetScores
from grpo_worker.data.prompts import Prompt
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import Sample
from grpo_worker.rollout.train_batch import make_batch
from grpo_worker.samples.writer import SampleWriter
from support.browser import Page

# Its tokenizer has a token for every byte, and leaves text as it is.
MODEL = str(Path(__file__).parent / "published_models" / "snapshots" / "tokenizers" / "qwen3")
TOKENIZER = load_tokenizer(MODEL)
ANSWERS = 4  # to each prompt


def record(step: int, **changes: float) -> dict[str, Any]:
    """Return the metrics of a step: a reward that grows, noise, and two spikes."""
    noise = random.Random(step)
    seconds = 95 + 8 * noise.random() + (60 if step == 37 else 0)
    return {
        "critic/score/mean": 0.75 - 0.5 * math.exp(-step / 60) + noise.gauss(0, 0.02),
        "response_length/mean": 420.0 + 2 * step + noise.gauss(0, 12),
        "train/train_rollout_logprob_abs_diff": 0.012 + abs(noise.gauss(0, 0.002)),
        "actor/entropy": 0.9 * math.exp(-step / 200) + noise.gauss(0, 0.01),
        "actor/grad_norm": 4.0 if step == 71 else 0.4 + abs(noise.gauss(0, 0.05)),
        "perf/throughput": 3100 * 100 / seconds,
        "timing_s/step": seconds,
        "timing_s/gen": 0.55 * seconds,
        "timing_s/reward": 0.6,
        "timing_s/old_log_prob": 9.5,
        "timing_s/update_actor": 24.0 + noise.random(),
        "timing_s/update_weights": 2.2,
        "timing_s/trainers_idle": 0.57 * seconds + 4 * noise.random(),
        "timing_s/engines_idle": 0.39 * seconds + 3 * noise.random(),
        "rollout/retries": 3.0 if step in (37, 38) else 0.0,
        "rollout/continued_samples": 3.0 if step == 37 else 0.0,
        "wall_time": 1.79e9 + 100 * step + noise.random(),
        "weights": [f"digest {step}"],
    } | changes  # fmt: skip


def write_records(folder: Path, steps: Sequence[int], made: Callable[[int], dict[str, Any]] = record) -> None:
    """Write the records of steps; those after the first of them are repeated."""
    folder.mkdir(parents=True, exist_ok=True)
    log = StepLog(folder / "metrics.jsonl")
    log.truncate(steps[0] - 1)
    for step in steps:
        log.append(step, [made(step)])
    log.flush()


def write_restarts(folder: Path, *restarts: tuple[int, str, str]) -> None:
    """Write restarts by step, cause and reason, and the record of a run that has not ended."""
    lines = [
        {
            "at": f"2026-11-27T10:{step % 60:02}:00Z", "cause": cause, "step": step, "seconds": 93.25,
            "parts": {"detect": 2.0, "stop": 4.25, "start": 50.0, "load": 30.0, "replay": 7.0}, "why": why,
        }
        for step, cause, why in restarts
    ]  # fmt: skip
    (folder / "recoveries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    causes = [cause for _, cause, _ in restarts]
    state = {"attempt": 1 + len(causes), "failed": "", "job_restarts": causes.count("job")}
    state["infrastructure_restarts"] = len(causes) - causes.count("job")
    (folder / "run.json").write_text(json.dumps(state))


def write_samples(
    folder: Path, step: int, prompts: Sequence[str], answers: Sequence[str],
    store: "StorePath | None" = None, parts: bool = False,
) -> RolloutBatch:  # fmt: skip
    """Write the samples of a step, with ANSWERS answers to each prompt, which repeat ``answers``.

    ``store``: None: ``folder`` itself. ``parts``: of the rewards.
    """
    asked = [Prompt(index, tuple(TOKENIZER.encode(text))) for index, text in enumerate(prompts)]
    noise = np.random.default_rng(step)
    samples: list[Sample] = []
    scores: list[float] = []
    for prompt in asked:
        for number in range(ANSWERS):
            ids = TOKENIZER.encode(answers[(prompt.index + number) % len(answers)])
            logs = (-np.abs(noise.normal(0, 0.8, len(ids)))).tolist()
            samples.append(Sample(prompt.index, number, ids, logs, step - 1, f"engine-{number % 2}", ()))
            scores.append(float((prompt.index * 7 + number * number) % 5 < 1 + prompt.index % 4))
    if parts:
        scores = [Reward(score, {"format": score / 2, "correct": score / 2}) for score in scores]
    rollouts = RolloutBatch(asked, samples, scores, asked)
    made = make_batch(rollouts.prompts, rollouts.samples)
    old = made.response["rollout_log_probs"] * np.float32(0.8)
    batch = made.with_columns(old_log_probs=old).with_rows(
        advantages=np.asarray(scores, np.float32) - np.float32(np.mean(scores))
    )
    place = JobFolder(store or folder, folder)
    writer = SampleWriter(place, SamplesSpec(), TOKENIZER.decode_all, lambda: None)
    writer.add(step, 1, rollouts, scores, batch)
    writer.flush()
    assert writer.metrics()["samples/missing_steps"] == 0
    return rollouts


def write_validations(
    folder: Path, steps: Sequence[int], kept: Best | None = None, sets: Sequence[str] = ("aime", "math-500")
) -> None:
    """Write validations of steps, with eight responses to each of 40 prompts. ``kept``: because of them.

    Those after the first of the steps are repeated.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = StepLog(folder / "validation.jsonl")
    log.truncate(steps[0] - 1)
    for step in steps:
        records = []
        for number, name in enumerate(sets):
            noise, found = np.random.default_rng((step, number)), SetScores(8, 1.0)
            chance = (0.2 + 0.3 * number) + 0.4 * (1 - math.exp(-step / 50))
            for prompt in range(40):
                right = noise.random(8) < min(max(chance + noise.normal(0, 0.25), 0.0), 1.0)
                found.add(prompt, right.astype(float).tolist(), 800)
            records.append({"set": name, "seconds": 41.5, **found.figures()})
        log.append(step, records)
    log.flush()
    keep_best(folder / "checkpoints", kept)


def validations_of(folder: Path) -> dict[str, dict[str, list[list[float]]]]:
    """Return step, mean and half interval of every measure by set, as in ``validation.jsonl``."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for line in (folder / "validation.jsonl").read_text().splitlines():
        values = json.loads(line)
        for name in [name.removesuffix("/ci95") for name in values if name.endswith("/ci95")]:
            point = [values["step"], values[f"{name}/mean"], values[f"{name}/ci95"]]
            found.setdefault(values["set"], {}).setdefault(name, []).append(point)
    return found


async def series(page: Page) -> dict[str, list[list[float]]]:
    """Return the points of all curves that a page of a run has, by metric."""
    found = await page.value("runPage.data.series")
    return {one["name"]: one["points"] for one in found}


def metrics_of(folder: Path) -> dict[str, list[list[float]]]:
    """Return the steps and values of every metric, as in ``metrics.jsonl``."""
    found: dict[str, list[list[float]]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        for name, value in values.items():
            if isinstance(value, int | float) and name not in ("step", "wall_time"):
                found.setdefault(name, []).append([values["step"], value])
    return found
