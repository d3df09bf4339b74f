"""The trainer role: one Ray actor per rank, with policy, reference, critic and reward model."""

import gc
import logging
import os
import socket
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import TCPStore

from grpo_operator.api.names import NODE_VARIABLE
from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.common.log_files import keep_rank_lines
from grpo_worker.common.log_lines import log_as
from grpo_worker.common.ragged_batch import INPUT_IDS, ROUTED_EXPERTS, RaggedBatch
from grpo_worker.common.versions import installed
from grpo_worker.data.routed_experts import RoutedExperts
from grpo_worker.metrics.flops import ModelFlops
from grpo_worker.profiling.nccl_log import NcclLog
from grpo_worker.profiling.nccl_transport import Transport
from grpo_worker.profiling.own_time import OWN_TIME, measure_collectives
from grpo_worker.profiling.progress import PROGRESS
from grpo_worker.profiling.trace import RankTracer, StepTrace, Traced
from grpo_worker.roles.checkpoints import CheckpointMethods
from grpo_worker.roles.dispatch import Columns, Dispatch, RankInfo, register
from grpo_worker.roles.expert_store import ExpertStore, store_whole
from grpo_worker.roles.host import RankHost
from grpo_worker.roles.watching import WatchMethods
from grpo_worker.roles.weight_sync import WEIGHTS, WeightMethods

if TYPE_CHECKING:
    from grpo_worker.roles.trainer_models import TrainerModels

# torch counts the time in a collective, not progress: a rank may wait for hours for one that loads or writes.
# The controller sees the progress of all ranks and names a hang (restartPolicy.hangSeconds) long before.
NEVER = timedelta(days=365)


class TrainerWorker(WeightMethods, CheckpointMethods, WatchMethods):
    """One trainer rank.

    The gang learns the actors' nodes before it numbers the ranks, so the constructor does nothing:
    ``start`` joins the process group, imports Megatron-Core and builds the models.
    """

    # Set by ``start``; ``_rank`` and ``_world`` are declared in WeightMethods.
    rank_info: RankInfo
    _models: "TrainerModels"
    _transport: Transport
    _rank = -1
    _experts: ExpertStore
    _tracer: RankTracer | None = None  # from the first trace on
    _store: TCPStore | None = None  # of rank 0, for the rendezvous

    def node(self) -> RankHost:
        """Return where this process runs, which orders ranks and lets errors name pods, and its image."""
        import ray

        pod = os.environ.get("POD_NAME") or socket.gethostname()  # the node's name on the host's network
        node = os.environ.get(NODE_VARIABLE, "")
        return RankHost(ray.util.get_node_ip_address(), os.getpid(), pod, installed(), node)

    def listen(self) -> int:
        """Start the store of the process group's rendezvous on rank 0; return its port.

        The store binds a free port itself, so no other process can take the port in between.
        """
        self._store = TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
        return int(self._store.port)

    def start(self, rank: int, world: int, master: str, port: int, config: dict[str, Any]) -> RankInfo:
        """Join the process group and build the models. Collective.

        ``master``, ``port``: address of rank 0's store. ``config``: see ``build_models``, and ``logs``, the
        folder for log files.
        """
        from grpo_worker.megatron.cpu import platform as cpu_platform

        log_as("trainer", logging.WARNING)  # libraries say much, on every rank
        keep_rank_lines(config.get("logs"), rank, config["attempt"])
        self._thread = threading.get_ident()
        cpu_platform.install()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        measure_collectives(OWN_TIME)
        self._rank, self._world = rank, world
        PROGRESS.add("imports")
        store = self._store or TCPStore(master, port, None, False)
        store.set_timeout(NEVER)
        PROGRESS.add("rendezvous")
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        with NcclLog(backend == "nccl") as log:
            torch.distributed.init_process_group(
                backend, store=store, rank=rank, world_size=world, timeout=NEVER
            )
            PROGRESS.add("process groups")
            self.rank_info = self._build(rank, world, config)  # its first collective makes NCCL choose
            self._transport = log.transport()
        PROGRESS.add("starts")
        return self.rank_info

    @register(Dispatch.ONE_TO_ALL)
    def transport(self) -> Transport:
        """Return the transport that NCCL chose in ``start``."""
        return self._transport

    @register(Dispatch.ONE_TO_ALL)
    def empty_cache(self) -> tuple[int, int]:
        """Free unused cached GPU memory; return the bytes allocated and the bytes still reserved."""
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def _build(self, rank: int, world: int, config: dict[str, Any]) -> RankInfo:
        from grpo_worker.roles.trainer_models import build_models, rank_info

        self._models = build_models(rank, world, config)
        return rank_info(rank, self._models)

    @register(Dispatch.MEGATRON_COMPUTE, (INPUT_IDS,))
    @OWN_TIME.phase("log_probs")
    def values(self, batch: RaggedBatch) -> Columns:
        """Return ``values`` of response tokens: the critic's expected return before each one."""
        critic = self._models.critic
        assert critic is not None, "the job has no critic"
        return Columns({name: batch.response_of(found) for name, found in critic.values(batch).items()})

    @register(Dispatch.MEGATRON_COMPUTE, (INPUT_IDS,))
    @OWN_TIME.phase("log_probs")
    def reward_scores(self, batch: RaggedBatch) -> Columns:
        """Return ``scores`` of rows: the reward model's score of each response."""
        reward_model = self._models.reward_model
        assert reward_model is not None, "the job has no reward model"
        return Columns(row=reward_model.scores(batch))

    @register(Dispatch.MEGATRON_COMPUTE, (INPUT_IDS, "weights", "values", "returns"))
    @OWN_TIME.phase("update")
    def update_critic(self, batch: RaggedBatch) -> dict[str, float]:
        """Take one optimizer step of the critic; return metrics of the whole mini-batch."""
        critic, config = self._models.critic, self._models.spec.algorithm.critic
        assert critic is not None and config is not None, "the job has no critic"
        return critic.update(batch, config.cliprange_value)

    @register(Dispatch.ONE_TO_ALL)
    def decay_over(self, updates: int) -> None:
        """Let the learning rates decay over another number of optimizer steps of the whole job."""
        for model in (self._models.policy, self._models.critic):
            if model is not None:
                model.trainable.decay_over(updates)

    @register(Dispatch.ONE_TO_ALL)
    def refresh_reference(self) -> None:
        """Copy the policy's current weights into the reference."""
        self._models.policy.refresh_reference()

    @register(Dispatch.MEGATRON_COMPUTE, (INPUT_IDS, ROUTED_EXPERTS))
    @OWN_TIME.phase("log_probs")
    def log_probs(self, batch: RaggedBatch) -> Columns:
        """Return the policy's ``log_probs`` of response tokens, and of rows the sums of their ``entropy``."""
        from grpo_worker.megatron.training.reductions import over_context

        temperature = self._models.spec.algorithm.temperature
        found = self._models.policy.log_probs(self._routed(batch), temperature, with_entropy=True)
        if not found:
            return Columns()
        entropy = over_context(batch.row_sums(batch.response_of(found["entropy"])))
        return Columns({"log_probs": batch.response_of(found["log_probs"])}, {"entropy": entropy})

    @register(Dispatch.MEGATRON_COMPUTE, (INPUT_IDS,))
    @OWN_TIME.phase("log_probs")
    def reference_log_probs(self, batch: RaggedBatch) -> Columns:
        """Return the reference's ``log_probs`` of response tokens."""
        temperature = self._models.spec.algorithm.temperature
        found = self._models.policy.log_probs(batch, temperature, reference=True)
        return Columns({name: batch.response_of(column) for name, column in found.items()})

    @register(Dispatch.MEGATRON_COMPUTE, (INPUT_IDS, ROUTED_EXPERTS))
    def router_agreement(self, batch: RaggedBatch) -> float:
        """Return the share of the engines' routed experts that the trainer's routers choose too."""
        return self._models.policy.router_agreement(self._routed(batch))

    @register(
        Dispatch.MEGATRON_COMPUTE,
        (
            INPUT_IDS,
            ROUTED_EXPERTS,
            "weights",
            "advantages",
            "old_log_probs",
            "ref_log_prob",
            "rollout_is_weights",
        ),
    )
    @OWN_TIME.phase("update")
    def update_actor(self, batch: RaggedBatch, kl_coef: float, check: bool = False) -> dict[str, float]:
        """Take one optimizer step of the policy; return metrics of the whole mini-batch.

        ``check``: compute its gradients twice. Raises GradientMismatchError on ranks whose gradients differ.
        """
        from grpo_worker.megatron.training.reductions import largest_memory

        algorithm = self._models.spec.algorithm
        loss = PolicyLossConfig(
            algorithm.clip_ratio_low,
            algorithm.clip_ratio_high,
            algorithm.clip_ratio_c,
            algorithm.use_kl_loss,
            algorithm.kl_loss_type,
            algorithm.policy_loss,
            algorithm.entropy_coef,
        )
        metrics = self._models.policy.update(self._routed(batch), loss, kl_coef, algorithm.temperature, check)
        return metrics | largest_memory()

    @register(Dispatch.ONE_TO_ALL)
    def load_routed_experts(
        self, parts: list[list[RoutedExperts]], width: int, fetching: frozenset[int]
    ) -> list[str]:
        """Fetch the experts of this rank's rows into the pod's memory; return the keys of lost ones.

        ``parts``: references by data-parallel rank. ``width``: of the batch. ``fetching``: ranks that fetch,
        one of each pod among those that need the same.
        """
        info, models = self.rank_info, self._models
        name = f"dp{info.dp_rank}-pp{info.pp_rank}-cp{info.cp_rank}.bin"
        self._experts = ExpertStore(WEIGHTS / "experts" / name)
        if info.rank not in fetching:
            return []
        moe = models.expert_layers.moe if models.expert_layers else ()
        layers = [moe[i] for i in models.policy.expert_layers]

        def spans(tokens: int) -> list[tuple[int, int]]:
            return models.policy.context_spans(width, tokens + 1)  # the last token of a row has no experts

        return self._experts.fetch(parts[info.dp_rank], layers, spans)

    @register(Dispatch.ONE_TO_ALL)
    def map_routed_experts(self) -> None:
        """Map what a rank of this pod has fetched."""
        self._experts.map()

    @register(Dispatch.ONE_TO_ALL)
    def store_routed_experts(
        self, references: list[RoutedExperts], folder: str
    ) -> dict[str, tuple[str, int]]:
        """Write this rank's share of the references' experts to a folder, where they outlive the engines.

        Runs in a thread beside the calls, so that a slow store delays no step.
        Returns file and offset of each key, without those that are lost.
        """
        own, file = references[self._rank :: self._world], Path(folder) / f"rank-{self._rank}.bin"
        return {key: (str(file), offset) for key, offset in store_whole(own, file).items()}

    def _routed(self, batch: RaggedBatch) -> RaggedBatch:
        """Return the batch with the experts that ``load_routed_experts`` fetched for its rows."""
        keys = batch.row.get(ROUTED_EXPERTS)
        if keys is None:
            return batch
        return replace(batch, routed=[self._experts.rows[key.decode()] for key in keys.tolist()])

    @register(Dispatch.ONE_TO_ALL)
    def start_trace(self, trace: StepTrace) -> None:
        """Start recording, if this is one of the trace's ranks."""
        self._tracer = self._tracer or RankTracer(self._rank)
        self._tracer.start(trace)

    @register(Dispatch.ONE_TO_ALL)
    def stop_trace(self) -> Traced:
        """Write this rank's part of the trace."""
        return self._tracer.stop() if self._tracer else Traced()

    @register(Dispatch.RANK_ZERO)
    def flops(self) -> ModelFlops:
        """Return the floating-point operations per token of this model."""
        return self._models.flops

    @register(Dispatch.RANK_ZERO)
    def checkpoint_bytes(self) -> int:
        """Return an estimate of the bytes of a checkpoint of all ranks."""
        return self._models.checkpoint_bytes
