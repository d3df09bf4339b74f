"""Gangs of small rank methods on a local Ray, as the controller starts those of a trainer."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group

from grpo_worker.controller.training.processes import RayProcesses
from grpo_worker.controller.training.worker_group import WorkerGroup

_TESTS = Path(__file__).parents[1] / "worker"  # modules of methods, which Ray's workers import


@contextmanager
def ray_gang(methods: type[Any], ranks: int, hang_seconds: float, **fields: Any) -> Iterator[WorkerGroup]:
    """Start a gang, each rank a process with a core; end it and Ray afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(_TESTS), *sys.path]))
        resources = {"trainer": ranks}
        ray.init(
            address="local", num_cpus=ranks, resources=resources, include_dashboard=False, log_to_driver=False
        )
        pool = placement_group([{"CPU": 1, "trainer": 1}] * ranks)
        group = WorkerGroup(methods, RayProcesses(methods, pool), hang_seconds, **fields)
        try:
            group.start({"attempt": 1})
            yield group
        finally:
            group.kill()
            ray.shutdown()
