"""Sink that writes TensorBoard's event files."""

import json
from pathlib import Path
from typing import Any

from grpo_worker.metrics.run_config import flattened
from grpo_worker.metrics.sinks.base import RunArtifacts, SampleTable

_TEXTS = ("prompt", "response")


class TensorBoard:
    """Sink that writes event files to ``folder``. Texts are in Markdown, which TensorBoard renders."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._folder, self._config = folder, config
        self._writer: Any = None
        self._step = 0  # the last one

    def begin(self, after: int) -> None:
        """Start a new event file that hides the steps after ``after``. The first has the configuration."""
        from torch.utils.tensorboard import SummaryWriter

        self._close()
        self._step = after
        first = not any(self._folder.glob("events.*"))
        self._writer = SummaryWriter(str(self._folder), purge_step=after + 1)
        if first:
            lines = [f"{name}: {value}" for name, value in flattened(self._config).items()]
            self._writer.add_text("config", _quoted("\n".join(lines)), 0)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics as scalars."""
        self._step = max(self._step, step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, table: SampleTable) -> None:
        """Write the rows as one text of the step."""
        rows = [_row(dict(zip(table.columns, row, strict=True))) for row in table.rows]
        self._writer.add_text(table.name, "\n\n---\n\n".join(rows), table.step)
        self._writer.flush()

    def artifacts(self, artifacts: RunArtifacts) -> None:
        """Write the addresses of the checkpoints. TensorBoard has no place for a page."""
        if artifacts.checkpoints:
            self._writer.add_text(
                "checkpoints", _quoted(json.dumps(artifacts.checkpoints, indent=2)), self._step
            )

    def end(self, failed: bool) -> None:
        """Close the event file."""
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _row(row: dict[str, Any]) -> str:
    """Return a row in Markdown: its figures in one line, and its texts quoted."""
    figures = [f"{name} {value}" for name, value in row.items() if name not in _TEXTS and value is not None]
    texts = [f"{name}:\n\n{_quoted(row[name])}" for name in _TEXTS if name in row]
    return "\n\n".join([", ".join(figures), *texts])


def _quoted(text: str) -> str:
    """Return a text as a block of code: indented, so that nothing in it ends the block."""
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
