"""Entry point of the controller pod: ``grpo-controller``."""

import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from grpo_operator.api.job_config import JobConfig
from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.common.clock import SYSTEM_CLOCK, Clock, utc_time
from grpo_worker.common.errors import one_line
from grpo_worker.common.log_files import keep_controller_lines, log_folder
from grpo_worker.common.log_lines import log_as
from grpo_worker.common.store_path import JobFolder
from grpo_worker.common.store_problems import with_store_problem
from grpo_worker.controller.config import JOB_FILE, load_job_config, pool_timeout
from grpo_worker.controller.inputs import read_inputs
from grpo_worker.controller.live_fields import LiveFields
from grpo_worker.controller.recovery.departure import Departure
from grpo_worker.controller.recovery.failures import CONTROLLER_DIED, FailureHandler, comes_from_outside
from grpo_worker.controller.recovery.object_store import await_store
from grpo_worker.controller.recovery.run_record import Cause, RunRecord
from grpo_worker.controller.status.page_file import write_page
from grpo_worker.controller.status.page_routes import PageRoutes
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.status.server import application, serve_in_background
from grpo_worker.megatron.families.registry import expert_layers
from grpo_worker.metrics.generation import export
from grpo_worker.rewards.verifiers import RewardError
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.engine_pool import RolloutPool
from grpo_worker.rollout.engine_profiles import EngineProfiles
from grpo_worker.rollout.sampling import sampling_params
from grpo_worker.run_page.snapshot import Run

if TYPE_CHECKING:
    from grpo_worker.controller.loop import GrpoLoop
    from grpo_worker.controller.training.gang import TrainerGang
    from grpo_worker.controller.weight_sync.synchronizer import WeightSynchronizer

log = logging.getLogger(__name__)


def main() -> None:
    """Run the job of ``/etc/grpo/job.json``, then answer status requests until stopped."""
    log_as("controller")
    departure = Departure()
    departure.listen()
    config = load_job_config()
    spec = config.spec
    keep_controller_lines(log_folder(spec.checkpoint.store, config.store))
    board = ProgressBoard(config.writer, config.resumes)
    engines = config.min_available, config.engines
    pool = RolloutPool(config.rollout_service, *engines, config.writer, config.fp8)
    client = RolloutClient(
        pool.table,
        seed=spec.seed,
        n=spec.algorithm.samples_per_prompt,
        timeout=pool_timeout(spec.weight_sync),  # how long no engine may serve the version
        partial=spec.staleness.partial_rollouts,
        hang_seconds=spec.restart_policy.hang_limit,
        max_running=config.max_running_requests,
    )
    export(client)
    live = LiveFields.of(spec, JOB_FILE)

    def stalled() -> str:
        return client.stalled(live.current(spec).stall_seconds)

    pages = PageRoutes(board, JobFolder.of(spec.checkpoint.store, config.store)).routes()
    serve_in_background(application(board, pool.table.entries, stalled, pages))
    try:
        run(config, board, partial(build_loop, config, board, pool, client), departure=departure, live=live)
        log.info("job ended: %s", board.get().phase)
        if not departure.own:
            signal.pause()
    except SystemExit:
        log.info("SIGTERM: there is nothing to save")
    logging.shutdown()  # brings the last lines to the store, if it takes them
    os._exit(0)  # threads may still wait for engines or the store


def run(
    config: JobConfig,
    board: ProgressBoard,
    build: "Callable[[FailureHandler], GrpoLoop]",
    clock: Clock = SYSTEM_CLOCK,
    departure: Departure | None = None,
    live: LiveFields | None = None,
) -> None:
    """Build the loop and run it. ``live``: default: no field of the job changes while it runs.

    Wrong files and fields end the job without a retry. Other failures, and the death of the controller before
    this one, are counted and retried.
    """
    config.store.mkdir(parents=True, exist_ok=True)
    store = JobFolder.of(config.spec.checkpoint.store, config.store).store
    try:
        await_store(store, config.spec.checkpoint.store, lambda why: board.update(message=why), clock)
    except ValueError as error:  # it may be told to no store
        board.update(phase=Phase.FAILED, message=str(error))
        return
    record = RunRecord.load(store / "run.json")
    nodes = config.spec.trainer.nodes
    failures = FailureHandler(record, live or LiveFields.of(config.spec), departure, nodes)
    failures.resume(config.resumes)

    def back_off(message: str, seconds: float) -> None:
        later = utc_time(seconds) if seconds else ""
        board.update(message=message, last_failure=message, next_attempt=later, **failures.counts())
        clock.sleep(0 if record.failed else seconds)

    died = None if record.failed else failures.begin_controller()
    try:
        if died is not None:
            back_off(CONTROLLER_DIED, died)
        _run_loop(config, board, failures, build, back_off)
    except SystemExit:  # nothing was at stake: the next controller must not count a death
        failures.finished()
        raise


def _run_loop(
    config: JobConfig, board: ProgressBoard, failures: FailureHandler,
    build: "Callable[[FailureHandler], GrpoLoop]", back_off: Callable[[str, float], None],
) -> None:  # fmt: skip
    record = failures.record
    while not record.failed:
        try:
            loop = build(failures)
        except Exception as error:  # failures are counted and retried, like a failure of the run
            if isinstance(error, ValueError | RewardError) and not comes_from_outside(error):
                failures.end(str(error))
                break
            log.exception("the job cannot begin")
            # An unreachable store or server is not the fault of the job.
            cause: Cause = "infrastructure" if comes_from_outside(error) else "job"
            message = with_store_problem(one_line(error), error, config.spec.checkpoint.store.label)
            back_off(message, failures.count(message, cause))
        else:
            loop.run()
            return
    write_page(Run.of(config), record.check_claims)
    board.update(phase=Phase.FAILED, message=record.failed, **failures.counts())


def build_loop(
    config: JobConfig,
    board: ProgressBoard,
    pool: RolloutPool,
    client: RolloutClient,
    failures: FailureHandler,
) -> "GrpoLoop":
    """Read the job's inputs, join the Ray cluster, and wire the loop.

    Raises ValueError or RewardError that names the problem of the job's files.
    """
    spec = config.spec
    folder = JobFolder.of(spec.checkpoint.store, config.store)
    inputs = read_inputs(config, board)
    model = inputs.model
    client.set_sampling(
        sampling_params(spec.algorithm, spec.data.response_length, model.tokens.end),
        expert_layers(model.config) if spec.algorithm.routing_replay else None,
    )
    # Imported after the files were read: importing torch and Ray takes many seconds on a busy node.
    from grpo_worker.controller.loop_wiring import loop_of
    from grpo_worker.controller.profiles.background import BackgroundProfiles
    from grpo_worker.controller.training.gang import TrainerGang

    board.update(message="joining the Ray cluster")
    _connect(config.name, SYSTEM_CLOCK)
    failures.departure.listen()
    trainers = TrainerGang(spec, model.config, folder.store / "checkpoints", disk=folder.disk)
    weights = choose_synchronizer(config, trainers, pool)
    engines = EngineProfiles(pool.table, config.writer, lambda: pool.attempt)
    BackgroundProfiles(config.store / "profile", board.profiles, trainers, engines).start()
    gpus = config.engines * config.engine_gpus
    return loop_of(spec, folder, board, trainers, pool, client, inputs, weights, failures, rollout_gpus=gpus)


def choose_synchronizer(
    config: JobConfig, trainers: "TrainerGang", pool: RolloutPool
) -> "WeightSynchronizer":
    """Return the implementation for GPUs that trainers and engines share, or for GPUs of their own."""
    from grpo_worker.controller.weight_sync.colocated import ColocatedSynchronizer
    from grpo_worker.controller.weight_sync.dedicated import DedicatedSynchronizer

    kind = ColocatedSynchronizer if config.spec.shares_gpus else DedicatedSynchronizer
    hang_seconds = float(config.spec.restart_policy.hang_limit)
    return kind(trainers, pool, config.weight_path, config.spec.weight_sync, hang_seconds)


def _connect(namespace: str, clock: Clock) -> None:
    """Join the Ray cluster, as soon as the raylet of this pod has joined it."""
    import ray

    while not ray.is_initialized():
        try:
            ray.init(address="auto", namespace=namespace, log_to_driver=True)
        except ConnectionError as error:
            log.info("Ray is not ready yet: %s", error)
            clock.sleep(1)


if __name__ == "__main__":
    main()
