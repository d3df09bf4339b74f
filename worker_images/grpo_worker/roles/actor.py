"""The actor role: one Ray actor per trainer rank, holding policy, reference and optimizer."""

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from grpo_operator.api.grpojob import GRPOJobSpec
from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.controller.dispatch import Dispatch, RankInfo, register

WEIGHTS = Path(os.environ.get("GRPO_WEIGHTS_DIR", "/weights"))
COLLECTIVE_TIMEOUT = timedelta(minutes=5)


class TrainerWorker:
    """One rank. The constructor is light; ``start`` imports Megatron-Core and builds the model."""

    def node(self) -> tuple[str, int]:
        """(IP address, process id), to order ranks and to find them in fault tests."""
        import ray

        return ray.util.get_node_ip_address(), os.getpid()

    def free_port(self) -> int:
        with socket.socket() as sock:
            sock.bind(("", 0))
            return int(sock.getsockname()[1])

    def start(self, rank: int, world: int, master: str, port: int, config: dict[str, Any]) -> RankInfo:
        """Join the process group and build the model. ``config``: spec, hf, checkpoint root."""
        from grpo_worker.megatron import cpu_platform

        cpu_platform.install()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        torch.distributed.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"tcp://{master}:{port}",
            rank=rank,
            world_size=world,
            timeout=COLLECTIVE_TIMEOUT,
        )
        return self._build(rank, world, config)

    def _build(self, rank: int, world: int, config: dict[str, Any]) -> RankInfo:
        from megatron.core import parallel_state as ps

        from grpo_worker.megatron.checkpoint import Checkpointer
        from grpo_worker.megatron.initialise import weight_reader
        from grpo_worker.megatron.model import PolicyModel, initialize_parallel
        from grpo_worker.profiling.trace import StepTrace

        spec = GRPOJobSpec.model_validate(config["spec"])
        self._spec = spec
        layout = spec.trainer.parallelism.layout(world)
        initialize_parallel(layout, spec.seed)
        read = weight_reader(spec.model.path, config["hf"], spec.seed)
        self._policy = PolicyModel(
            config["hf"],
            layout,
            spec.trainer.optimizer,
            spec.total_steps,
            read,
            spec.trainer.micro_batch_size_per_gpu,
            recompute=spec.trainer.recompute == "full",
        )
        self._checkpointer = Checkpointer(config["checkpoints"], self._policy, spec.checkpoint.keep)
        self._rank, self._world = rank, world
        folder = Path(config["checkpoints"]).parent / "profile"
        self._trace = StepTrace(spec.observability.profile, rank, folder)
        return RankInfo(
            rank,
            ps.get_tensor_model_parallel_rank(),
            ps.get_pipeline_model_parallel_rank(),
            ps.get_context_parallel_rank(),
            ps.get_data_parallel_rank(),
            layout.pipeline,
            layout.data,
        )

    @register(Dispatch.MEGATRON_COMPUTE)
    def log_probs(self, batch: TensorDict, reference: bool) -> torch.Tensor:
        """Per-token log-probabilities [rows, tokens] of the policy or the reference."""
        temperature = self._spec.algorithm.temperature
        return self._policy.log_probs(dict(batch.items()), temperature, reference)

    @register(Dispatch.MEGATRON_COMPUTE)
    def update_actor(self, batch: TensorDict, kl_coef: float) -> dict[str, float]:
        """One optimizer step on a mini-batch; metrics of the whole mini-batch."""
        algorithm = self._spec.algorithm
        loss = PolicyLossConfig(
            algorithm.clip_ratio_low,
            algorithm.clip_ratio_high,
            algorithm.clip_ratio_c,
            algorithm.use_kl_loss,
            algorithm.kl_loss_type,
        )
        return self._policy.update(dict(batch.items()), loss, kl_coef, algorithm.temperature)

    @register(Dispatch.ONE_TO_ALL)
    def begin_step(self, step: int) -> None:
        self._trace.begin(step)

    @register(Dispatch.ONE_TO_ALL)
    def end_step(self, step: int) -> None:
        self._trace.end(step)

    @register(Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: int) -> str:
        """Leave this rank's slices in the pod's shared memory; returns their digest."""
        from grpo_worker.megatron.weights import shards
        from grpo_worker.weightsync.manifest import publish

        parts = [(s.name, s.shape, s.dim, s.offset, s.tensor) for s in shards(self._policy.module) if s.owner]
        return publish(WEIGHTS, version, self._rank, self._world, parts).digest

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, step: int, controller_state: dict[str, Any]) -> None:
        """Start writing the checkpoint of ``step`` behind the training."""
        self._checkpointer.save(step, controller_state)

    @register(Dispatch.ONE_TO_ALL)
    def poll_checkpoint(self, blocking: bool) -> list[int]:
        """Commit what is written on all ranks; steps that became complete."""
        return self._checkpointer.poll(blocking)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, step: int) -> None:
        self._checkpointer.load(step)
