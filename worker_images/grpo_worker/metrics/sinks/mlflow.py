"""Sink that writes an MLflow run."""

import json
import re
import time
from typing import Any

from grpo_operator.api.v1alpha1.observability import MlflowSpec
from grpo_worker.metrics.run_config import flattened
from grpo_worker.metrics.sinks.base import RunArtifacts, SampleTable

_PARAMS, _VALUE = 100, 6000  # parameters in one request, and characters of a value
_JOB = "grpo.job"  # tag that finds the run after a restart
_TABLES = "mlflow.loggedArtifacts"  # tag of MLflow's own, from which its pages know tables
_NAMED = 20  # tables that the tag names: the length of a tag is limited


class Mlflow:
    """One MLflow run for all attempts, found by a tag with the job's name."""

    def __init__(self, spec: MlflowSpec, job: str, config: dict[str, Any]) -> None:
        """A run keeps the configuration with which it began: MLflow does not change parameters."""
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(spec.tracking_uri)
        experiment = self._client.get_experiment_by_name(spec.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(spec.experiment)
        found = self._client.search_runs([number], f"tags.`{_JOB}` = '{job}'", max_results=1)
        run = found[0] if found else self._client.create_run(number, run_name=job, tags={_JOB: job})
        self._run = run.info.run_id
        self._tables: list[dict[str, str]] = json.loads(run.data.tags.get(_TABLES, "[]"))
        self._client.update_run(self._run, status="RUNNING")  # of a job that was resumed it is another one
        self._configure(config, set(run.data.params))

    def _configure(self, config: dict[str, Any], known: set[str]) -> None:
        """Log the parameters that the run lacks: a controller may have died before it logged all."""
        from mlflow.entities import Param

        params = [
            Param(_allowed(name), value[:_VALUE])
            for name, value in flattened(config).items()
            if _allowed(name) not in known
        ]
        for first in range(0, len(params), _PARAMS):
            self._client.log_batch(self._run, params=params[first : first + _PARAMS])

    def begin(self, after: int) -> None:
        """Continue the run; repeated steps are logged again."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of one step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entries = [Metric(_allowed(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=entries)

    def table(self, table: SampleTable) -> None:
        """Log a table as ``mlflow.log_table`` does, in a file of the step, which a replay replaces."""
        path = f"{table.name}/{table.step:08d}.json"
        content = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
        self._client.log_dict(self._run, content, path)
        others = [one for one in self._tables if one["path"] != path]
        self._tables = [*others, {"path": path, "type": "table"}][-_NAMED:]
        self._client.set_tag(self._run, _TABLES, json.dumps(self._tables))

    def artifacts(self, artifacts: RunArtifacts) -> None:
        """Log the page and the addresses of the checkpoints."""
        for file, text in artifacts.files().items():
            self._client.log_text(self._run, text, file)
        for name, address in artifacts.checkpoints.items():
            self._client.set_tag(self._run, f"grpo.{name}", address)

    def end(self, failed: bool) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def _allowed(name: str) -> str:
    """Return a name without characters that MLflow refuses, such as the @ of pass@8."""
    return re.sub(r"[^\w\-. :/]", "_", name)
