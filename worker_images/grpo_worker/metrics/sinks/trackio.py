"""Sink that writes a trackio run."""

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from grpo_operator.api.v1alpha1.observability import TrackioSpec
from grpo_worker.metrics.run_config import flattened
from grpo_worker.metrics.sinks.base import RunArtifacts, SampleTable
from grpo_worker.metrics.sinks.sent_tables import SentTables


class Trackio:
    """One trackio run for all attempts. Tokens come from the pod's environment."""

    def __init__(
        self, spec: TrackioSpec, job: str, disk: Path, config: dict[str, Any], sent: SentTables
    ) -> None:
        """``disk``: folder for local files; trackio keeps there too what a server has not taken yet."""
        os.environ.setdefault("TRACKIO_DIR", str(disk / "trackio"))  # read once, by the import
        import trackio

        self._job, self._sent = job, sent
        self._run = trackio.init(
            project=spec.project,
            name=job,
            space_id=spec.space,
            server_url=spec.server_url,
            private=True,  # prompts and responses are in it
            config=flattened(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # the agents' metrics have those of all pods
            auto_log_cpu=False,
        )

    def begin(self, after: int) -> None:
        """Continue the run; repeated steps are logged again."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def table(self, table: SampleTable) -> None:
        """Log a table, unless the run has one of this step."""
        import trackio

        if self._sent.claim(table):
            made = trackio.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
            self._run.log({table.name: made}, step=table.step)

    def artifacts(self, artifacts: RunArtifacts) -> None:
        """Log an artifact with the page; another end of the run makes another version of it."""
        import trackio

        name = re.sub(r"[^A-Za-z0-9._-]", "-", f"run-{self._job}")
        made = trackio.Artifact(name, type="run", metadata=dict(artifacts.checkpoints))
        with tempfile.TemporaryDirectory() as folder:
            for file, text in artifacts.files().items():
                (Path(folder) / file).write_text(text, encoding="utf-8")
                made.add_file(Path(folder) / file, file)
            self._run.log_artifact(made)

    def end(self, failed: bool) -> None:
        """Finish the run; trackio knows no failed ones."""
        self._run.finish()
