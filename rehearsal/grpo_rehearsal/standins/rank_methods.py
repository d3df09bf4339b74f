"""Methods of a stand-in trainer rank: how long each takes, and what it returns.

The names, arguments and results are those of ``grpo_worker.roles.trainer.TrainerWorker``. A method without an
entry here cannot be rehearsed and fails by name.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_rehearsal.durations import Durations
from grpo_rehearsal.standins.links import GangLinks
from grpo_rehearsal.standins.tokens import log_probs
from grpo_worker.checkpointing.store import CONTROLLER_STATE, Origin, commit, directory, model_digest
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.data.routed_experts import RoutedExperts
from grpo_worker.megatron.families.registry import expert_layers
from grpo_worker.metrics.flops import ModelFlops, attention_width
from grpo_worker.roles.dispatch import Columns, RankInfo
from grpo_worker.weightsync.planner.regions import RegionError
from grpo_worker.weightsync.protocol.link_offer import LinkOffer
from grpo_worker.weightsync.transport.rendezvous import JOIN_SECONDS

_FORWARD = ("log_probs", "reference_log_probs", "values", "reward_scores", "router_agreement")
_UPDATE = ("update_actor", "update_critic")
_UNITS = 100  # pieces of progress of a call that has no micro-batches


@dataclass(frozen=True, slots=True)
class Job:
    """The job that the ranks belong to. ``checkpoints``: folder of the store."""

    spec: GRPOJobSpec
    hf: dict[str, Any]
    layout: Layout
    durations: Durations
    checkpoints: Path


@dataclass(frozen=True, slots=True)
class Work:
    """One call of all ranks. ``seconds``: until its end. ``units``: pieces of progress that it reports."""

    seconds: float
    units: float = 1.0
    allowance: float = 0.0


@dataclass(slots=True)
class RankMethods:
    """Durations and results of the calls of one gang. ``now``: returns the time.

    ``links``: of the gang. ``nbytes``: by link, to which the experts that ranks fetch are added, and what the
    members of links tell each other. ``slow``: factors of the passes of slow ranks.
    """

    job: Job
    now: Callable[[], float]
    links: GangLinks
    nbytes: Counter[str]
    slow: Mapping[int, float] = field(default_factory=dict)
    _saving: tuple[int, dict[str, Any], float] | None = None  # (step, controller state, end)
    _problem: str = ""  # of the exchange of layouts

    def work(self, method: str, args: Sequence[Sequence[Any]], ranks: Sequence[int]) -> Work:
        """Return how long a call takes. ``args``: of each of the ``ranks``.

        Raises AttributeError for a method that no stand-in has.
        """
        times = self.job.durations
        if method in _FORWARD:
            return self._work(args, ranks, times.forward)
        if method in _UPDATE:
            return self._work(args, ranks, times.update)
        if method == "poll_checkpoint":
            blocking = args[0][0]
            return Work(max(self._saving[2] - self.now(), 0.0) if blocking and self._saving else 0.0, _UNITS)
        if method == "save_checkpoint":
            step, state = args[0]
            self._saving = (step, state, self.now() + times.snapshot() + times.write())
            return Work(times.snapshot(), _UNITS)
        if method == "open_links":
            (offers,) = args[0]
            return Work(times.join(), len(offers), JOIN_SECONDS)
        if method == "send_weights":
            _, patience = args[0]
            return Work(times.updates().take, 1, patience)
        if method == "load_routed_experts":
            parts, _, fetching = args[0]
            return Work(times.fetch_experts(sum(self._experts(part) for part in parts)), len(fetching))
        seconds: dict[str, Callable[[], float]] = {
            "node": lambda: times.assumed.process_start,
            "listen": lambda: 0.0,
            "start": lambda: times.assumed.rendezvous + times.load(),
            "flops": lambda: 0.0,
            "empty_cache": lambda: 0.1,
            "exchange_layouts": lambda: self._exchange(bool(args[0][0])),
            "start_rendezvous": lambda: 0.0,
            "close_links": lambda: 0.0,
            "publish_weights": times.stage,
            "load_checkpoint": times.restore,
            "export_weights": times.write,
            "take_snapshot": times.snapshot,
            "snapshot_written": lambda: 0.0,
            "load_snapshot": times.snapshot,
            "refresh_reference": times.snapshot,
            "map_routed_experts": lambda: 0.0,
            "store_routed_experts": lambda: times.fetch_experts(sum(r.nbytes for r in args[0][0])),
            "begin_step": lambda: 0.0,
            "end_step": lambda: 0.0,
        }
        if method not in seconds:
            raise AttributeError(f"stand-in ranks have no method {method}: add it to rank_methods.py")
        return Work(seconds[method](), _UNITS)

    def result(self, method: str, rank: RankInfo, args: Sequence[Any]) -> Any:
        """Return the result of one rank."""
        if method in _FORWARD or method in _UPDATE:
            return self._of_batch(method, _batch(args)) if rank.collected else None
        if method == "poll_checkpoint":
            return self._poll()
        if method == "load_routed_experts":
            parts, _, fetching = args
            if rank.rank in fetching:
                layout = self.job.layout
                own = self._experts(parts[rank.dp_rank]) // (layout.pipeline * layout.context)
                self.nbytes["engine>trainer"] += own
            return []
        if method == "store_routed_experts":
            references, folder = args
            own = references[rank.rank :: self.job.layout.world]
            self.nbytes["engine>trainer"] += sum(reference.nbytes for reference in own)
            return {r.key: (f"{folder}/rank-{rank.rank}.bin", 0) for r in own}
        results: dict[str, Callable[[], Any]] = {
            "listen": lambda: 29500,
            "start_rendezvous": lambda: 29501,
            "flops": lambda: self.flops,
            "empty_cache": lambda: (0, 0),
            "exchange_layouts": lambda: self._problem if rank.rank == 0 else "",
            "open_links": lambda: [self._open(rank.rank, offer) for offer in args[0]],
            "send_weights": lambda: [""] * len(args[0]),
            "publish_weights": lambda: f"version-{args[0]}",
            "snapshot_written": lambda: True,
            "end_step": dict,
        }
        return results[method]() if method in results else None

    @property
    def flops(self) -> ModelFlops:
        """Return the operations of the model's forward pass."""
        shape = ModelShape.from_hf(self.job.hf)
        total = parameters.total(shape)
        used = total.split + total.whole - parameters.embedding(shape).total
        if shape.experts is not None:
            used += total.expert * shape.experts.top_k // shape.experts.count
        return ModelFlops(int(used), attention_width(self.job.hf))

    def _exchange(self, fp8: bool) -> float:
        """Exchange the layouts unless that was done; return the seconds."""
        if self.links.knows_layouts(fp8):
            return 0.0
        try:
            self.nbytes["trainer>trainer"] += self.links.exchange_layouts(fp8)
        except RegionError as error:
            self._problem = f"trainer rank 0: {error}"
        return self.job.durations.assumed.layouts

    def _open(self, rank: int, offer: LinkOffer) -> str:
        """Open a link; return the error of a rank. What all members read is counted with the first rank."""
        join = self.links.join(offer)
        if rank == 0:
            self.links.kept_bytes += join.kept
            self.nbytes["engine>trainer"] += join.kept
            self.nbytes["trainer>trainer"] += join.sends
        return join.problem and f"trainer rank {rank}: {join.problem}"

    def _experts(self, references: Sequence[RoutedExperts]) -> int:
        """Return the bytes that all stages together read of these samples' experts."""
        moe = len(expert_layers(self.job.hf).moe)
        return sum(moe * reference.layer_bytes for reference in references)

    def _work(
        self, args: Sequence[Sequence[Any]], ranks: Sequence[int], seconds: Callable[[Sequence[int]], float]
    ) -> Work:
        """Return the work of the replica that takes longest, which all ranks wait for.

        A slow rank makes its whole replica slow: the other stages and shards wait for it at each micro-batch.
        """
        lengths: dict[tuple[int, ...], list[int]] = {}
        slowest = 0.0
        for rank, (columns, _, *arrays) in zip(ranks, args, strict=True):
            count = len(arrays) // columns.pieces
            own = arrays[::count]  # each piece begins with the lengths of its rows
            key = tuple(id(array) for array in own)
            if key not in lengths:
                lengths[key] = [int(n) for piece in own for n in piece[1]]
            if rank in self.slow:
                slowest = max(slowest, self.slow[rank] * seconds(lengths[key]))
        fullest = max(lengths.values(), key=sum)
        return Work(max(seconds(fullest), slowest), self.job.durations.micro_batches(fullest))

    def _of_batch(self, method: str, batch: RaggedBatch) -> Any:
        if method in ("log_probs", "reference_log_probs"):
            return _log_probs(batch, entropy=method == "log_probs")
        if method == "values":
            return Columns({"values": np.zeros(int(batch.response_lengths.sum()), np.float32)})
        if method == "reward_scores":
            return Columns({}, {"scores": np.zeros(batch.rows, np.float32)})
        return {"router_agreement": 1.0, "update_critic": {"critic/vf_loss": 0.0}}.get(
            method, _UPDATE_METRICS
        )

    def _poll(self) -> list[int]:
        if self._saving is None or self.now() < self._saving[2]:
            return []
        step, state, _ = self._saving
        self._saving = None
        path = directory(self.job.checkpoints, step)
        if not path.is_dir():
            path.mkdir(parents=True)
            (path / CONTROLLER_STATE).write_text(json.dumps(state))
            commit(self.job.checkpoints, step, Origin(model_digest(self.job.hf), "rehearsal"))
        return [step]


_UPDATE_METRICS = {
    "actor/pg_loss": 0.0,
    "actor/grad_norm": 1.0,
    "actor/kl_loss": 0.0,
    "actor/entropy": 1.0,
    "actor/lr": 1e-6,
}


def _batch(args: Sequence[Any]) -> RaggedBatch:
    """Return the rows that one rank gets, from the arguments of a call with a split batch."""
    columns, _, *arrays = args
    batch: RaggedBatch = columns.batch(arrays)
    return batch


def _log_probs(batch: RaggedBatch, *, entropy: bool) -> Columns:
    """Return the log-probability of each response token, which all stand-ins agree on."""
    assert batch.input_ids is not None, "a rank that answers has the tokens"
    values = log_probs(batch.response_of(batch.input_ids))
    row = {"entropy": batch.row_sums(np.ones_like(values)).astype(np.float32)} if entropy else {}
    return Columns({"log_probs": values}, row)
