"""The sinks that a job configures."""

from functools import partial
from typing import Any

from grpo_operator.api.v1alpha1.observability import ObservabilitySpec
from grpo_worker.common.store_path import JobFolder
from grpo_worker.metrics.sinks.base import Opening
from grpo_worker.metrics.sinks.mlflow import Mlflow
from grpo_worker.metrics.sinks.sent_tables import SentTables
from grpo_worker.metrics.sinks.tensorboard import TensorBoard
from grpo_worker.metrics.sinks.trackio import Trackio
from grpo_worker.metrics.sinks.wandb import Wandb

_EGRESS = "let the controller's pod reach it (scheduling.egress)"


def sinks_of(spec: ObservabilitySpec, job: str, folder: JobFolder, config: dict[str, Any]) -> list[Opening]:
    """Return the sinks that the job configures. ``folder``: of the job. ``config``: see ``run_config``."""
    disk, sent = folder.disk, folder.store / "trackers"
    found = []
    if spec.tensorboard:
        remedy = (
            "check the space and the rights of the job's folder, or set observability.tensorboard to false"
        )
        found.append(Opening("TensorBoard", partial(TensorBoard, disk / "tensorboard", config), remedy))
    if spec.wandb is not None:
        opened = partial(Wandb, spec.wandb, job, disk, config, SentTables(sent / "wandb.json"))
        remedy = (
            f"check WANDB_API_KEY in controller.podTemplate and {_EGRESS}, or set observability.wandb.offline"
        )
        found.append(Opening("W&B", opened, remedy))
    if spec.mlflow is not None:
        remedy = f"check observability.mlflow.trackingUri and the server's artifact store, and {_EGRESS}"
        found.append(Opening("MLflow", partial(Mlflow, spec.mlflow, job, config), remedy))
    if spec.trackio is not None:
        local = partial(Trackio, spec.trackio, job, disk, config, SentTables(sent / "trackio.json"))
        remedy = (
            "check that the image of the job has trackio (pip install trackio), its HF_TOKEN or "
            f"TRACKIO_WRITE_TOKEN in controller.podTemplate, and {_EGRESS}"
        )
        found.append(Opening("trackio", local, remedy))
    return found
