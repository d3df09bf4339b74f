"""The training gang: its life, and the checkpoint that it starts from."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.util.placement_group import PlacementGroup

from grpo_operator.api.base import Device
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.checkpointing.store import CONTROLLER_STATE, complete_steps, directory
from grpo_worker.controller.training.resource_pools import ResourcePoolManager
from grpo_worker.controller.training.worker_group import WorkerGroup
from grpo_worker.profiling.trace import runtime_env
from grpo_worker.roles.trainer import TrainerWorker

log = logging.getLogger(__name__)
RESOURCE = "trainer"
CALL_TIMEOUT = 600.0
POOL_TIMEOUT = 3600.0
AGENT_PORT = 9000


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a gang starts: the step of its checkpoint (0: none) and the controller's state.
    ``source``: store or memory."""

    step: int
    controller_state: dict[str, Any] | None
    source: str = "store"


class TrainerGang:
    """All trainer ranks, started and ended together."""

    def __init__(self, spec: GRPOJobSpec, hf: dict[str, Any], checkpoints: Path) -> None:
        self._spec = spec
        self.hf = hf
        self._config = {
            "spec": spec.wire(),
            "hf": hf,
            "checkpoints": str(checkpoints),
        }
        self._checkpoints = checkpoints
        self._gpus = int(spec.trainer.device is Device.CUDA)  # of each rank
        self._pools = ResourcePoolManager()
        self._group: WorkerGroup | None = None
        self._pool: PlacementGroup | None = None
        self.world = spec.trainer.nodes * spec.trainer.gpus_per_node

    def acquire(self) -> None:
        """Wait until the pool is whole, and nobody's: ranks of an attempt before have ended."""
        self._pool = self._pools.acquire(RESOURCE, self.world, POOL_TIMEOUT, self._gpus)

    def start(self) -> None:
        """Start every rank."""
        assert self._pool is not None, "the pool is not acquired"
        profile = str(self._checkpoints.parent / "profile")
        env = runtime_env(self._spec.observability.profile, profile)
        self._group = WorkerGroup(
            TrainerWorker,
            self._pool,
            CALL_TIMEOUT,
            gpus=self._gpus,
            runtime_env=env or None,
            flight_records=f"{profile}/hang",
        )
        self._group.start(self._config)

    @property
    def newest(self) -> int:
        """Step of the newest complete checkpoint in the store; 0: none."""
        return max(complete_steps(self._checkpoints), default=0)

    def restore(self) -> Restored:
        """Load the newest complete checkpoint of the store."""
        step = self.newest
        if step == 0:
            return Restored(0, None)
        log.info("loading the checkpoint of step %d", step)
        path = directory(self._checkpoints, step)
        self.call("load_checkpoint", str(path))
        file = path / CONTROLLER_STATE
        return Restored(step, json.loads(file.read_text()))

    def stop(self) -> None:
        """End every rank and give the pool back; fine when nothing runs."""
        if self._group is not None:
            self._group.kill()
        self._group = self._pool = None
        self._pools.release(RESOURCE)

    def call(self, method: str, *args: Any) -> Any:
        """Call a registered method of all ranks."""
        assert self._group is not None, "the gang is not started"
        return self._group.call(method, *args)

    def begin(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Call a method of all ranks; what is returned waits for the answers."""
        assert self._group is not None, "the gang is not started"
        return self._group.begin(method, *args)

    def tell(self, method: str, *args: Any) -> None:
        """Call a method of the first rank beside what it does; it may be gone."""
        if self._group is not None:
            self._group.tell(method, *args)

    @property
    def address(self) -> str:
        """IP address of the first rank."""
        assert self._group is not None, "the gang is not started"
        return str(self._group.addresses[0])

    def sources(self) -> dict[int, str]:
        """URL of the agent that serves each rank's weights."""
        assert self._group is not None, "the gang is not started"
        return {rank: f"http://{address}:{AGENT_PORT}" for rank, address in enumerate(self._group.addresses)}

    def processes(self) -> list[dict[str, Any]]:
        """Rank, address and process id, as the status shows them."""
        if self._group is None:
            return []
        pairs = zip(self._group.addresses, self._group.pids, strict=True)
        return [{"rank": r, "address": a, "pid": p} for r, (a, p) in enumerate(pairs)]
