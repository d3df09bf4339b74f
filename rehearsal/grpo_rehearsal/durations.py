"""Durations of everything that stands in, from the planner's model of a step.

What the planner does not estimate is an assumption, named in ``Assumptions`` and in the report.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from grpo_operator.api.catalog.gpus import GPUS
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.plan.planner import transfer_bounds
from grpo_operator.plan.planner.resolve import JobPlan
from grpo_operator.plan.planner.step.job import Assumptions as PlanAssumptions
from grpo_operator.plan.planner.step.job import step_model
from grpo_operator.plan.planner.step.workload import PACKING
from grpo_operator.plan.planner.training.cost import Rows, call_cost, passes_of_update
from grpo_rehearsal.standins.agent import UpdateTimes
from grpo_rehearsal.standins.batching import Capacity, Speed
from grpo_rehearsal.standins.pieces import Pieces, in_proportion
from grpo_rehearsal.standins.state_bytes import STATE, WEIGHTS, Share, StateBytes
from grpo_rehearsal.standins.waves import Waves


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Figures that no plan derives.

    ``mean_response``: tokens; None: as the planner assumes. ``sigma``: of the logarithm of response lengths.
    ``store_rate``: bytes/s of one node to the model's files and to the checkpoint store. ``host_copy_rate``:
    bytes/s of one node from its GPUs to host memory, when a version is staged. ``process_start``: seconds of
    the ranks' start. ``rendezvous``: seconds in which the members of links assemble and engines record what
    they keep; the ranks' own rendezvous takes as long. ``layouts``: seconds in which the ranks exchange their
    layouts, once. ``planning``: seconds in which the first rank plans the transfers to engines of one kind.
    ``engine_restart``: seconds until a dead server answers again. ``head_restart``: seconds from the loss of
    Ray's head until ranks can be started on the cluster that has formed again. ``memory_turn``: seconds in
    which a colocated engine releases or takes its memory.
    """

    mean_response: float | None = None
    sigma: float = 0.8
    store_rate: float = 5e9
    host_copy_rate: float = 20e9
    process_start: float = 40.0
    rendezvous: float = 30.0
    layouts: float = 2.0
    planning: float = 4.0
    engine_restart: float = 240.0
    head_restart: float = 60.0
    memory_turn: float = 2.0


class Durations:
    """Seconds of a job's calls on its planned hardware."""

    def __init__(
        self, spec: GRPOJobSpec, pool: RolloutTemplate, plan: JobPlan, assumed: Assumptions | None = None
    ) -> None:
        """Raises ValueError when the planner cannot estimate the job."""
        self.assumed = assumed or Assumptions()
        own = PlanAssumptions(mean_response=self.assumed.mean_response, sigma=self.assumed.sigma)
        model = step_model(spec, pool, plan, own)
        if model is None or plan.engine_memory is None:
            raise ValueError(
                "the planner cannot estimate this job: set spec.model.architecture, and device: cuda for "
                "trainer and engines"
            )
        self.model = model
        self._spec, self._pool, self._plan = spec, pool, plan
        self._kv_tokens = plan.engine_memory.kv_tokens
        mtp, per_node = spec.model.multi_token_prediction, pool.engine.gpus_per_node
        self._bound = transfer_bounds.sync_bound(
            model.model, plan.layout, plan.engine, pool.replicas, self._network, per_node, mtp
        )

    @property
    def lengths(self) -> list[float]:
        """Return response lengths at equal steps of probability."""
        return self.model.workload.lengths.sample(4096)

    @property
    def version_bytes(self) -> int:
        """Return the bytes of one weight version."""
        return self._bound.version_bytes

    @property
    def update_bytes(self) -> float:
        """Return the bytes of one weight update on all wires."""
        return self.model.transfer.update_bytes

    def speed(self) -> Speed:
        """Return the speed of one attention replica of an engine."""
        engine = self.model.rollout.engine(self.model.model, self.model.efficiency)
        return Speed(engine.decode_seconds, engine.prefill_seconds)

    def capacity(self, block: int) -> Capacity:
        """Return the capacity of one attention replica."""
        running = self._pool.engine.max_running_requests // self._plan.engine.attention_data
        return Capacity(max(running, 1), self._kv_tokens, block)

    def forward(self, lengths: Sequence[int]) -> float:
        """Return the seconds of a forward pass over one replica's sequences."""
        return self._call(lengths, 1, gradients=False)

    def update(self, lengths: Sequence[int]) -> float:
        """Return the seconds of an optimizer step over one replica's sequences."""
        layout, rows = self._plan.layout, self._rows(lengths, gradients=True)
        passes = passes_of_update(self.model.model, layout, rows, self._plan.recompute)
        return self._call(lengths, passes, gradients=True)

    def micro_batches(self, lengths: Sequence[int], gradients: bool) -> float:
        """Return the number of micro-batches of one replica's sequences."""
        return self._rows(lengths, gradients).count

    @cached_property
    def state(self) -> StateBytes:
        """What each rank holds of the policy."""
        hf = self._spec.model.config()
        assert hf is not None, "the planner knows the model"
        return StateBytes.of(hf, self._plan.layout, self._spec.trainer.gpus_per_node)

    def read(self, widths: Sequence[int]) -> Pieces:
        """Return the reads of a state with ``widths`` bytes a value: the model's files, or a checkpoint."""
        return self.state.read(widths).at_node_rate(self.assumed.store_rate)

    def copy(self) -> Pieces:
        """Return the copies to host memory of what a checkpoint saves, for which the ranks wait."""
        return self.state.written(STATE).at_rank_rate(self.model.transfer.checkpoint_rate)

    @cached_property
    def checkpoint(self) -> Share:
        """Writes of a checkpoint: the weight version, if engines may read it, then the state."""
        state, weights = self.state.written(STATE), self.state.written(WEIGHTS)
        if not self._spec.fills_engines_from_store:
            return state
        return weights.scaled(self.version_bytes / weights.total).then(state)

    def write_checkpoint(self) -> Pieces:
        """Return the writes of a checkpoint."""
        return self.checkpoint.at_node_rate(self.assumed.store_rate)

    def export(self) -> Pieces:
        """Return the writes of an export."""
        return self.state.written(WEIGHTS).at_node_rate(self.assumed.store_rate)

    def snapshot(self) -> Pieces:
        """Return the copies of the ranks' own state, between GPUs and host memory."""
        return in_proportion(self.state.written(STATE).pieces, self.model.save_checkpoint())

    def stage(self) -> Pieces:
        """Return the copies of a version to host memory for late engines."""
        seconds = self.version_bytes / self._all(self.assumed.host_copy_rate)
        return in_proportion(self.state.written(WEIGHTS).pieces, seconds)

    def join(self) -> float:
        """Return the seconds in which the ranks open links to engines of one kind, which share a plan."""
        return self.assumed.rendezvous + self.assumed.planning

    def waves(self, nbytes: Sequence[int]) -> Waves:
        """Return the waves of a direct transfer, whose busiest members have ``nbytes`` in each."""
        return Waves(in_proportion(nbytes, self.model.update_weights()).ends)

    def updates(self) -> UpdateTimes:
        """Return the seconds of an engine's weight updates."""
        wire = self._pool.engine.nodes_per_engine * self._network * self.model.efficiency.link
        direct = self.model.update_weights()
        own = replace(self.model, transfer=replace(self.model.transfer, update_bytes=0.0))
        staged = own.update_weights() + self.version_bytes / wire
        return UpdateTimes(join=self.join(), take=direct, fetch=staged, turn=self.assumed.memory_turn)

    @property
    def _network(self) -> float:
        return GPUS[self._pool.engine.gpu_type].network

    def fetch_experts(self, nbytes: float) -> float:
        """Return the seconds in which the training nodes read so many bytes from engines' pods."""
        return nbytes / self._all(self._network * self.model.efficiency.link)

    def _all(self, node: float) -> float:
        return node * self._spec.trainer.nodes

    def _call(self, lengths: Sequence[int], passes: float, *, gradients: bool) -> float:
        trainer, model = self.model.trainer, self.model
        cost = call_cost(
            model.model, trainer.layout, self._rows(lengths, gradients), trainer.gpu, trainer.gpus_per_node,
            passes=passes, gradients=gradients, efficiency=model.efficiency,
            offloaded=model.workload.offloaded,
        )  # fmt: skip
        return cost.total

    def _rows(self, lengths: Sequence[int], gradients: bool) -> Rows:
        """Return the micro-batches of one replica, packed or padded as the job's ranks make them."""
        micro, max_tokens = self.model.workload.sizes(gradients)
        tokens = sum(lengths)
        if max_tokens is None:
            width = max(lengths)
            return Rows(len(lengths) / micro, width * micro, width / 2)
        budget = max_tokens * self.model.trainer.layout.context
        filled = min(budget * PACKING, tokens)
        count = max(tokens / filled, 1.0)
        attended = sum(n * n for n in lengths) / tokens / 2
        return Rows(count, tokens / count, attended, len(lengths) / count)
