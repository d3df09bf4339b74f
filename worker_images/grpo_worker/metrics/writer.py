"""Metrics of each step: JSON lines (the record), TensorBoard and Prometheus (the views)."""

import json
from pathlib import Path
from typing import Any

from prometheus_client import Gauge

from grpo_worker.controller.ledger import truncate_lines

_GAUGE = Gauge("grpo_metric", "Value of a training metric at the last step", ["name"])
_STEP = Gauge("grpo_step", "Completed training steps")


class MetricsWriter:
    """Writes each step once; ``truncate`` forgets replayed steps in the record."""

    def __init__(self, directory: Path, tensorboard: bool) -> None:
        self.file = directory / "metrics.jsonl"
        self.file.touch()
        self._logdir = directory / "tensorboard" if tensorboard else None
        self._board: Any = None

    def truncate(self, step: int) -> None:
        """Drop the records after ``step`` and let TensorBoard overwrite its points."""
        truncate_lines(self.file, step)
        if self._logdir is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._logdir), purge_step=step + 1)

    def write(self, step: int, metrics: dict[str, float], **extra: Any) -> None:
        """Record one step; ``extra`` goes to the JSON lines only."""
        with self.file.open("a") as handle:
            handle.write(json.dumps({"step": step} | metrics | extra) + "\n")
        _STEP.set(step)
        for name, value in metrics.items():
            _GAUGE.labels(name).set(value)
            if self._board is not None:
                self._board.add_scalar(name, value, step)
        if self._board is not None:
            self._board.flush()
