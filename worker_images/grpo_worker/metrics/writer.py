"""Writer of each step's metrics to JSON lines (the record), Prometheus and the job's sinks (views)."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import Gauge

from grpo_operator.api.v1alpha1.observability import ThresholdSpec
from grpo_worker.common.step_log import StepLog
from grpo_worker.common.store_path import JobFolder
from grpo_worker.metrics.sink_thread import SinkThread, What
from grpo_worker.metrics.sinks.base import Opening, RunArtifacts, SampleTable, Sink

_END_SECONDS = 60.0  # for all sinks together
_GAUGE = Gauge("grpo_metric", "Value of a training metric at the last step", ["name"])
_MINIMUM = Gauge("grpo_metric_minimum", "Lowest value that the job calls normal", ["name"])
_MAXIMUM = Gauge("grpo_metric_maximum", "Highest value that the job calls normal", ["name"])
_STEP = Gauge("grpo_step", "Completed training steps")


class MetricsWriter:
    """Writer of each step's metrics. Sinks are called in threads of their own."""

    def __init__(
        self,
        folder: JobFolder,
        sinks: Sequence[Opening],
        thresholds: Sequence[ThresholdSpec],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """``folder``: of the job. ``check``: see StepLog."""
        self.file = folder.disk / "metrics.jsonl"
        self._log = StepLog(self.file, check, folder.pieces)
        self._sinks = [SinkThread(sink) for sink in sinks]
        for bound in thresholds:
            if bound.minimum is not None:
                _MINIMUM.labels(bound.metric).set(bound.minimum)
            if bound.maximum is not None:
                _MAXIMUM.labels(bound.metric).set(bound.maximum)

    def truncate(self, step: int) -> None:
        """Remove the records of steps after ``step``, which will be repeated, and restart the sinks."""
        self._log.truncate(step)
        self._each(lambda sink: sink.begin(step))

    def write(self, step: int, metrics: dict[str, float], **extra: Any) -> None:
        """Record one step; ``extra`` goes to the JSON lines only."""
        self._log.append(step, [metrics | extra])
        _STEP.set(step)
        for name, value in metrics.items():
            _GAUGE.labels(name).set(value)
        self._each(lambda sink: sink.write(step, metrics))

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Show metrics of a step that its record does not have: they have a record of their own."""
        for name, value in metrics.items():
            _GAUGE.labels(name).set(value)
        self._each(lambda sink: sink.write(step, metrics))

    def flush(self) -> None:
        """Wait until all records are on the store: only then may a checkpoint of their steps count."""
        self._log.flush()

    def settle(self) -> None:
        """Wait until all records that could be written can be read."""
        self._log.settle()

    def show_table(self, table: SampleTable) -> None:
        """Show samples."""
        self._each(lambda sink: sink.table(table), "tables")

    def end(self, artifacts: RunArtifacts | None = None, failed: bool = False) -> None:
        """Finish all sinks: the job has ended. Slow sinks are waited for, but for a minute at most."""
        if artifacts is not None:
            self._each(lambda sink: sink.artifacts(artifacts), "artifacts")
        self._each(lambda sink: sink.end(failed))
        for sink in self._sinks:
            sink.finish()
        deadline = time.monotonic() + _END_SECONDS
        for sink in self._sinks:
            sink.join(deadline)

    def _each(self, call: Callable[[Sink], None], what: What = "metrics") -> None:
        for sink in self._sinks:
            sink.call(call, what)
