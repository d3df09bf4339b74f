"""The actor role: one Ray actor per trainer rank, holding policy, reference and optimizer."""

import gc
import os
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from grpo_operator.api.base import Device
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.checkpointing.snapshots import file_of, seal
from grpo_worker.metrics.flops import ModelFlops, attention_width
from grpo_worker.profiling.hang import Position, position, write_flight_record
from grpo_worker.roles.dispatch import Dispatch, RankInfo, register
from grpo_worker.roles.weight_sync import WEIGHTS, WeightMethods
from grpo_worker.weightsync.trainer.endpoint import TrainerEndpoint

SNAPSHOTS = WEIGHTS / "snapshots"
COLLECTIVE_TIMEOUT = timedelta(minutes=5)


class TrainerWorker(WeightMethods):
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
        from grpo_worker.megatron.cpu import platform as cpu_platform

        self._thread = threading.get_ident()
        cpu_platform.install()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        torch.distributed.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"tcp://{master}:{port}",
            rank=rank,
            world_size=world,
            timeout=COLLECTIVE_TIMEOUT,
        )
        self._rank, self._world = rank, world
        self.place = self._build(rank, world, config)
        return self.place

    def position(self) -> Position:
        """How far this rank is; answered in a thread of its own, for the case of a hang."""
        return position(self._rank, self._thread)

    @register(Dispatch.ONE_TO_ALL)
    def empty_cache(self) -> tuple[int, int]:
        """Give back the GPU memory that nothing of this rank uses just now; bytes in use and bytes kept."""
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def write_flight_record(self, folder: str) -> None:
        """Leave torch's flight recorder of this rank in a folder; answered like ``position``."""
        write_flight_record(Path(folder), self._rank)

    def _build(self, rank: int, world: int, config: dict[str, Any]) -> RankInfo:
        from megatron.core import parallel_state as ps

        from grpo_worker.checkpointing.store import Origin, model_digest
        from grpo_worker.megatron.checkpoint.checkpointer import Checkpointer, Part
        from grpo_worker.megatron.conversion.readers import weight_reader
        from grpo_worker.megatron.model.build import device, initialize_parallel
        from grpo_worker.megatron.training.critic import CriticModel
        from grpo_worker.megatron.training.parameter_count import active_parameters
        from grpo_worker.megatron.training.policy import PolicyModel
        from grpo_worker.megatron.training.reward_model import RewardModel
        from grpo_worker.megatron.training.runner import MicroBatching
        from grpo_worker.megatron.training.setup import ModelSetup
        from grpo_worker.profiling.trace import StepTrace

        spec = GRPOJobSpec.model_validate(config["spec"])
        if spec.trainer.device is Device.CUDA and not torch.cuda.is_available():
            raise RuntimeError(
                "spec.trainer.device is cuda, but this rank sees no GPU: check its pod's limits"
            )
        self._spec, self._hf = spec, config["hf"]
        layout = spec.trainer.parallelism.layout(world)
        initialize_parallel(layout, spec.seed)
        self._link = TrainerEndpoint(rank, world, device())
        trainer, algorithm = spec.trainer, spec.algorithm
        setup = ModelSetup(
            config["hf"],
            layout,
            weight_reader(spec.model.path, config["hf"], spec.seed),
            MicroBatching(trainer.micro_batch_size_per_gpu, trainer.max_tokens_per_gpu),
            torch.bfloat16 if torch.cuda.is_available() else torch.float32,
            recompute=trainer.recompute == "full",
            offload=trainer.offload,
            next_tokens=spec.model.multi_token_prediction,
        )
        self._policy = PolicyModel(
            setup,
            trainer.optimizer,
            spec.total_steps,
            with_reference=algorithm.needs_reference,
            replay_routing=algorithm.routing_replay,
        )
        critic = algorithm.critic
        self._critic = CriticModel(setup, critic.optimizer, spec.total_steps) if critic else None
        model = spec.reward.model if spec.reward else None
        self._reward_model = RewardModel(model.path, setup) if model else None
        parts = self._policy.parts(algorithm.refresh_reference_steps is not None)
        if self._critic is not None:
            parts.append(Part("critic.", self._critic.trainable.chunks, self._critic.trainable))
        with self._policy.trainable.weights.here():
            active = active_parameters(self._policy.chunks, self._policy.family)
        self._flops = ModelFlops(active, attention_width(config["hf"]))
        origin = Origin(model_digest(config["hf"]), str(layout))
        self._parts = parts
        self._checkpointer = Checkpointer(config["checkpoints"], parts, spec.checkpoint.keep, origin)
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
    def values(self, batch: TensorDict) -> TensorDict:
        """values [rows, tokens]: the critic's expectation before each token."""
        assert self._critic is not None, "the job has no critic"
        found = self._critic.values(dict(batch.items()))
        return TensorDict(found, batch_size=batch.batch_size)

    @register(Dispatch.MEGATRON_COMPUTE)
    def reward_scores(self, batch: TensorDict) -> TensorDict:
        """scores [rows, 1]: what the reward model says of each whole answer."""
        assert self._reward_model is not None, "the job has no reward model"
        return TensorDict(self._reward_model.scores(dict(batch.items())), batch_size=batch.batch_size)

    @register(Dispatch.MEGATRON_COMPUTE)
    def update_critic(self, batch: TensorDict) -> dict[str, float]:
        """One optimizer step of the critic on a mini-batch; metrics of the whole mini-batch."""
        critic = self._spec.algorithm.critic
        assert self._critic is not None and critic is not None, "the job has no critic"
        metrics: dict[str, float] = self._critic.update(dict(batch.items()), critic.cliprange_value)
        return metrics

    @register(Dispatch.ONE_TO_ALL)
    def refresh_reference(self) -> None:
        """Make the policy of this moment the reference."""
        self._policy.refresh_reference()

    @register(Dispatch.MEGATRON_COMPUTE)
    def log_probs(self, batch: TensorDict, reference: bool) -> TensorDict:
        """log_probs [rows, tokens] of the policy, with its entropy, or of the reference."""
        temperature = self._spec.algorithm.temperature
        found = self._policy.log_probs(dict(batch.items()), temperature, reference, not reference)
        return TensorDict(found, batch_size=batch.batch_size)

    @register(Dispatch.MEGATRON_COMPUTE)
    def router_agreement(self, batch: TensorDict) -> float:
        """Share of the engines' choices of experts that the trainer's routers make too."""
        return self._policy.router_agreement(dict(batch.items()))

    @register(Dispatch.MEGATRON_COMPUTE)
    def update_actor(self, batch: TensorDict, kl_coef: float) -> dict[str, float]:
        """One optimizer step on a mini-batch; metrics of the whole mini-batch."""
        from grpo_worker.megatron.training.reductions import largest_memory

        algorithm = self._spec.algorithm
        loss = PolicyLossConfig(
            algorithm.clip_ratio_low,
            algorithm.clip_ratio_high,
            algorithm.clip_ratio_c,
            algorithm.use_kl_loss,
            algorithm.kl_loss_type,
            algorithm.policy_loss,
            algorithm.entropy_coef,
        )
        metrics = self._policy.update(dict(batch.items()), loss, kl_coef, algorithm.temperature)
        return metrics | largest_memory()

    @register(Dispatch.ONE_TO_ALL)
    def begin_step(self, step: int) -> None:
        self._trace.begin(step)

    @register(Dispatch.ONE_TO_ALL)
    def end_step(self, step: int) -> dict[str, float]:
        """Figures of the trace, when this rank has just written one."""
        return self._trace.end(step)

    @register(Dispatch.RANK_ZERO)
    def flops(self) -> ModelFlops:
        """What a token costs in this model."""
        return self._flops

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, step: int, controller_state: dict[str, Any]) -> None:
        """Start writing the checkpoint of ``step`` behind the training."""
        self._checkpointer.save(step, controller_state)

    @register(Dispatch.ONE_TO_ALL)
    def take_snapshot(self, name: str) -> None:
        """Copy this rank's state; a thread writes it into the pod's memory."""
        from grpo_worker.megatron.checkpoint import snapshot

        state, file = snapshot.take(self._parts), file_of(SNAPSHOTS, name, self.place.rank)
        file.parent.mkdir(parents=True, exist_ok=True)

        def write() -> None:
            torch.save(state, file)
            seal(file)

        threading.Thread(target=write).start()

    @register(Dispatch.ONE_TO_ALL)
    def snapshot_written(self, name: str) -> bool:
        """Is the snapshot in the pod's memory, whole?"""
        return file_of(SNAPSHOTS, name, self.place.rank).with_suffix(".json").is_file()

    @register(Dispatch.ONE_TO_ALL)
    def load_snapshot(self, name: str) -> None:
        """Go on from a snapshot, which the pod's agent has found sound."""
        from grpo_worker.megatron.checkpoint import snapshot

        snapshot.put(self._parts, torch.load(file_of(SNAPSHOTS, name, self.place.rank), weights_only=False))

    @register(Dispatch.ONE_TO_ALL)
    def poll_checkpoint(self, blocking: bool) -> list[int]:
        """Commit what is written on all ranks; steps that became complete."""
        return self._checkpointer.poll(blocking)

    @register(Dispatch.ONE_TO_ALL)
    def export_weights(self, path: str) -> None:
        """Write the policy as a Hugging Face directory."""
        from grpo_worker.megatron.export.exporter import export

        source = None if self._spec.model.path.startswith("preset:") else Path(self._spec.model.path)
        with self._policy.trainable.weights.here():
            export(
                Path(path),
                self._hf,
                self._policy.chunks,
                self._policy.family,
                source,
                self._spec.checkpoint.export_quantization,
            )

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Go on from a complete checkpoint, saved in whatever layout."""
        self._checkpointer.load(Path(path))
