"""Artifacts of an ended run for trackers of experiments: its page and the addresses of its checkpoints."""

import logging
from pathlib import Path

from grpo_worker.checkpointing.best import best_step
from grpo_worker.checkpointing.store import complete
from grpo_worker.common.errors import one_line
from grpo_worker.common.store_path import JobFolder, StorePath, has_file
from grpo_worker.controller.status.page_file import FILE
from grpo_worker.metrics.sinks.base import RunArtifacts

log = logging.getLogger(__name__)


def run_artifacts(folder: JobFolder) -> RunArtifacts:
    """Return the page of a run and the addresses of its checkpoints; what cannot be read is left out."""
    try:
        page = folder.store / FILE
        text = page.read_text(encoding="utf-8") if has_file(page) else ""
        return RunArtifacts(text, checkpoints(folder.store / "checkpoints"))
    except Exception as error:  # noqa: BLE001 - it costs a job nothing but these
        log.warning("trackers get neither the run's page nor its checkpoints: %s", one_line(error))
        return RunArtifacts()


def checkpoints(root: StorePath) -> dict[str, str]:
    """Return the addresses of the last complete checkpoint, and of the one that ``keepBest`` keeps."""
    found = complete(root)
    wanted = {"last_checkpoint": max(found, default=None), "best_checkpoint": best_step(root)}
    return {name: _address(found[step]) for name, step in wanted.items() if step in found}


def _address(path: StorePath) -> str:
    return path.as_uri() if isinstance(path, Path) else str(path)
