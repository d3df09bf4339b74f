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
from grpo_rehearsal.standins.pieces import Pieces, even
from grpo_rehearsal.standins.rank_record import Save
from grpo_rehearsal.standins.state_bytes import STATE, WEIGHTS
from grpo_rehearsal.standins.tokens import log_probs
from grpo_worker.checkpointing.store import CONTROLLER_STATE, Origin, commit, directory, model_digest
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.data.routed_experts import RoutedExperts
from grpo_worker.megatron.families.registry import expert_layers
from grpo_worker.metrics.flops import ModelFlops, attention_width
from grpo_worker.profiling.nccl_transport import Transport
from grpo_worker.profiling.own_time import OwnTime
from grpo_worker.profiling.trace import Traced
from grpo_worker.roles.dispatch import Columns, RankInfo, collect
from grpo_worker.weightsync.planner.regions import RegionError
from grpo_worker.weightsync.protocol.link_offer import LinkOffer
from grpo_worker.weightsync.transport.rendezvous import JOIN_SECONDS

_FORWARD = ("log_probs", "reference_log_probs", "values", "reward_scores", "router_agreement")
_UPDATE = ("update_actor", "update_critic")
_AT_ONCE = (
    "listen", "flops", "start_rendezvous", "close_links", "snapshot_written", "map_routed_experts",
    "start_trace", "stop_trace", "transport", "checkpoint_bytes", "own_time",
)  # fmt: skip
_IMPORT_SECONDS = 300.0  # beyond hangSeconds, that the controller waits for a new process


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
    """One call of all ranks.

    ``pieces``: progress that it reports. ``allowance``: seconds beyond hangSeconds that it may stand still.
    ``assumed``: the longest time without progress is an assumption, which real ranks divide further.
    """

    pieces: Pieces
    allowance: float = 0.0
    assumed: bool = False


@dataclass(slots=True)
class RankMethods:
    """Durations and results of the calls of one gang. ``now``: returns the time.

    ``links``: of the gang. ``nbytes``: by link, to which the experts that ranks fetch are added, what the
    members of links tell each other, and what passes between ranks and the store. ``slow``: factors of the
    passes of slow ranks. ``saves``: to which each checkpoint is added. ``late``: seconds until the processes
    can be started.
    """

    job: Job
    now: Callable[[], float]
    links: GangLinks
    nbytes: Counter[str]
    slow: Mapping[int, float] = field(default_factory=dict)
    saves: list[Save] = field(default_factory=list)
    late: float = 0.0
    attempt: int = 0  # of the job, whose gang this is
    _saving: tuple[Save, dict[str, Any]] | None = None  # (checkpoint, controller's state)
    _problem: str = ""  # of the exchange of layouts
    _own: dict[int, list[float]] = field(default_factory=dict)  # seconds of log-probs and updates, by rank
    _exported: float = 0.0  # when the export is complete

    def work(self, method: str, args: Sequence[Sequence[Any]], ranks: Sequence[int]) -> Work:
        """Return how long a call takes. ``args``: of each of the ``ranks``.

        Raises AttributeError for a method that no stand-in has.
        """
        times = self.job.durations
        if method in _FORWARD:
            return self._work(args, ranks, times.forward, gradients=False)
        if method in _UPDATE:
            return self._work(args, ranks, times.update, gradients=True)
        if method == "poll_checkpoint":
            return Work(self._unwritten() if args[0][0] else even(0.0))
        if method == "save_checkpoint":
            return Work(self._save(*args[0]))
        if method == "open_links":
            (offers,) = args[0]
            return Work(even(times.join(), len(offers)), JOIN_SECONDS)
        if method == "node":
            return Work(even(self.late + times.assumed.process_start), _IMPORT_SECONDS)
        if method == "start":
            return Work(self._read(WEIGHTS).after(times.assumed.rendezvous), assumed=True)
        if method == "load_routed_experts":
            parts, _, fetching = args[0]
            return Work(even(times.fetch_experts(sum(map(self._experts, parts))), len(fetching)))
        pieces: dict[str, Callable[[], Pieces]] = {
            "empty_cache": lambda: even(0.1),
            "exchange_layouts": lambda: even(self._exchange(bool(args[0][0]))),
            "send_weights": lambda: times.waves(self.links.waves).pieces,
            "publish_weights": times.stage,
            "load_checkpoint": lambda: self._read(STATE),
            "export_weights": lambda: self._export(args[0][1]),
            "poll_export": lambda: self._export_left() if args[0][0] else even(0.0),
            "take_snapshot": times.snapshot,
            "load_snapshot": times.snapshot,
            "refresh_reference": times.snapshot,
            "store_routed_experts": lambda: even(times.fetch_experts(sum(r.nbytes for r in args[0][0]))),
        }
        if method not in pieces and method not in _AT_ONCE:
            raise AttributeError(f"stand-in ranks have no method {method}: add it to rank_methods.py")
        return Work(pieces[method]() if method in pieces else even(0.0))

    def result(self, method: str, rank: RankInfo, args: Sequence[Any]) -> Any:
        """Return the result of one rank."""
        if method in _FORWARD or method in _UPDATE:
            if not rank.collected:
                return None
            batch = _batch(args)
            return collect(rank, batch, self._of_batch(method, batch))
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
            "checkpoint_bytes": lambda: 0,  # the stand-ins write none of them
            "empty_cache": lambda: (0, 0),
            "exchange_layouts": lambda: self._problem if rank.rank == 0 else "",
            "open_links": lambda: [self._open(rank.rank, offer) for offer in args[0]],
            "send_weights": lambda: [""] * len(args[0]),
            "publish_weights": lambda: f"version-{args[0]}",
            "snapshot_written": lambda: True,
            "poll_export": lambda: self.now() >= self._exported,
            "own_time": lambda: OwnTime(*self._own.pop(rank.rank, (0.0, 0.0))),
            "stop_trace": Traced,
            "transport": Transport,
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

    def _export(self, beside: bool) -> Pieces:
        """Begin an export; return what the call waits for: with ``beside`` the copies only."""
        times = self.job.durations
        seen = times.copy() if beside else times.export()
        self._exported = self.now() + seen.seconds + (times.export().seconds if beside else 0.0)
        return seen

    def _export_left(self) -> Pieces:
        """Return the writes that are missing to the export in progress."""
        left = max(self._exported - self.now(), 0.0)
        whole = self.job.durations.export()
        return whole.since(whole.seconds - left) if left else even(0.0)

    def _experts(self, references: Sequence[RoutedExperts]) -> int:
        """Return the bytes that all stages together read of these samples' experts."""
        moe = len(expert_layers(self.job.hf).moe)
        return sum(moe * reference.layer_bytes for reference in references)

    def _work(
        self,
        args: Sequence[Sequence[Any]],
        ranks: Sequence[int],
        seconds: Callable[[Sequence[int]], float],
        gradients: bool,
    ) -> Work:
        """Return the work of the replica that takes longest, which all ranks wait for.

        ``gradients``: the call is an update.
        A slow rank makes its whole replica slow: the other stages and shards wait for it at each micro-batch.
        """
        lengths: dict[tuple[int, ...], list[int]] = {}
        times: dict[tuple[int, ...], float] = {}
        slowest = 0.0
        for rank, (columns, _, *arrays) in zip(ranks, args, strict=True):
            count = len(arrays) // columns.pieces
            own = arrays[::count]  # each piece begins with the lengths of its rows
            key = tuple(id(array) for array in own)
            if key not in lengths:
                lengths[key] = [int(n) for piece in own for n in piece[1]]
                times[key] = seconds(lengths[key])
            taken = self.slow.get(rank, 1.0) * times[key]
            self._own.setdefault(rank, [0.0, 0.0])[gradients] += taken
            if rank in self.slow:
                slowest = max(slowest, taken)
        fullest = max(lengths.values(), key=sum)
        count = self.job.durations.micro_batches(fullest, gradients)
        return Work(even(max(seconds(fullest), slowest), count))

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

    def _read(self, widths: Sequence[int]) -> Pieces:
        """Return the reads of a state with ``widths`` bytes a value from the store, and count them."""
        self.nbytes["store>trainer"] += self.job.durations.state.read(widths).total
        return self.job.durations.read(widths)

    def _save(self, step: int, state: dict[str, Any], _from_host: bool = False) -> Pieces:
        """Begin a checkpoint; return the copies for which the ranks wait."""
        times, now = self.job.durations, self.now()
        copied = now + times.copy().seconds
        written = copied + times.write_checkpoint().seconds
        save = Save(step, now, copied, written, times.checkpoint.total)
        self.saves.append(save)
        self._saving = save, state
        return times.copy()

    def _unwritten(self) -> Pieces:
        """Return the writes that are missing to the checkpoint in progress."""
        if self._saving is None:
            return even(0.0)
        return self.job.durations.write_checkpoint().since(self.now() - self._saving[0].copied)

    def _poll(self) -> list[int]:
        if self._saving is None or self.now() < self._saving[0].written:
            return []
        (save, state), self._saving = self._saving, None
        step, save.committed = save.step, self.now()
        self.nbytes["trainer>store"] += save.nbytes
        path = directory(self.job.checkpoints, step, self.attempt)
        if not path.is_dir():
            path.mkdir(parents=True)
            (path / CONTROLLER_STATE).write_text(json.dumps(state))
            origin = Origin(model_digest(self.job.hf), "rehearsal", self.attempt)
            commit(self.job.checkpoints, step, origin)
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
