"""Inputs of a job, read and checked before any rank starts: model files, data rows, the reward function.

Nothing here imports torch or Ray, so errors are reported seconds after the start of the pod.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_operator.api.job_config import JobConfig
from grpo_operator.api.v1alpha1.data import DataSpec
from grpo_worker.checkpointing.fork import Fork
from grpo_worker.checkpointing.restart_point import CHECKPOINTS
from grpo_worker.checkpointing.store import model_digest
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.model_files import ModelFiles, open_model
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.validation.sets import ValidationSet, open_sets
from grpo_worker.data.prompts import PromptSource
from grpo_worker.data.tasks import SCHEME, PromptFormat, Task, open_gym
from grpo_worker.data.tokenizer import TextTokenizer
from grpo_worker.rewards.answers import AnswerWorker, Workers
from grpo_worker.rewards.manager import RewardManager, open_reward
from grpo_worker.rewards.pool import WorkerPool
from grpo_worker.rewards.sandbox_problem import sandbox_problem

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that the loop reads apart from its spec.

    ``fork``: what it takes over from another job. ``validation``: sets of prompts that are not trained on.
    """

    model: ModelFiles
    source: PromptSource
    reward: RewardManager
    fork: Fork | None = None
    validation: tuple[ValidationSet, ...] = ()


def read_inputs(
    config: JobConfig,
    board: ProgressBoard,
    start_workers: Callable[[AnswerWorker, int], Workers] = WorkerPool,
) -> Inputs:
    """Read and check the inputs that the job names; report progress to ``board``.

    ``start_workers``: see ``open_reward``.

    Raises ValueError or RewardError that names the problem.
    """
    spec = config.spec
    board.update(message="reading the model's files")
    model = open_model(spec.model.path, spec.algorithm.stop_token_ids)
    fork = Fork.of(spec, config.fork_from)
    if fork is not None:
        board.update(message=f"reading {fork.folder}")
        own = JobFolder.of(spec.checkpoint.store, config.store).store
        fork.check(own / CHECKPOINTS, model_digest(model.config))
    board.update(message="reading data.train", tokens=_tokens_status(model))
    task = open_task(spec.data, model.tokenizer, spec.seed, config.store / "datasets")
    for note in task.notes:
        log.warning("spec.data: %s", note)
    counts = task.counts
    board.update(message="calling the reward once", data=None if counts is None else asdict(counts))
    reward = open_reward(task, model.tokenizer, spec.reward, start_workers)
    try:
        reward.check()
        board.update(sandbox_problem=sandbox_problem(spec.reward))
        source = PromptSource(task, model.tokenizer, spec.data.prompt_length)
        source.check()
        if spec.validation is not None:
            board.update(message="reading validation.sets")
        validation = open_sets(
            spec.validation, spec.data, spec.reward, model.tokenizer, spec.seed, config.store / "datasets",
            open_task, start_workers,
        )  # fmt: skip
    except Exception:  # the caller may try again, with other workers
        reward.close()
        raise
    return Inputs(model, source, reward, fork, validation)


def open_task(spec: DataSpec, tokenizer: TextTokenizer, seed: int, cache: Path) -> Task:
    """Open the task that ``data.train`` names. Raises ValueError that names the problem."""
    if spec.train.startswith(SCHEME):
        return open_gym(spec.train, seed, PromptFormat.of(spec, tokenizer))
    from grpo_worker.data.files import open_files  # imports pandas, which only file data needs

    return open_files(spec, tokenizer, seed, cache)


def _tokens_status(model: ModelFiles) -> dict[str, object]:
    template = model.tokenizer.has_chat_template
    return {"end": list(model.tokens.end), "pad": model.tokens.pad, "chatTemplate": template}
