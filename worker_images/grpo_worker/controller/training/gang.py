"""Training gang: the life of all trainer ranks, and the checkpoint that they start from."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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
    """State that a gang starts from.

    ``step``: of its checkpoint; 0: there is none. ``controller_state``: of the controller, in that
    checkpoint.
    ``source``: where the checkpoint was read, ``store`` or ``memory``.
    """

    step: int
    controller_state: dict[str, Any] | None
    source: str = "store"


class RankGroup(Protocol):
    """All ranks of one gang, called like one worker; see WorkerGroup."""

    @property
    def addresses(self) -> list[str]:
        """IP address of each rank."""

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""

    def start(self, config: dict[str, Any]) -> None: ...

    def call(self, method: str, *args: Any) -> Any: ...

    def begin(self, method: str, *args: Any) -> Callable[[], list[Any]]: ...

    def notify(self, method: str, *args: Any) -> None: ...

    def kill(self) -> None: ...


class ResourcePools(Protocol):
    """Places for the ranks of a gang; see ResourcePoolManager."""

    def acquire(self, resource: str, ranks: int, timeout: float, gpus: int = 0) -> Any: ...

    def release(self, resource: str) -> None: ...


# (pool that ResourcePools.acquire returned) -> group of processes that are not started yet
GroupFactory = Callable[[Any], RankGroup]


class TrainerGang:
    """All trainer ranks, started and ended together."""

    def __init__(
        self,
        spec: GRPOJobSpec,
        hf: dict[str, Any],
        checkpoints: Path,
        pools: ResourcePools | None = None,
        make_group: GroupFactory | None = None,
    ) -> None:
        """``pools``, ``make_group``: where the ranks run; default: Ray actors on placement groups."""
        self._spec = spec
        self.hf = hf
        self._config = {
            "spec": spec.wire(),
            "hf": hf,
            "checkpoints": str(checkpoints),
        }
        self._checkpoints = checkpoints
        self._gpus = int(spec.trainer.device is Device.CUDA)  # of each rank
        self._pools = pools or ResourcePoolManager()
        self._make_group = make_group or self._ray_group
        self._group: RankGroup | None = None
        self._pool: Any = None
        self.world = spec.trainer.nodes * spec.trainer.gpus_per_node

    def acquire(self) -> None:
        """Wait until all pods of the pool are there, and the ranks of the previous attempt have ended."""
        self._pool = self._pools.acquire(RESOURCE, self.world, POOL_TIMEOUT, self._gpus)

    def start(self) -> None:
        """Start every rank."""
        assert self._pool is not None, "the pool is not acquired"
        self._group = self._make_group(self._pool)
        self._group.start(self._config)

    def _ray_group(self, pool: PlacementGroup) -> RankGroup:
        profile = str(self._checkpoints.parent / "profile")
        env = runtime_env(self._spec.observability.profile, profile)
        return WorkerGroup(
            TrainerWorker,
            pool,
            CALL_TIMEOUT,
            gpus=self._gpus,
            runtime_env=env or None,
            flight_records=f"{profile}/hang",
        )

    @property
    def newest(self) -> int:
        """Return the step of the newest complete checkpoint in the store; 0: there is none."""
        return max(complete_steps(self._checkpoints), default=0)

    def restore(self) -> Restored:
        """Load the newest complete checkpoint of the store into the ranks."""
        step = self.newest
        if step == 0:
            return Restored(0, None)
        log.info("loading the checkpoint of step %d", step)
        path = directory(self._checkpoints, step)
        self.call("load_checkpoint", str(path))
        file = path / CONTROLLER_STATE
        return Restored(step, json.loads(file.read_text()))

    def stop(self) -> None:
        """End every rank and release the pool. Can be called when nothing runs."""
        if self._group is not None:
            self._group.kill()
        self._group = self._pool = None
        self._pools.release(RESOURCE)

    def call(self, method: str, *args: Any) -> Any:
        """Call a registered method by its dispatch protocol; see WorkerGroup.call."""
        assert self._group is not None, "the gang is not started"
        return self._group.call(method, *args)

    def begin(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Start a call of all ranks; return a function that waits for the results."""
        assert self._group is not None, "the gang is not started"
        return self._group.begin(method, *args)

    def notify(self, method: str, *args: Any) -> None:
        """Call a method of rank 0 during another call, without waiting. The rank may be gone."""
        if self._group is not None:
            self._group.notify(method, *args)

    @property
    def address(self) -> str:
        """Return the IP address of rank 0."""
        assert self._group is not None, "the gang is not started"
        return str(self._group.addresses[0])

    def sources(self) -> dict[int, str]:
        """Return the URL of the agent that serves each rank's weights."""
        assert self._group is not None, "the gang is not started"
        return {rank: f"http://{address}:{AGENT_PORT}" for rank, address in enumerate(self._group.addresses)}

    def processes(self) -> list[dict[str, Any]]:
        """Return rank, address and process id of each rank, as in the status."""
        if self._group is None:
            return []
        pairs = zip(self._group.addresses, self._group.pids, strict=True)
        return [{"rank": r, "address": a, "pid": p} for r, (a, p) in enumerate(pairs)]
