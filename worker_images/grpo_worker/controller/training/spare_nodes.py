"""Keeps the spare nodes of a pool warm: each imports what ranks import, once, before it is needed."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_worker.controller.training.gang_nodes import PoolNode
from grpo_worker.roles.warm_up import import_trainer

log = logging.getLogger(__name__)
_POLL_SECONDS = 5.0


class WarmSpares:
    """Thread that warms every spare node once, also those that register later.

    ``spares``: returns the spare nodes of now.
    """

    def __init__(self, spares: Callable[[], list[PoolNode]]) -> None:
        self._spares = spares
        self._tasks: dict[str, Any] = {}  # by id of the node; None: it has ended
        threading.Thread(target=self._run, daemon=True, name="warm-spares").start()

    def _run(self) -> None:
        while True:
            try:
                self._poll()
            except ray.exceptions.RayError:  # the node or Ray's head is gone
                log.warning("spare nodes cannot be warmed now", exc_info=True)
            time.sleep(_POLL_SECONDS)

    def _poll(self) -> None:
        for node in self._spares():
            if node.id not in self._tasks:
                self._tasks[node.id] = self._begin(node)
        for node_id, task in self._tasks.items():
            if task is not None and ray.wait([task], timeout=0)[0]:
                self._tasks[node_id] = None
                _report(node_id, task)

    def _begin(self, node: PoolNode) -> Any:
        log.info("the spare node %s imports what ranks import", node.address)
        there = NodeAffinitySchedulingStrategy(node.id, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(import_trainer)
        return task.options(scheduling_strategy=there).remote()


def _report(node_id: str, task: Any) -> None:
    """Log how the imports ended; an error is no failure of the job: the start of a rank would name it."""
    try:
        seconds, versions = ray.get(task)
        log.info("the spare node %s is warm: its imports took %.0f s (%s)", node_id[:8], seconds, versions)
    except ray.exceptions.RayError as error:
        log.warning("the spare node %s is not warm: %r", node_id[:8], error)
