"""Functions that run on ranks: calls of the trainer role whose rows are split over context-parallel ranks."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec
from grpo_worker.algorithms.losses import row_weights
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.roles.dispatch import RankInfo, reads_of
from grpo_worker.roles.shared_batch import SharedBatch, SharedRows
from grpo_worker.roles.trainer import TrainerWorker
from grpo_worker.roles.trainer_models import rank_info
from support.batch_stores import plain_store
from support.padded import ragged
from support.ranks.fidelity_cases import keep_gradients
from support.ranks.policy_cases import batch, make_model, whole_weights
from support.tiny_models import tiny_model

LENGTH = 30  # of the longest row; no multiple of the chunks


class Trainer:
    """One rank of the trainer role, which all ranks call together as the controller does."""

    def __init__(self, policy: PolicyModel, algorithm: AlgorithmSpec) -> None:
        self._worker = TrainerWorker()
        models: Any = SimpleNamespace(policy=policy, spec=SimpleNamespace(algorithm=algorithm))
        self._worker._models = models
        self.info = self._worker.rank_info = rank_info(dist.get_rank(), models)
        self.ranks: list[RankInfo] = _of_all(self.info)

    def call(self, method: str, rows: SharedRows, *args: Any) -> Any:
        reads = reads_of(getattr(TrainerWorker, method))
        columns, arrays = rows.arguments(self.info, reads)
        return rows.join(_of_all(getattr(self._worker, method)(columns, args, *arrays)))


def _of_all(own: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def steps(
    layout: dict[str, int], cases: dict[str, dict[str, Any]], max_tokens: int | None = None
) -> dict[str, dict[str, Any]]:
    """Return log-probs and entropy, and metrics and gradients of a step, for each case's algorithm.

    ``max_tokens``: pack sequences up to this number of tokens on each rank.
    """
    return {
        name: _step(layout, fields, number > 0, max_tokens)
        for number, (name, fields) in enumerate(cases.items())
    }


def _step(
    layout: dict[str, int], fields: dict[str, Any], initialised: bool, max_tokens: int | None
) -> dict[str, Any]:
    algorithm = AlgorithmSpec.model_validate({"samplesPerPrompt": 2} | fields)
    policy = make_model(tiny_model("deepseek_v3"), layout, max_tokens=max_tokens, initialised=initialised)
    trainer = Trainer(policy, algorithm)
    shared = SharedBatch(_batch(algorithm), 8, trainer.ranks, plain_store())
    found = trainer.call("log_probs", shared.all())
    reference = trainer.call("reference_log_probs", shared.all())
    assert np.array_equal(reference.response["log_probs"], found.response["log_probs"]), "equal weights"
    tokens = np.arange(len(found.response["log_probs"]), dtype=np.float32)
    shared.batch = shared.batch.with_columns(
        old_log_probs=found.response["log_probs"] + 0.3 * np.sin(tokens),
        ref_log_prob=found.response["log_probs"] + 0.2 * np.cos(tokens),
        rollout_is_weights=1 + 0.5 * np.sin(2 * tokens),
    )
    with patch.object(policy.trainable, "step", lambda: keep_gradients(policy)):
        metrics = trainer.call("update_actor", shared.all(), 0.1)
    return {"columns": found.response | found.row, "metrics": metrics, "gradients": whole_weights(policy)}


def _batch(algorithm: AlgorithmSpec) -> RaggedBatch:
    rows = ragged(batch(0, length=LENGTH))
    weights = row_weights(torch.from_numpy(rows.response_lengths), algorithm.loss_agg_mode, LENGTH)
    return rows.with_rows(weights=weights.numpy())
