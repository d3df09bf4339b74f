"""Records of finished steps: their metrics, written beside the next step."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from grpo_operator.api.v1alpha1.observability import ObservabilitySpec
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.weight_sync.synchronizer import PushResult
from grpo_worker.metrics.generation import Generating, GenerationMetrics
from grpo_worker.metrics.sinks import sinks_of
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.metrics.writer import MetricsWriter
from grpo_worker.rollout.batch_file import RolloutBatch


class StepRecords:
    """Completes and writes the metrics of each step.

    Writing waits for the digests of the step's weights, which come while the next step generates.
    """

    def __init__(
        self,
        folder: JobFolder,
        observability: ObservabilitySpec,
        client: Generating,
        check: Callable[[], None],
    ) -> None:
        """``folder``: of the job. ``client``: generates the samples. ``check``: see StepLog."""
        sinks = sinks_of(observability, folder.disk.name, folder.disk)
        self._writer = MetricsWriter(folder, sinks, observability.thresholds, check)
        self._preliminary: int | None = None  # step whose record is to be replaced
        self._generation = GenerationMetrics(client)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record")

    def truncate(self, step: int) -> None:
        """Remove the records of steps after ``step``, which will be repeated."""
        self._preliminary = None
        self._writer.truncate(step)

    def generated(self, rollouts: RolloutBatch, seconds: float) -> dict[str, float]:
        """Return the metrics of a step's generation. ``seconds``: duration of the step."""
        return self._generation.step(seconds) | {
            "rollout/refused_prompts": float(len(rollouts.refused)),
            "rollout/cut_groups": float(rollouts.cut),
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

    def flush(self) -> None:
        """Wait until all records are on the store: only then may a checkpoint of their steps count."""
        self._writer.flush()

    def end(self) -> None:
        """Finish all sinks: the job is complete."""
        self._writer.end()

    def _write(
        self, step: int, metrics: dict[str, float], pushed: "Future[PushResult] | None", wall_time: float
    ) -> None:
        result = pushed.result() if pushed is not None else PushResult([], {})
        if step == self._preliminary:
            self._writer.truncate(step - 1)
        self._preliminary = step if pushed is None else None
        self._writer.write(step, metrics | result.metrics, weights=result.digests, wall_time=wall_time)
