"""Expected seconds of one training step, phase by phase (pure). Phases are named as the job's metrics."""

from dataclasses import dataclass, fields

from grpo_operator.api.catalog.gpus import Gpu
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.efficiency import MEASURED, Efficiency
from grpo_operator.plan.planner.engines.shape import EngineShape
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.step.decode import Engine
from grpo_operator.plan.planner.step.generation import Generation, generation
from grpo_operator.plan.planner.step.workload import StepWorkload
from grpo_operator.plan.planner.training.cost import LayoutCost, call_cost, passes_of_update


@dataclass(frozen=True, slots=True)
class TrainingHardware:
    """GPUs of the training pool and the layout of the model on them."""

    gpu: Gpu
    gpus_per_node: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class RolloutHardware:
    """Engines. ``room``: sequences that one attention replica runs at once. ``deterministic``: kernels."""

    gpu: Gpu
    gpus_per_node: int
    engines: int
    shape: EngineShape
    room: int
    deterministic: bool = False

    @property
    def replicas(self) -> int:
        """Return the attention replicas of all engines."""
        return self.engines * self.shape.attention_data

    def engine(self, model: ModelShape, efficiency: Efficiency) -> Engine:
        """Return one engine that serves ``model``."""
        return Engine(model, self.shape, self.gpu, self.gpus_per_node, efficiency, self.deterministic)


@dataclass(frozen=True, slots=True)
class Transfer:
    """``update_bytes``: of a weight version, into all nodes with engines. ``update_rate``: bytes/s, as the
    busiest interfaces allow. ``tensors``: of the model. ``checkpoint_bytes``: that one rank copies to host
    memory at a save, at ``checkpoint_rate`` bytes/s, every ``checkpoint_steps`` steps.
    """

    update_bytes: float
    update_rate: float
    tensors: int
    checkpoint_bytes: float
    checkpoint_rate: float
    checkpoint_steps: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of each phase of a step; 0: the step has no such phase.

    ``save_checkpoint``: the seconds in which ranks wait for a copy, divided by the steps between saves.
    ``ahead``: generation and training overlap.
    """

    gen: float
    old_log_prob: float
    ref: float
    values: float
    reward_model: float
    update_critic: float
    update_actor: float
    update_weights: float
    save_checkpoint: float
    bubbles: float  # part of the trainer's phases
    gpus: int
    ahead: bool = False

    @property
    def training(self) -> float:
        """Return the seconds of the trainer's phases."""
        infer = self.old_log_prob + self.ref + self.values + self.reward_model
        return infer + self.update_critic + self.update_actor

    @property
    def total(self) -> float:
        both = max(self.gen, self.training) if self.ahead else self.gen + self.training
        return both + self.update_weights + self.save_checkpoint

    @property
    def gpu_hours(self) -> float:
        return self.total * self.gpus / 3600

    def phases(self) -> dict[str, float]:
        """Return the seconds of the phases that the step has, by the names of the job's metrics."""
        phases = (f.name for f in fields(self) if f.name not in ("bubbles", "gpus", "ahead"))
        return {name: value for name in phases if (value := getattr(self, name))}


@dataclass(frozen=True, slots=True)
class StepModel:
    """Everything that the time of a step depends on, and the GPUs of spare training pods."""

    model: ModelShape
    workload: StepWorkload
    trainer: TrainingHardware
    rollout: RolloutHardware
    transfer: Transfer
    efficiency: Efficiency = MEASURED
    shared_gpus: bool = False
    spare_gpus: int = 0

    def generation(self) -> Generation:
        """Return the generation of the busiest attention replica."""
        rollout = self.rollout
        engine = rollout.engine(self.model, self.efficiency)
        samples = -(-self.workload.samples // rollout.replicas)
        return generation(engine, self.workload.lengths, self.workload.prompt, samples, rollout.room)

    def forward(self) -> LayoutCost:
        """Return one forward pass over the step's samples, such as the log-probabilities."""
        return self._call(self.workload.samples, 1, gradients=False)

    def update(self) -> LayoutCost:
        """Return one optimizer step."""
        samples, layout = self.workload.mini_batch * self.workload.group, self.trainer.layout
        rows = self.workload.rows(samples, layout.data, gradients=True)
        passes = passes_of_update(self.model, layout, rows, self.workload.recompute)
        return self._call(samples, passes, gradients=True)

    def update_weights(self) -> float:
        """Return the seconds of a weight update."""
        transfer, efficiency = self.transfer, self.efficiency
        wire = transfer.update_bytes / (transfer.update_rate * efficiency.link)
        return efficiency.update_start + transfer.tensors * efficiency.update_tensor + wire

    def save_checkpoint(self) -> float:
        """Return the seconds in which the ranks wait for one checkpoint's copy."""
        return self.transfer.checkpoint_bytes / self.transfer.checkpoint_rate

    def step(self) -> StepCost:
        """Return the expected step."""
        work, forward, update = self.workload, self.forward(), self.update()
        once, updates = forward.total, update.total * work.updates
        scored = 1 + work.reference + work.critic + work.reward_model
        bubbles = forward.bubble * scored + update.bubble * work.updates * (1 + work.critic)
        engines = self.rollout.engines * self.rollout.shape.tensor
        return StepCost(
            gen=self.generation().total,
            old_log_prob=once + self.efficiency.first_call,
            ref=once * work.reference,
            values=once * work.critic,
            reward_model=once * work.reward_model,
            update_critic=updates * work.critic,
            update_actor=updates,
            update_weights=self.update_weights(),
            save_checkpoint=self.save_checkpoint() / self.transfer.checkpoint_steps,
            bubbles=bubbles,
            gpus=self.trainer.layout.world + self.spare_gpus + (0 if self.shared_gpus else engines),
            ahead=work.ahead,
        )

    def _call(self, samples: int, passes: float, *, gradients: bool) -> LayoutCost:
        trainer = self.trainer
        return call_cost(
            self.model,
            trainer.layout,
            self.workload.rows(samples, trainer.layout.data, gradients),
            trainer.gpu,
            trainer.gpus_per_node,
            passes=passes,
            gradients=gradients,
            efficiency=self.efficiency,
            offloaded=self.workload.offloaded,
        )
