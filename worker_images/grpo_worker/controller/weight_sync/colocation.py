"""Whose turn it is on GPUs that trainers and engines share (``mode: colocated``)."""

from collections.abc import Sequence

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.weight_sync.synchronizer import WeightSender
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.engine_pool import RolloutPool
from grpo_worker.weightsync.agent.gpu_lease import EVERYTHING, WEIGHTS

_START = 1800.0  # seconds for engines to start; kubelet gives up on them after as long


class Turns:
    """The GPUs go from one to the other, weights with them. Where both have their own nothing happens."""

    def __init__(
        self, spec: GRPOJobSpec, trainers: TrainerGang, pool: RolloutPool, weights: WeightSender
    ) -> None:
        self._shared = spec.shares_gpus
        self._trainers = trainers
        self._pool = pool
        self._weights = weights
        # What engines hold; unknown at first: an attempt before may have left them anywhere.
        self._parts: Sequence[str] | None = None

    def begin_attempt(self) -> None:
        """Before the trainers start: the engines do, with nobody beside them, and make room."""
        if self._shared:
            self._parts = None
            self._give(EVERYTHING)
            self._give(())

    def to_trainers(self, timer: StepTimer) -> None:
        """Engines lose their weights. Raises SyncError."""
        if self._shared:
            with timer.phase("to_trainers"):
                self._give(())

    def to_engines(self, timer: StepTimer) -> None:
        """Engines take the published weights; trainers keep in GPU memory only what their offloading leaves
        there. Raises SyncError and GangError."""
        if not self._shared or self._parts == EVERYTHING:
            return
        with timer.phase("to_engines"):
            self._trainers.call("empty_cache")
            self._give((WEIGHTS,))
            timer.seconds.update(self._weights.hand_over())
            kept = self._trainers.call("empty_cache")  # of what they sent from
            self._give(EVERYTHING)
        for number, name in enumerate(("allocated", "reserved")):
            most = max(rank[number] for rank in kept)
            timer.seconds[f"perf/waiting_memory_{name}_gb"] = most / 2**30

    def _give(self, parts: Sequence[str]) -> None:
        if self._parts != parts:
            self._parts = None
            self._pool.turn(parts, _START)
            self._parts = parts
