"""Training on the batch of a step: log-probabilities, advantages, optimizer steps."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from grpo_operator.api.base import Device
from grpo_operator.api.catalog.gpus import GPUS
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.restart_policy import StragglerPolicy
from grpo_worker.algorithms.batch_advantages import add_advantages
from grpo_worker.algorithms.kl import KlController
from grpo_worker.algorithms.losses import row_weights
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.training.parity import (
    NotFiniteError,
    check_finite,
    check_log_probs,
    check_routers,
)
from grpo_worker.controller.training.stragglers import StragglerWatch
from grpo_worker.metrics.flops import utilisation
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.roles.shared_batch import WEIGHTS, SharedBatch, SharedRows
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import Sample
from grpo_worker.rollout.train_batch import make_batch


class BatchTrainer:
    """Trains the gang on one batch after the other.

    ``kl``: controller of the KL coefficient; its state belongs in checkpoints. ``watch``: of the
    stragglers in the gang of this attempt.
    """

    watch: StragglerWatch

    def __init__(
        self, spec: GRPOJobSpec, trainers: TrainerGang, suspect: Callable[[str, str], None],
        before_update: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """``suspect``: called with the name of an engine that computes no numbers, and the reason.

        ``before_update``: called as long as the ranks hold the weights of the step before; may raise.
        """
        self._before_update = before_update
        self._spec = spec
        self._trainers = trainers
        self._suspect = suspect
        self._samples: list[Sample] = []  # of the newest batch
        self._compared = False
        self.kl = KlController(spec.algorithm.kl_ctrl)

    def begin_attempt(self, stragglers: StragglerPolicy) -> None:
        """Prepare for a new gang: its parity with the engines must be checked again."""
        self._compared = False
        self._flops = self._trainers.call("flops")
        self.watch = StragglerWatch(stragglers, self._trainers.members())

    def share(self, rollouts: RolloutBatch) -> SharedBatch:
        """Return the batch of a step for ``add_model_scores`` and ``train``."""
        batch, self._samples = make_batch(rollouts.prompts, rollouts.samples), rollouts.samples
        rows = self._spec.trainer.mini_batch_size * self._spec.algorithm.samples_per_prompt
        return self._trainers.share(batch, rows)

    def train(
        self, step: int, shared: SharedBatch, scores: list[float], timer: StepTimer, on_policy: bool
    ) -> dict[str, float]:
        """Train on the batch of ``step``, add columns to it; return metrics under verl's names.

        ``on_policy``: the samples come from the weights that the gang holds. Raises ParityError if the gang
        and the engines that generated the samples compute different functions, NotFiniteError if one of them
        computes no numbers.
        """
        metrics = self._train(step, shared, scores, timer, on_policy)
        metrics["data/put_bytes"] = float(shared.put_bytes)
        metrics |= self.watch.observe(self._trainers.call("own_time"))
        return metrics | self._utilisation(shared.batch, timer)

    def _train(
        self, step: int, shared: SharedBatch, scores: list[float], timer: StepTimer, on_policy: bool
    ) -> dict[str, float]:
        algorithm, everything = self._spec.algorithm, shared.all()
        with timer.phase("old_log_prob"):
            policy = self._trainers.call("log_probs", everything)
            shared.batch = shared.batch.with_columns(old_log_probs=policy.response["log_probs"])
        self._before_update()
        self._check_finite(shared)
        if on_policy and not self._compared:
            self._compare(shared)
        if algorithm.needs_reference:
            with timer.phase("ref"):
                reference = self._trainers.call("reference_log_probs", everything)
                shared.batch = shared.batch.with_columns(ref_log_prob=reference.response["log_probs"])
        if algorithm.critic:
            with timer.phase("values"):
                values = self._trainers.call("values", everything)
                shared.batch = shared.batch.with_columns(values=values.response["values"])
        self._before_update()
        with timer.phase("adv"):
            shared.batch, shaped = add_advantages(shared.batch, scores, self._spec, self.kl.value)
        metrics = self._update(step, shared, timer) | shaped
        metrics["actor/kl_coef"] = self.kl.value
        tokens = max(int(shared.batch.response_lengths.sum()), 1)
        metrics["actor/entropy"] = float(policy.row["entropy"].sum() / tokens)
        kl = shaped.get("actor/reward_kl_penalty", metrics.get("actor/kl_loss", 0.0))
        self.kl.update(kl, shared.batch.rows)
        return metrics

    def add_model_scores(self, shared: SharedBatch, scores: list[float], timer: StepTimer) -> list[float]:
        """Return the verifier's scores plus the reward model's weighted scores, if the job has one."""
        model = self._spec.reward.model if self._spec.reward else None
        if model is None:
            return scores
        with timer.phase("reward_model"):
            added = self._trainers.call("reward_scores", shared.all()).row["scores"].tolist()
        return [score + model.weight * value for score, value in zip(scores, added, strict=True)]

    def _check_finite(self, shared: SharedBatch) -> None:
        try:
            check_finite(shared.batch, self._samples)
        except NotFiniteError as error:
            for engine in error.engines:
                self._suspect(engine, str(error))
            raise

    def _compare(self, shared: SharedBatch) -> None:
        algorithm = self._spec.algorithm
        check_log_probs(shared.batch, algorithm.max_log_prob_gap)
        if algorithm.routing_replay:
            agreement = self._trainers.call("router_agreement", shared.all())
            check_routers(agreement, algorithm.min_router_agreement)
        self._compared = True

    def _update(self, step: int, shared: SharedBatch, timer: StepTimer) -> dict[str, float]:
        """Take one optimizer step for each mini-batch, of the critic and of the policy.

        During the critic's warm-up the policy is not updated.
        """
        algorithm = self._spec.algorithm
        shared.batch = shared.batch.with_rows(**{WEIGHTS: self._weights(shared)})
        steps = shared.each_step()
        metrics: dict[str, float] = {}
        if algorithm.critic:
            with timer.phase("update_critic"):
                metrics |= _mean([self._trainers.call("update_critic", rows) for rows in steps])
        if algorithm.critic is None or step > algorithm.critic.warmup_steps:
            with timer.phase("update_actor"):
                metrics |= self._update_actor(step, steps)
        every = algorithm.refresh_reference_steps
        if every and step % every == 0:
            self._trainers.call("refresh_reference")
        return metrics

    def _update_actor(self, step: int, steps: Sequence[SharedRows]) -> dict[str, float]:
        wanted = self._spec.trainer.gradient_check
        check = wanted is not None and wanted.due(step)
        metrics = _mean(
            [
                self._trainers.call("update_actor", rows, self.kl.value, check and number == 0)
                for number, rows in enumerate(steps)
            ]
        )
        return metrics | ({"actor/gradients_checked": 1.0} if check else {})

    def _weights(self, shared: SharedBatch) -> np.ndarray:
        """Return the weight of each row's tokens in the loss of its optimizer step, float32 [rows]."""
        mode, longest = self._spec.algorithm.loss_agg_mode, self._spec.data.response_length
        lengths = torch.from_numpy(shared.batch.response_lengths)
        parts = [row_weights(part, mode, longest) for part in torch.split(lengths, shared.per_step)]
        return torch.cat(parts).numpy()

    def _utilisation(self, batch: RaggedBatch, timer: StepTimer) -> dict[str, float]:
        trainer = self._spec.trainer
        peak = GPUS[trainer.gpu_type].flops if trainer.device is Device.CUDA else None
        lengths = batch.lengths.tolist()
        return utilisation(self._flops, lengths, timer.seconds, self._trainers.world, peak)


def _mean(history: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the optimizer steps of a batch."""
    return {name: float(np.mean([metrics[name] for metrics in history])) for name in history[0]}
