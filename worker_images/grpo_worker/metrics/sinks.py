"""Sinks of metrics beside the job's own record: TensorBoard, W&B, MLflow."""

import time
from pathlib import Path
from typing import Any, Protocol

from grpo_operator.api.v1alpha1.observability import MlflowSpec, ObservabilitySpec, WandbSpec
from grpo_worker.metrics.run_config import flattened

_MLFLOW_PARAMS, _MLFLOW_VALUE = 100, 6000  # parameters in one request, and characters of a value


class Sink(Protocol):
    """Receiver of each step's metrics. Steps repeated after a restart replace the earlier ones."""

    def begin(self, after: int) -> None:
        """Start an attempt that continues after step ``after``."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of one step."""

    def end(self) -> None:
        """Finish: the job is complete."""


def sinks_of(spec: ObservabilitySpec, job: str, store: Path, config: dict[str, Any]) -> list[Sink]:
    """Return the sinks that the job configures.

    ``job``: its name. ``store``: folder for local files. ``config``: of the run, see ``run_config``.
    """
    sinks: list[Sink] = [TensorBoard(store / "tensorboard")] if spec.tensorboard else []
    if spec.wandb is not None:
        sinks.append(Wandb(spec.wandb, job, store, config))
    if spec.mlflow is not None:
        sinks.append(Mlflow(spec.mlflow, job, store, config))
    return sinks


class TensorBoard:
    """Sink that writes event files to ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def begin(self, after: int) -> None:
        """Start a new event file that hides the steps after ``after``."""
        from torch.utils.tensorboard import SummaryWriter

        self.end()
        self._writer = SummaryWriter(str(self._folder), purge_step=after + 1)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics as scalars."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """One Weights & Biases run for all attempts. WANDB_API_KEY comes from the pod's environment."""

    def __init__(self, spec: WandbSpec, job: str, store: Path, config: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            name=job,
            id=store.name,
            resume="allow",
            mode="offline" if spec.offline else "online",
            dir=str(store),
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

    def end(self) -> None:
        """Finish the run."""
        self._run.finish()


class Mlflow:
    """One MLflow run for all attempts; its id is kept in the job's folder."""

    def __init__(self, spec: MlflowSpec, job: str, store: Path, config: dict[str, Any]) -> None:
        """A run keeps the configuration with which it began: MLflow does not change parameters."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(spec.tracking_uri)
        id_file = store / "mlflow-run-id"
        if id_file.is_file():
            self._run = id_file.read_text()
            return
        experiment = self._client.get_experiment_by_name(spec.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(spec.experiment)
        self._run = self._client.create_run(number, run_name=job).info.run_id
        params = [Param(name, value[:_MLFLOW_VALUE]) for name, value in flattened(config).items()]
        for first in range(0, len(params), _MLFLOW_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + _MLFLOW_PARAMS])
        id_file.write_text(self._run)

    def begin(self, after: int) -> None:
        """Continue the run; repeated steps are logged again."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of one step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entries = [Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=entries)

    def end(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)
