"""Where metrics of a step are shown besides the job's own record: TensorBoard, W&B, MLflow."""

import time
from pathlib import Path
from typing import Any, Protocol

from grpo_operator.api.v1alpha1.observability import MlflowSpec, ObservabilitySpec, WandbSpec


class Sink(Protocol):
    """Takes the metrics of each step. After a restart steps come again, and the later ones count."""

    def begin(self, after: int) -> None:
        """An attempt begins after step ``after``."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of one step."""

    def end(self) -> None:
        """The job is done."""


def sinks_of(spec: ObservabilitySpec, job: str, store: Path) -> list[Sink]:
    """What the job asks for. ``job``: its name; ``store``: its folder, where local files go."""
    found: list[Sink] = [TensorBoard(store / "tensorboard")] if spec.tensorboard else []
    if spec.wandb is not None:
        found.append(Wandb(spec.wandb, job, store))
    if spec.mlflow is not None:
        found.append(Mlflow(spec.mlflow, job, store))
    return found


class TensorBoard:
    """Event files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def begin(self, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.end()
        self._writer = SummaryWriter(str(self._folder), purge_step=after + 1)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """One run of Weights & Biases for all attempts. WANDB_API_KEY comes from the pod's environment."""

    def __init__(self, spec: WandbSpec, job: str, store: Path) -> None:
        import wandb

        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            name=job,
            id=store.name,
            resume="allow",
            mode="offline" if spec.offline else "online",
            dir=str(store),
        )
        # W&B refuses to go back to an earlier step of its own count.
        self._run.define_metric("training_step")
        self._run.define_metric("*", step_metric="training_step")

    def begin(self, after: int) -> None: ...

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({"training_step": step, **metrics})

    def end(self) -> None:
        self._run.finish()


class Mlflow:
    """One MLflow run for all attempts; its id is kept in the job's folder."""

    def __init__(self, spec: MlflowSpec, job: str, store: Path) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(spec.tracking_uri)
        memory = store / "mlflow-run-id"
        if memory.is_file():
            self._run = memory.read_text()
            return
        found = self._client.get_experiment_by_name(spec.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(spec.experiment)
        self._run = self._client.create_run(experiment, run_name=job).info.run_id
        memory.write_text(self._run)

    def begin(self, after: int) -> None: ...

    def write(self, step: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entries = [Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=entries)

    def end(self) -> None:
        self._client.set_terminated(self._run)
