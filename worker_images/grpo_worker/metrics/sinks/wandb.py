"""Sink that writes a Weights & Biases run."""

import os
import re
from pathlib import Path
from typing import Any

from grpo_operator.api.v1alpha1.observability import WandbSpec
from grpo_worker.metrics.sinks.base import RunArtifacts, SampleTable
from grpo_worker.metrics.sinks.sent_tables import SentTables


class Wandb:
    """One Weights & Biases run for all attempts. WANDB_API_KEY comes from the pod's environment."""

    def __init__(
        self, spec: WandbSpec, job: str, disk: Path, config: dict[str, Any], sent: SentTables
    ) -> None:
        """``disk``: folder for local files, whose name is the run's id. ``config``: see ``run_config``."""
        import wandb

        # Files of tables and artifacts wait there for their upload, with offline until `wandb sync`.
        os.environ.setdefault("WANDB_DATA_DIR", str(disk / "wandb"))
        self._job, self._sent = job, sent
        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            name=job,
            id=disk.name,
            resume="allow",
            mode="offline" if spec.offline else "online",
            dir=str(disk),
            config=config,
            allow_val_change=True,  # a job that goes on may have other values, such as totalSteps
        )
        # W&B's own step cannot decrease, so repeated steps need an axis of their own.
        self._run.define_metric("training_step")
        self._run.define_metric("*", step_metric="training_step")

    def begin(self, after: int) -> None:
        """Continue the run; repeated steps are logged again."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of one step."""
        self._run.log({"training_step": step, **metrics})

    def table(self, table: SampleTable) -> None:
        """Log a table, unless the run has one of this step."""
        import wandb

        if self._sent.claim(table):
            # Columns of numbers have gaps, which W&B refuses in columns of one type.
            made = wandb.Table(
                columns=list(table.columns), data=[list(row) for row in table.rows], allow_mixed_types=True
            )
            self._run.log({"training_step": table.step, table.name: made})

    def artifacts(self, artifacts: RunArtifacts) -> None:
        """Log an artifact with the page; W&B makes another version of it only where it differs."""
        import wandb

        name = re.sub(r"[^\w.-]", "-", f"run-{self._job}")
        made = wandb.Artifact(name, type="run", metadata=dict(artifacts.checkpoints))
        for file, text in artifacts.files().items():
            with made.new_file(file, encoding="utf-8") as handle:
                handle.write(text)
        self._run.log_artifact(made)

    def end(self, failed: bool) -> None:
        """Finish the run."""
        self._run.finish(exit_code=int(failed))
