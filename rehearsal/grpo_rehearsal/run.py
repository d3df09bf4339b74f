"""One rehearsal: wires the real controller to the stand-ins, and runs it on virtual time."""

import json
import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo_operator.api.job_config import JobConfig
from grpo_operator.api.v1alpha1.data import GYM
from grpo_rehearsal.cluster import Cluster
from grpo_rehearsal.durations import Durations
from grpo_rehearsal.job import RehearsedJob
from grpo_rehearsal.model_directory import write_model
from grpo_rehearsal.network import AsyncTransport, Network, reachable
from grpo_rehearsal.recorder import RecordingBoard
from grpo_rehearsal.scenario import Scenario
from grpo_rehearsal.standins.answer_workers import InlineWorkers
from grpo_rehearsal.timed_client import TimedClient
from grpo_rehearsal.timed_pool import TimedPool
from grpo_rehearsal.virtual.scheduler import Scheduler
from grpo_rehearsal.virtual.threads import virtual_time
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.config import pool_timeout
from grpo_worker.controller.inputs import read_inputs
from grpo_worker.controller.loop import GrpoLoop
from grpo_worker.controller.loop_wiring import loop_of
from grpo_worker.controller.main import choose_synchronizer, run
from grpo_worker.controller.recovery.failures import FailureHandler
from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.training.worker_group import WorkerGroup
from grpo_worker.megatron.families.registry import expert_layers
from grpo_worker.roles.trainer import TrainerWorker
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.engine_pool import RolloutPool
from grpo_worker.rollout.sampling import sampling_params

_PROMPTS = f"{GYM}gcd"  # instead of files

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of the controller itself. ``cpu``: seconds by thread, without the stand-ins' work."""

    cpu: dict[str, float]
    stand_ins: float
    rss: int
    real_seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished rehearsal. ``metrics``: of each step, as the job recorded them. ``ledger``: its lines."""

    job: RehearsedJob
    scenario: Scenario
    cluster: Cluster
    board: RecordingBoard
    metrics: list[dict[str, Any]]
    ledger: list[dict[str, Any]]
    seconds: float
    cost: Cost


def rehearse(job: RehearsedJob, scenario: Scenario, folder: Path) -> Outcome:
    """Run the first steps of a job. ``folder``: empty, for the model's files and the job's store.

    Raises ValueError when the job cannot be rehearsed, or lacks what the scenario names.
    """
    scenario.check(job.pool.replicas, job.plan.layout.world, job.spec.trainer.nodes)
    hf = write_model(job.spec, folder / "model")
    config = _here(job.config, scenario, folder)
    durations = Durations(job.spec, job.pool, job.plan, scenario.assumed)
    began = time.perf_counter()
    with virtual_time(Scheduler(), "controller") as scheduler:
        network = Network(scheduler)
        cluster = Cluster(job, scenario, scheduler, network, durations, hf, config.store / "checkpoints")
        board = RecordingBoard(scheduler, cluster.begin_faults)
        with reachable(network):
            _control(config, board, cluster)
        cost = Cost(
            scheduler.cpu_by_thread(), scheduler.stand_in_cpu(), _peak_rss(), time.perf_counter() - began
        )
        seconds = scheduler.now
    metrics, ledger = _lines(config.store / "metrics.jsonl"), _lines(config.store / "ledger.jsonl")
    return Outcome(job, scenario, cluster, board, metrics, ledger, seconds, cost)


def _control(config: JobConfig, board: RecordingBoard, cluster: Cluster) -> None:
    """Do what ``grpo_worker.controller.main`` does, with stand-ins for the processes of the ranks."""
    spec = config.spec
    pool = TimedPool(config, cluster.scheduler, cluster.waits)
    client = TimedClient(
        pool.table,
        cluster.scheduler,
        cluster.waits,
        seed=spec.seed,
        n=spec.algorithm.samples_per_prompt,
        timeout=pool_timeout(spec.weight_sync),
        partial=spec.staleness.partial_rollouts,
        hang_seconds=spec.restart_policy.hang_limit,
        transport=AsyncTransport(cluster.network),
    )
    run(config, board, lambda failures: _loop(config, board, pool, client, failures, cluster))


def _loop(
    config: JobConfig, board: RecordingBoard, pool: RolloutPool, client: RolloutClient,
    failures: FailureHandler, cluster: Cluster,
) -> GrpoLoop:  # fmt: skip
    spec = config.spec
    inputs = read_inputs(config, board, InlineWorkers)
    model = inputs.model
    cluster.build(model.tokens.end[0])
    client.set_sampling(
        sampling_params(spec.algorithm, spec.data.response_length, model.tokens.end),
        expert_layers(model.config) if spec.algorithm.routing_replay else None,
    )
    trainers = TrainerGang(
        spec, model.config, config.store / "checkpoints", _Pools(), partial(_group, spec, cluster)
    )
    weights = choose_synchronizer(config, trainers, pool)
    gpus = config.engines * config.engine_gpus
    return loop_of(
        spec, JobFolder(config.store, config.store), board, trainers, pool, client, inputs, weights, failures,
        rollout_gpus=gpus,
    )  # fmt: skip


def _group(spec: Any, cluster: Cluster, pool: Any) -> WorkerGroup:
    return WorkerGroup(TrainerWorker, cluster.processes(pool), spec.restart_policy.hang_limit)


class _Pools:
    """Places for the ranks: the pods of the training pool are there."""

    def acquire(
        self, resource: str, ranks: int, gpus: int = 0, report: Callable[[str], None] = log.info
    ) -> str:
        """Return at once."""
        return resource

    def avoid(self, address: str) -> None:
        """Do nothing: no pod of a rehearsal is drained."""

    def avoid_failing(self, addresses: frozenset[str]) -> None:
        """Do nothing: there are no spare nodes."""

    def keep_warm(self, resource: str) -> None:
        """Do nothing: spare nodes start nothing."""

    def release(self, resource: str) -> None:
        """Do nothing."""


def _here(config: JobConfig, scenario: Scenario, folder: Path) -> JobConfig:
    """Return the controller's file with paths on this machine and the scenario's number of steps.

    Prompts from files, and what judges their responses, are replaced: the files are not here.
    """
    spec = config.spec
    model = spec.model.model_copy(update={"path": str(folder / "model")})
    # Validation runs beside the steps, in a thread that virtual time does not know; the metrics mean nothing.
    less = {"validation": None, "divergence": None}
    spec = spec.model_copy(update={"model": model, "total_steps": scenario.steps} | less)
    if not spec.data.train.startswith(GYM):
        data = spec.data.model_copy(update={"train": _PROMPTS, "volume": None})
        spec = spec.model_copy(update={"data": data, "reward": None})
    return config.model_copy(update={"spec": spec, "store": folder / "store"})


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def _peak_rss() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
