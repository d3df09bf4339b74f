"""The policy on one rank: log-probabilities and optimizer steps."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.algorithms.losses import PolicyLossConfig, kl_estimate, policy_loss
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.data.micro_batch import Batch, MicroBatch
from grpo_worker.megatron.checkpoint.part import CheckpointPart
from grpo_worker.megatron.conversion import hf_mapping
from grpo_worker.megatron.model import vocab_parallel
from grpo_worker.megatron.optim.optimizer import Trainable, frozen_weights
from grpo_worker.megatron.training.expert_load import ExpertLoad
from grpo_worker.megatron.training.gradient_check import GradientCheck
from grpo_worker.megatron.training.mtp import FACTOR, MultiTokenPrediction
from grpo_worker.megatron.training.reductions import row_sum
from grpo_worker.megatron.training.router_replay import RoutingReplay
from grpo_worker.megatron.training.runner import (
    ForwardContext,
    Runner,
    context_slice,
    no_context,
)
from grpo_worker.megatron.training.setup import ModelSetup

T = TypeVar("T")


class PolicyModel:
    """Trainable policy and frozen reference, in the same layout.

    ``replay_routing``: the policy uses the experts in ``RaggedBatch.routed``.
    """

    def __init__(
        self,
        setup: ModelSetup,
        optimizer: OptimizerSpec,
        updates: int,
        *,
        with_reference: bool = True,
        replay_routing: bool = False,
    ) -> None:
        self.layout = setup.layout
        self.family = setup.family
        fields: dict[str, Any] = {"moe_enable_routing_replay": True} if replay_routing else {}
        if setup.mtp:
            self.family.mtp_shapes(setup.hf)  # raises for models without one
        chunks = setup.build_trained(mtp=setup.mtp, **fields)
        hf_mapping.load(chunks, self.family, setup.reader)
        self.reference: list[Any] = []
        if with_reference:
            self.reference = [chunk.eval().requires_grad_(False) for chunk in setup.build()]
            _copy(chunks, self.reference)  # the store of the weights is read once
        self.trainable = Trainable(chunks, optimizer, updates, setup.offload, setup.optimizer_dtypes)
        self.reference_weights = frozen_weights(self.reference, setup.offload)
        self._mtp = MultiTokenPrediction(chunks, setup.hf) if setup.mtp else None
        self._runner = Runner(setup.layout, setup.batching)
        self._expert_load = ExpertLoad(chunks)
        self._replay = RoutingReplay(chunks) if replay_routing else None

    @property
    def chunks(self) -> list[Any]:
        """The policy's model chunks."""
        return self.trainable.chunks

    @property
    def expert_layers(self) -> list[int]:
        """Indices, among the model's expert layers, of those on this rank: the layers of ``routed``."""
        return [] if self._replay is None else self._replay.layers

    @property
    def packs(self) -> bool:
        """Whether the ranks pack their sequences."""
        return self._runner.packs

    def context_spans(self, width: int, length: int) -> list[tuple[int, int]]:
        """Return the tokens (first, end) of a row that this rank computes.

        ``width``: of the batch; ``length``: of the row.
        """
        return self._runner.context_spans(width, length)

    def shards(self) -> list[hf_mapping.Shard]:
        """Return the boxes of the policy's weights that this rank owns.

        Call this and read the boxes only while ``trainable.weights`` are on the device.
        """
        return [shard for shard in self.held_shards() if shard.owner]

    def held_shards(self) -> list[hf_mapping.Shard]:
        """Return the boxes of the policy's weights that this rank holds, copies of other ranks' included."""
        return list(hf_mapping.shards(self.chunks, self.family))

    def parts(self, with_reference: bool) -> list[CheckpointPart]:
        """Return the parts of a checkpoint. ``with_reference``: the job changes the reference."""
        changing = (
            [CheckpointPart("reference.", self.reference, frozen=self.reference_weights)]
            if with_reference
            else []
        )
        return [CheckpointPart("", self.chunks, self.trainable), *changing]

    def refresh_reference(self) -> None:
        """Copy the policy's current weights into the reference."""
        with self.trainable.weights.on_device(), self.reference_weights.on_device():
            _copy(self.chunks, self.reference)

    def log_probs(
        self, batch: RaggedBatch, temperature: float, reference: bool = False, with_entropy: bool = False
    ) -> dict[str, np.ndarray]:
        """Return the log-probability of each token given the tokens before it.

        Returns log_probs [tokens] fp32, and ``with_entropy`` also entropy of the same shape; an empty dict
        outside the last pipeline stage. Entries are 0 at the first token of each row, and where another
        context-parallel rank has them.
        """
        models = self.reference if reference else self.chunks
        for model in models:
            model.eval()

        def log_probs(logits: torch.Tensor, micro: MicroBatch, width: int) -> torch.Tensor:
            return micro.to_rows(_log_probs(logits, micro, temperature), width)

        def entropy(logits: torch.Tensor, micro: MicroBatch, width: int) -> torch.Tensor:
            return micro.to_rows(vocab_parallel.entropy(logits, temperature), width)

        functions = {"log_probs": log_probs} | ({"entropy": entropy} if with_entropy else {})
        weights = self.reference_weights if reference else self.trainable.weights
        with weights.on_device():
            return self._replayed(
                lambda context: self._runner.rows(models, batch, functions, context), not reference
            )

    def router_agreement(self, batch: RaggedBatch) -> float:
        """Return the share of the engines' routed experts that the trainer's routers choose too."""
        assert self._replay is not None, "the policy was built without router replay"
        for model in self.chunks:
            model.eval()
        with self.trainable.weights.on_device():
            self._runner.rows(self.chunks, batch, {}, self._replay.comparing)
        return self._replay.agreement()

    def _replayed(self, call: Callable[[ForwardContext], T], replay: bool = True) -> T:
        """Call with a context that replays the engines' experts if ``replay`` and the job ask for it."""
        if self._replay is None or not replay:
            return call(no_context)
        try:
            return call(self._replay.replaying)
        finally:
            self._replay.clear()

    def update(
        self,
        batch: RaggedBatch,
        loss: PolicyLossConfig,
        kl_coef: float,
        temperature: float,
        check: bool = False,
    ) -> dict[str, float]:
        """Take one optimizer step on this data-parallel rank's share of a mini-batch.

        batch: response columns, fp32: old_log_probs, advantages; with a KL loss ref_log_prob; with rollout
        correction rollout_is_weights. Row column: weights (of the *global* mini-batch). Only the last
        pipeline stage reads them. ``check``: compute the gradients twice and compare them.
        Returns metrics summed over the global mini-batch, the same on every rank. Raises
        GradientMismatchError on ranks whose gradients differ.
        """

        def losses(logits: torch.Tensor, part: MicroBatch, width: int) -> tuple[torch.Tensor, torch.Tensor]:
            log_prob = part.loss_rows(_log_probs(logits, part, temperature), width)
            entropy = None
            if loss.entropy_coef:
                entropy = part.loss_rows(vocab_parallel.entropy(logits, temperature), width)
            total, figures = _loss(log_prob, entropy, part.columns, loss, kl_coef)
            if self._mtp is None:
                return total, figures
            mtp_loss = self._mtp.loss(part, width)
            return total + FACTOR * mtp_loss, torch.cat([figures, mtp_loss.detach()[None]])

        names = _NAMES if self._mtp is None else (*_NAMES, "mtp_loss")
        checked = GradientCheck(self.trainable, self._expert_load) if check else None
        # The modules' forward passes wait for their weights; the broadcast reads them before.
        with self.trainable.weights.on_device(finished=self._mtp is not None):
            if self._mtp is not None:
                self._mtp.broadcast_embedding()
            metrics = self._replayed(
                lambda context: self._runner.update(self.trainable, batch, losses, names, context, checked)
            )
        return {f"actor/{name}": value for name, value in metrics.items()} | self._expert_load.collect()


@torch.no_grad()
def _copy(chunks: Sequence[Any], reference: Sequence[Any]) -> None:
    """Copy weights into the reference, which has no layer of multi-token prediction."""
    for new, old in zip(chunks, reference, strict=True):
        current = dict(hf_mapping.named_tensors(new))
        for name, target in hf_mapping.named_tensors(old):
            target.copy_(current[name])


def _log_probs(logits: torch.Tensor, micro: MicroBatch, temperature: float) -> torch.Tensor:
    """Return the log-probability of each next token, [b, s / cp]."""
    return vocab_parallel.log_probs(logits, context_slice(micro, micro.labels), temperature)


def _loss(
    log_prob: torch.Tensor,
    entropy: torch.Tensor | None,
    batch: Batch,
    config: PolicyLossConfig,
    kl_coef: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of this rank's tokens of a micro-batch, and its figures in the order of ``_NAMES``."""
    weight, old, mask = batch["weights"], batch["old_log_probs"], batch["response_mask"]
    policy, clipped = policy_loss(log_prob, old, batch["advantages"], mask, config, row_sum)
    if "rollout_is_weights" in batch:
        policy = policy * batch["rollout_is_weights"]
    loss = surrogate = (weight * policy).sum()
    kl = torch.zeros_like(loss)
    if config.use_kl_loss:
        kl = (weight * kl_estimate(log_prob, batch["ref_log_prob"], config.kl_loss_type)).sum()
        loss = loss + kl_coef * kl
    if entropy is not None:
        loss = loss - config.entropy_coef * (weight * entropy).sum()
    ppo_kl = (weight * (old - log_prob)).sum()
    parts = [loss, surrogate, kl, (weight * clipped).sum(), ppo_kl]
    return loss, torch.stack([part.detach() for part in parts])


_NAMES = ("loss", "pg_loss", "kl_loss", "pg_clipfrac", "ppo_kl")
