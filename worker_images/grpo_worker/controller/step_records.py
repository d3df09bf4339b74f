"""Records of finished steps: their metrics, written beside the next step."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.common.errors import one_line
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.tracked_samples import Tracked, chosen_of_step, sample_table
from grpo_worker.controller.weight_sync.synchronizer import PushResult
from grpo_worker.metrics.generation import Generating, GenerationMetrics
from grpo_worker.metrics.reward_parts import PartMeans
from grpo_worker.metrics.run_config import run_config
from grpo_worker.metrics.sinks.base import RunArtifacts, SampleTable
from grpo_worker.metrics.sinks.configured import sinks_of
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.metrics.writer import MetricsWriter
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.samples.table import Decode

log = logging.getLogger(__name__)
_LAST_SECONDS = 10.0  # for the last step's record and tables
# Phases that the log names, by verl's names of their times.
_PHASES = {
    "generate": "gen",
    "update": "update_actor",
    "weights": "update_weights",
    "save": "save_checkpoint",
}


def step_line(step: int, metrics: Mapping[str, float]) -> str:
    """Return the line of a finished step in the log."""
    times = {name: metrics.get(f"timing_s/{key}", 0.0) for name, key in _PHASES.items()}
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in times.items() if seconds >= 0.05)
    return (
        f"step {step}: reward {metrics['critic/score/mean']:.3f} with weights {_versions(metrics)}, "
        f"{metrics['timing_s/step']:.1f} s{f' ({phases})' if phases else ''}, "
        f"{metrics['perf/throughput']:.0f} tokens/s and GPU"
    )


def _versions(metrics: Mapping[str, float]) -> str:
    """Return the versions of the weights that generated a step's samples."""
    oldest, newest = (f"v{metrics[f'rollout/{which}_version']:.0f}" for which in ("oldest", "newest"))
    return oldest if oldest == newest else f"{oldest} to {newest}"


class StepRecords:
    """Completes and writes the metrics of each step.

    Writing waits for the digests of the step's weights, which come while the next step generates.
    """

    def __init__(
        self, folder: JobFolder, spec: GRPOJobSpec, client: Generating, check: Callable[[], None],
        decode: Decode, rollout_gpus: int,
    ) -> None:  # fmt: skip
        """``folder``: of the job. ``client``: generates the samples. ``check``: see StepLog.

        ``decode``: returns the texts of lists of token ids. ``rollout_gpus``: see ``run_config``.
        """
        self._trackers, self._decode = spec.observability.trackers, decode
        config = run_config(spec, rollout_gpus)
        sinks = sinks_of(spec.observability, folder.disk.name, folder, config)
        self._writer = MetricsWriter(folder, sinks, spec.observability.thresholds, check)
        self._preliminary: int | None = None  # step whose record is to be replaced
        self._table: SampleTable | None = None  # the last one of a step
        self._generation = GenerationMetrics(client)
        self._parts = PartMeans()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record")

    def truncate(self, step: int) -> None:
        """Remove the records of steps after ``step``, which will be repeated."""
        self._preliminary = None
        self._writer.truncate(step)

    def generated(self, rollouts: RolloutBatch, seconds: float) -> dict[str, float]:
        """Return the metrics of a step's generation and reward. ``seconds``: duration of the step."""
        oldest, newest = rollouts.versions
        return self._generation.step(seconds) | {
            "rollout/oldest_version": float(oldest),
            "rollout/newest_version": float(newest),
            "rollout/refused_prompts": float(len(rollouts.refused)),
            "rollout/cut_groups": float(rollouts.cut),
            **self._parts.of(rollouts.scores),
        }

    def write(
        self,
        step: int,
        metrics: dict[str, float],
        timer: StepTimer,
        pushed: "Future[PushResult] | None" = None,
    ) -> "Future[None]":
        """Start to write a step's record, to which the seconds of its phases are added.

        Without ``pushed`` the record is preliminary, and the next one of the step replaces it.
        """
        times = timer.seconds | {"timing_s/controller_cpu": timer.cpu()}
        return self._thread.submit(self._write, step, metrics | times, pushed, time.time())

    def show_samples(
        self, step: int, rollouts: RolloutBatch, scores: Sequence[float], batch: RaggedBatch
    ) -> None:
        """Show some samples of a step, if its turn has come. Arguments: see StepSamples."""
        most = self._trackers.sample_rows
        if most and rollouts.samples and step % self._trackers.every_steps == 0:
            chosen = chosen_of_step(rollouts, scores, batch, most)  # the rest is not held
            self._thread.submit(self._show_table, "samples", step, chosen)

    def validated(self, step: int, metrics: dict[str, float], samples: Sequence[Tracked] = ()) -> None:
        """Show the metrics of a validation and some of its samples, after the record of its step."""
        self._thread.submit(self._writer.show, step, metrics)
        if samples:
            self._thread.submit(self._show_table, "validation_samples", step, samples)

    def flush(self) -> None:
        """Wait until all records are on the store: only then may a checkpoint of their steps count."""
        self._writer.flush()

    def settle(self) -> None:
        """Wait until all records that could be written can be read."""
        self._writer.settle()

    def end(self, artifacts: Callable[[], RunArtifacts], failed: bool = False) -> None:
        """Finish all sinks: the job is complete, or has failed. ``artifacts``: returns what is left of it."""
        wait([self._thread.submit(lambda: None)], _LAST_SECONDS)  # ranks that hang owe the record of a step
        self._writer.end(artifacts() if self._trackers.artifacts else None, failed)

    def _show_table(self, name: str, step: int, samples: Sequence[Tracked]) -> None:
        try:
            table = sample_table(name, step, samples, self._decode)
            self._writer.show_table(table)
            self._table = table if name == "samples" else self._table
        except Exception as error:  # noqa: BLE001 - samples are there to look at
            log.warning("the table %s of step %d is not shown: %s", name, step, one_line(error))

    def _write(
        self, step: int, metrics: dict[str, float], pushed: "Future[PushResult] | None", wall_time: float
    ) -> None:
        result = pushed.result() if pushed is not None else PushResult([], {})
        replaced = step == self._preliminary
        if replaced:
            self._writer.truncate(step - 1)
        self._preliminary = step if pushed is None else None
        self._writer.write(step, metrics | result.metrics, weights=result.digests, wall_time=wall_time)
        if replaced and self._table is not None and self._table.step == step:
            self._writer.show_table(self._table)  # some sinks have hidden it with the preliminary record
        if pushed is not None:
            log.info("%s", step_line(step, metrics), extra={"step": step})
