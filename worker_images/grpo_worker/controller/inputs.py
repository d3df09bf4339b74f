"""What a job names, read before any rank starts: the model's files, the rows, and one call of the reward.

Nothing here imports torch or Ray, so what is wrong is said seconds after the pod has started.
"""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_operator.api.v1alpha1.data import DataSpec
from grpo_worker.controller.config import JobConfig
from grpo_worker.controller.model_files import ModelFiles, open_model
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.data.prompts import PromptSource
from grpo_worker.data.tasks import SCHEME, PromptFormat, Task, open_gym
from grpo_worker.data.tokenizer import TextTokenizer
from grpo_worker.rewards.manager import RewardManager
from grpo_worker.rewards.verifiers import verifier_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that the loop reads beside its spec."""

    model: ModelFiles
    source: PromptSource
    reward: RewardManager


def read_inputs(config: JobConfig, board: ProgressBoard) -> Inputs:
    """Read what the job names, and tell the board.

    Raises ValueError or RewardError that says what is wrong.
    """
    spec = config.spec
    board.update(message="reading the model's files")
    model = open_model(spec.model.path, spec.algorithm.stop_token_ids)
    board.update(message="reading data.train", tokens=_tokens_status(model))
    task = open_task(spec.data, model.tokenizer, spec.seed, config.store / "datasets")
    for note in task.notes:
        log.warning("spec.data: %s", note)
    counts = task.counts
    board.update(message="calling the reward once", data=None if counts is None else asdict(counts))
    reward = RewardManager(task, model.tokenizer, verifier_of(task, spec.reward))
    reward.check()
    source = PromptSource(task, model.tokenizer, spec.data.prompt_length)
    source.check()
    return Inputs(model, source, reward)


def open_task(spec: DataSpec, tokenizer: TextTokenizer, seed: int, cache: Path) -> Task:
    """Open what ``data.train`` names. Raises ValueError that says what is wrong with it."""
    if spec.train.startswith(SCHEME):
        return open_gym(spec.train, seed, PromptFormat.of(spec, tokenizer))
    from grpo_worker.data.files import open_files  # imports pandas, which few jobs need

    return open_files(spec, tokenizer, seed, cache)


def _tokens_status(model: ModelFiles) -> dict[str, object]:
    template = model.tokenizer.has_chat_template
    return {"end": list(model.tokens.end), "pad": model.tokens.pad, "chatTemplate": template}
