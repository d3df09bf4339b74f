"""Whose turn it is on GPUs that trainers and engines share (``mode: colocated``)."""

from grpo_operator.api.grpojob import GRPOJobSpec
from grpo_worker.controller.trainers import TrainerGang
from grpo_worker.controller.weights import WeightSender
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.pool import RolloutPool

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
        self._engines: bool | None = None  # unknown: an attempt before may have left them anywhere

    def begin_attempt(self) -> None:
        """Before the trainers start: the engines do, with nobody beside them, and make room."""
        self._engines = None
        self._give(True)
        self.to_trainers(StepTimer())

    def to_trainers(self, timer: StepTimer) -> None:
        """Engines lose their weights. Raises SyncError."""
        if self._shared:
            with timer.phase("to_trainers"):
                self._give(False)

    def to_engines(self, timer: StepTimer) -> None:
        """Engines take the published weights; trainers keep in GPU memory only what their offloading leaves
        there. Raises SyncError and GangError."""
        if not self._shared or self._engines:
            return
        with timer.phase("to_engines"):
            self._trainers.call("empty_cache")
            self._give(True)
            timer.seconds.update(self._weights.hand_over())

    def _give(self, engines: bool) -> None:
        if self._shared and self._engines is not engines:
            self._engines = None
            self._pool.turn(engines, _START)
            self._engines = engines
