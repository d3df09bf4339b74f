"""Makes the parts of the training loop and connects them."""

from functools import partial

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.common.clock import SYSTEM_CLOCK, Clock
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.generation.sample_ledger import SampleLedger
from grpo_worker.controller.generation.scheduler import scheduler_of
from grpo_worker.controller.generation.step_sampler import StepSampler
from grpo_worker.controller.inputs import Inputs
from grpo_worker.controller.loop import GrpoLoop
from grpo_worker.controller.loop_state import LoopState
from grpo_worker.controller.profiles.step_traces import StepTraces
from grpo_worker.controller.recovery.checkpoints import RunCheckpoints
from grpo_worker.controller.recovery.controller_state import ControllerState
from grpo_worker.controller.recovery.departure import Departure
from grpo_worker.controller.recovery.failures import FailureHandler
from grpo_worker.controller.recovery.parking import Parking
from grpo_worker.controller.recovery.routed_experts import RoutedExpertsLoader
from grpo_worker.controller.recovery.step_saver import StepSaver
from grpo_worker.controller.recovery.suspension import Suspension
from grpo_worker.controller.status.gpu_time import GpuTime
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.status.recovery_times import RecoveryTimes
from grpo_worker.controller.step_records import StepRecords
from grpo_worker.controller.steps.engine_work import EngineWork
from grpo_worker.controller.steps.live_spec import LiveSpec
from grpo_worker.controller.steps.status_report import StatusReport
from grpo_worker.controller.steps.step_files import StepFiles
from grpo_worker.controller.steps.step_outcome import StepOutcome
from grpo_worker.controller.steps.step_runner import StepRunner
from grpo_worker.controller.training.batch_trainer import BatchTrainer
from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.validation.divergence import DivergenceWatch
from grpo_worker.controller.validation.validator import validator_of
from grpo_worker.controller.weight_sync.synchronizer import WeightSynchronizer
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.engine_pool import RolloutPool
from grpo_worker.run_page.snapshot import Run
from grpo_worker.samples.writer import SampleWriter


def loop_of(
    spec: GRPOJobSpec, folder: JobFolder, board: ProgressBoard, trainers: TrainerGang,
    pool: RolloutPool, client: RolloutClient, inputs: Inputs, weights: WeightSynchronizer,
    failures: FailureHandler, clock: Clock = SYSTEM_CLOCK, *, rollout_gpus: int = 1,
) -> GrpoLoop:  # fmt: skip
    """Return the loop of a job. ``folder``: of the job. ``rollout_gpus``: of all engines.

    ``inputs``: the model's files, the prompts and the reward.
    """
    failures.departure.watch(trainers)
    state = LoopState(spec)
    source, reward = inputs.source, inputs.reward
    engine_gpus = 0 if spec.shares_gpus else rollout_gpus
    recovery = RecoveryTimes(folder.disk / "recoveries.jsonl", clock)
    gpus = _gpu_time(spec, folder, engine_gpus, clock, failures.record.resumed, recovery)
    parking = Parking(trainers, board, failures, clock, gpus, state.background.futures)
    generate = None if spec.shares_gpus else client.generate  # not while trainers use the engines' GPUs
    experts = RoutedExpertsLoader(trainers, generate, weights, reward, parking)
    sampler = StepSampler(spec, source, client, reward, gpus.generates)
    scheduler = scheduler_of(spec, sampler, folder.store / "pending", experts.durable)
    training = _batch_trainer(spec, trainers, pool, failures.departure)
    traces = StepTraces(spec, folder.disk / "profile", board.profiles, trainers)
    files = _step_files(spec, folder, client, inputs, failures, gpus, clock, engine_gpus)
    controller_state = ControllerState(state, training.kl, source)
    checkpoints = RunCheckpoints(
        spec, folder, trainers, scheduler, board, controller_state.collect, files.flush, parking,
        failures.record.check_claims, inputs.fork,
    )  # fmt: skip
    report = StatusReport(state, board, failures, weights, files.validator, gpus, recovery)
    saver = StepSaver(state, checkpoints, weights, clock)
    engines = EngineWork(
        state, source, scheduler, weights, files.validator, parking, failures.departure, checkpoints, saver,
        gpus, clock,
    )  # fmt: skip
    outcome = StepOutcome(
        state, source, reward, trainers, training, checkpoints, failures, gpus, files,
        DivergenceWatch(spec.divergence), report,
    )  # fmt: skip
    return GrpoLoop(
        state=state, board=board, trainers=trainers, pool=pool, weights=weights, failures=failures, gpus=gpus,
        recovery=recovery, parking=parking, scheduler=scheduler, training=training, traces=traces,
        controller_state=controller_state, files=files, validator=files.validator, checkpoints=checkpoints,
        report=report, saver=saver,
        suspension=Suspension(state, board, saver, parking, gpus, clock, report.update),
        live_spec=LiveSpec(state, failures.live, board, trainers, client, traces, files.validator),
        engines=engines, outcome=outcome,
        steps=StepRunner(
            state, source, engines, experts, training, traces, checkpoints, saver, failures, gpus, recovery,
            outcome, report, clock,
        ),
        page=Run(folder.disk.name, folder, spec.total_steps, inputs.model.tokenizer.decode_all),
        clock=clock,
    )  # fmt: skip


def _gpu_time(
    spec: GRPOJobSpec, folder: JobFolder, engine_gpus: int, clock: Clock, resumed: bool,
    recovery: RecoveryTimes,
) -> GpuTime:  # fmt: skip
    """Return the account of the job's GPUs. The time since the last controller is part of a recovery."""
    spares = spec.trainer.spare_nodes * spec.trainer.gpus_per_node
    gpus = GpuTime(
        folder.store / "gpu_time.json", spec.trainer.world, engine_gpus, clock, spares=spares,
        resumed=resumed, suspends=recovery.discard,
    )  # fmt: skip
    if gpus.absent is not None:
        recovery.begins("controller", clock.now() - gpus.absent)
    return gpus


def _batch_trainer(
    spec: GRPOJobSpec, trainers: TrainerGang, pool: RolloutPool, departure: Departure
) -> BatchTrainer:
    # The samples of a later step, if they are generated already, are not waited for.
    ahead = spec.staleness.max_version_lag > 0
    check = (lambda: None) if ahead else departure.check
    return BatchTrainer(spec, trainers, pool.table.suspect, check)


def _step_files(
    spec: GRPOJobSpec, folder: JobFolder, client: RolloutClient, inputs: Inputs, failures: FailureHandler,
    gpus: GpuTime, clock: Clock, engine_gpus: int,
) -> StepFiles:  # fmt: skip
    check, decode = failures.record.check_claims, inputs.model.tokenizer.decode_all
    ledger = SampleLedger(folder, check)
    records = StepRecords(folder, spec, client, check, decode, engine_gpus)
    samples = SampleWriter(folder, spec.observability.samples, decode, check, clock)
    validator = validator_of(
        spec, folder, inputs.validation, client, inputs.model, partial(gpus.generates, purpose="validation"),
        records.validated, check,
    )  # fmt: skip
    return StepFiles(ledger, records, samples, validator)
