"""Training on the batch of a step: log-probabilities, advantages, optimizer steps."""

import numpy as np
from tensordict import TensorDict

from grpo_operator.api.base import Device
from grpo_operator.api.catalog.gpus import GPUS
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.algorithms.batch_advantages import add_advantages
from grpo_worker.algorithms.kl import KlController
from grpo_worker.algorithms.losses import token_weights
from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.training.parity import check_log_probs, check_routers
from grpo_worker.metrics.flops import utilisation
from grpo_worker.metrics.timing import StepTimer


class BatchTrainer:
    """Trains the gang on one batch after the other.

    ``kl``: controller of the KL coefficient; its state belongs in checkpoints.
    """

    def __init__(self, spec: GRPOJobSpec, trainers: TrainerGang) -> None:
        self._spec = spec
        self._trainers = trainers
        self._compared = False
        self.kl = KlController(spec.algorithm.kl_ctrl)

    def begin_attempt(self) -> None:
        """Prepare for a new gang: its parity with the engines must be checked again."""
        self._compared = False
        self._flops = self._trainers.call("flops")

    def train(
        self, step: int, batch: TensorDict, scores: list[float], timer: StepTimer, on_policy: bool
    ) -> dict[str, float]:
        """Train on the batch of ``step``; return metrics under verl's names.

        ``on_policy``: the samples come from the weights that the gang holds. Raises ParityError if the gang
        and the engines that generated the samples compute different functions.
        """
        # Ranks get calls for traced steps only, because every call costs time.
        profile = self._spec.observability.profile
        traced = profile is not None and profile.step_start <= step <= profile.step_end
        if traced:
            self._trainers.call("begin_step", step)
        metrics = self._train(step, batch, scores, timer, on_policy)
        if traced:
            for figures in self._trainers.call("end_step", step):
                metrics |= figures
        return metrics | self._utilisation(batch, timer)

    def _train(
        self, step: int, batch: TensorDict, scores: list[float], timer: StepTimer, on_policy: bool
    ) -> dict[str, float]:
        algorithm = self._spec.algorithm
        with timer.phase("old_log_prob"):
            policy = self._trainers.call("log_probs", _inputs(batch), False)
            batch["old_log_probs"] = policy["log_probs"]
        if on_policy and not self._compared:
            self._compare(batch)
        if algorithm.needs_reference:
            with timer.phase("ref"):
                reference = self._trainers.call("log_probs", _inputs(batch), True)
                batch["ref_log_prob"] = reference["log_probs"]
        if algorithm.critic:
            with timer.phase("values"):
                batch["values"] = self._trainers.call("values", _inputs(batch))["values"]
        with timer.phase("adv"):
            shaped = add_advantages(batch, scores, self._spec, self.kl.value)
        metrics = self._update(step, batch, timer) | shaped
        metrics["actor/kl_coef"] = self.kl.value
        metrics["actor/entropy"] = float(policy["entropy"][batch["response_mask"].bool()].mean())
        kl = shaped.get("actor/reward_kl_penalty", metrics.get("actor/kl_loss", 0.0))
        self.kl.update(kl, batch.batch_size[0])
        return metrics

    def add_model_scores(self, batch: TensorDict, scores: list[float], timer: StepTimer) -> list[float]:
        """Return the verifier's scores plus the reward model's weighted scores, if the job has one."""
        model = self._spec.reward.model if self._spec.reward else None
        if model is None:
            return scores
        with timer.phase("reward_model"):
            added = self._trainers.call("reward_scores", _inputs(batch))["scores"][:, 0].tolist()
        return [score + model.weight * value for score, value in zip(scores, added, strict=True)]

    def _compare(self, batch: TensorDict) -> None:
        algorithm = self._spec.algorithm
        check_log_probs(batch, algorithm.max_log_prob_gap)
        if algorithm.routing_replay:
            agreement = self._trainers.call("router_agreement", _inputs(batch))
            check_routers(agreement, algorithm.min_router_agreement)
        self._compared = True

    def _update(self, step: int, batch: TensorDict, timer: StepTimer) -> dict[str, float]:
        """Take one optimizer step for each mini-batch, of the critic and of the policy.

        During the critic's warm-up the policy is not updated.
        """
        algorithm = self._spec.algorithm
        rows = self._spec.trainer.mini_batch_size * algorithm.samples_per_prompt
        minis = batch.split(rows)
        for mini in minis:
            mini["weights"] = token_weights(
                mini["response_mask"], algorithm.loss_agg_mode, self._spec.data.response_length
            )
        metrics: dict[str, float] = {}
        if algorithm.critic:
            with timer.phase("update_critic"):
                metrics |= _mean([self._trainers.call("update_critic", mini) for mini in minis])
        if algorithm.critic is None or step > algorithm.critic.warmup_steps:
            with timer.phase("update_actor"):
                kl = self.kl.value
                metrics |= _mean([self._trainers.call("update_actor", mini, kl) for mini in minis])
        every = algorithm.refresh_reference_steps
        if every and step % every == 0:
            self._trainers.call("refresh_reference")
        return metrics

    def _utilisation(self, batch: TensorDict, timer: StepTimer) -> dict[str, float]:
        trainer = self._spec.trainer
        peak = GPUS[trainer.gpu_type].flops if trainer.device is Device.CUDA else None
        lengths = batch["attention_mask"].sum(1).tolist()
        return utilisation(self._flops, lengths, timer.seconds, self._trainers.world, peak)


def _inputs(batch: TensorDict) -> TensorDict:
    """Return the columns that a forward pass needs; the others are not sent to the ranks."""
    names = ("input_ids", "attention_mask", "routed_experts")
    present = set(batch.keys())
    return batch.select(*(name for name in names if name in present))


def _mean(history: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the optimizer steps of a batch."""
    return {name: float(np.mean([metrics[name] for metrics in history])) for name in history[0]}
