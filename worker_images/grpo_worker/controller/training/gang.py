"""Training gang: the life of all trainer ranks, and the checkpoint that they start from."""

import json
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ray.util.placement_group import PlacementGroup

from grpo_operator.api.base import Device
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.checkpointing.store import (
    CONTROLLER_STATE,
    DamagedCheckpointError,
    model_digest,
    newest_sound,
    set_aside,
    step_and_attempt,
)
from grpo_worker.common import tls
from grpo_worker.common.clock import SYSTEM_CLOCK, Clock
from grpo_worker.common.log_files import log_folder
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.common.store_path import StorePath
from grpo_worker.common.versions import Versions
from grpo_worker.controller.training.image_versions import versions_of
from grpo_worker.controller.training.network import GangNetwork, gang_network
from grpo_worker.controller.training.processes import RayProcesses
from grpo_worker.controller.training.resource_pools import ResourcePoolManager
from grpo_worker.controller.training.stragglers import Member, members_of
from grpo_worker.controller.training.worker_group import GangError, WorkerGroup
from grpo_worker.profiling.trace import runtime_env
from grpo_worker.roles.dispatch import RankInfo
from grpo_worker.roles.host import RankHost
from grpo_worker.roles.shared_batch import SharedBatch
from grpo_worker.roles.trainer import TrainerWorker

log = logging.getLogger(__name__)
RESOURCE = "trainer"
AGENT_PORT = 9000


@dataclass(frozen=True, slots=True)
class Restored:
    """State that a gang starts from.

    ``step``, ``attempt``: after which it was saved, and by which; 0: it is the initial state.
    ``controller_state``: the controller's, saved with it. ``source``: where it was read, ``store`` or
    ``memory``. ``position``: state of the source of prompts instead of the one in ``controller_state``, if
    the job was rolled back since.
    """

    step: int
    controller_state: dict[str, Any] | None
    source: str = "store"
    attempt: int = 0
    position: dict[str, Any] | None = None


class RankGroup(Protocol):
    """All ranks of one gang, called like one worker; see WorkerGroup."""

    ranks: list[RankInfo]
    hosts: list[RankHost]

    @property
    def addresses(self) -> list[str]:
        """IP address of each rank."""

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""

    def start(self, config: dict[str, Any]) -> None: ...

    def call(self, method: str, *args: Any) -> Any: ...

    def begin(self, method: str, *args: Any) -> Callable[[], list[Any]]: ...

    def beside(self, method: str, *args: Any) -> Callable[[], list[Any]]: ...

    def beside_on(self, ranks: Sequence[int], method: str, *args: Any) -> Callable[[], list[Any]]: ...

    def share(self, batch: RaggedBatch, per_step: int) -> SharedBatch: ...

    def notify(self, method: str, *args: Any) -> None: ...

    def kill(self) -> None: ...

    @property
    def died(self) -> "Future[None]":
        """Completed when the process of a rank has ended, also between two calls."""

    @property
    def leaving(self) -> "Future[RankHost]":
        """Completed with the first pod that is about to end."""

    def death(self) -> GangError:
        """Return the error that names the ranks whose processes have ended."""


class ResourcePools(Protocol):
    """Places for the ranks of a gang; see ResourcePoolManager."""

    def acquire(
        self, resource: str, ranks: int, gpus: int = 0, report: Callable[[str], None] = ...
    ) -> Any: ...

    def release(self, resource: str) -> None: ...

    def avoid(self, address: str) -> None: ...

    def avoid_failing(self, addresses: frozenset[str]) -> None: ...

    def keep_warm(self, resource: str) -> None: ...


# (pool that ResourcePools.acquire returned) -> group of processes that are not started yet
GroupFactory = Callable[[Any], RankGroup]


class TrainerGang:
    """All trainer ranks, started and ended together."""

    def __init__(
        self,
        spec: GRPOJobSpec,
        hf: dict[str, Any],
        checkpoints: StorePath,
        pools: ResourcePools | None = None,
        make_group: GroupFactory | None = None,
        clock: Clock = SYSTEM_CLOCK,
        disk: Path | None = None,
    ) -> None:
        """``pools``, ``make_group``: where the ranks run; default: Ray actors on placement groups.

        ``disk``: the job's folder in its pods; default: where the checkpoints are.
        """
        self._disk = disk or Path(str(checkpoints.parent))
        self._spec = spec
        self._clock = clock
        self.hf = hf
        self._config = {
            "spec": spec.wire(),
            "hf": hf,
            "checkpoints": str(checkpoints),
            "logs": log_folder(spec.checkpoint.store, self._disk),
        }
        self._checkpoints = checkpoints
        self._gpus = int(spec.trainer.device is Device.CUDA)  # of each rank
        self._pools = pools or ResourcePoolManager(clock)
        self._make_group = make_group or self._ray_group
        self._group: RankGroup | None = None
        self._pool: Any = None
        self._nodes: dict[str, str] = {}  # address -> Kubernetes node, of all gangs so far
        self.versions = Versions()  # of the ranks' image
        self.network = GangNetwork()  # of ranks with GPUs
        self.world = spec.trainer.nodes * spec.trainer.gpus_per_node
        self.attempt = 0  # of the job, whose gang this is

    def follow(self, spec: GRPOJobSpec) -> None:
        """Take over the fields of a job that may change while it runs.

        Learning rates follow the number of steps at once, limits hold from the next start of the ranks on.
        """
        longer = spec.updates != self._spec.updates
        self._spec, self._config = spec, self._config | {"spec": spec.wire()}
        if longer and self._group is not None:
            self._group.call("decay_over", spec.updates)

    def acquire(self, report: Callable[[str], None], avoided: Collection[str] = ()) -> None:
        """Wait until all pods of the pool are there, and the ranks of the previous attempt have ended.

        ``report``: shows what is missing. The wait has no limit: the pods come back or they do not.
        ``avoided``: names of Kubernetes nodes on which ranks start only if there are no others.
        """
        failing = {address for address, node in self._nodes.items() if node in avoided}
        self._pools.avoid_failing(frozenset(failing))
        self._pool = self._pools.acquire(RESOURCE, self.world, self._gpus, report)

    def start(self, attempt: int) -> None:
        """Start every rank of the job's ``attempt``. Raises ParityError if their images differ."""
        assert self._pool is not None, "the pool is not acquired"
        self.attempt = attempt
        self._group = self._make_group(self._pool)
        self.versions = versions_of(self._group.hosts)
        self._nodes |= {host.address: host.node for host in self._group.hosts}
        self._group.start(self._config | {"attempt": attempt})
        if self._spec.trainer.spare_nodes:
            self._pools.keep_warm(RESOURCE)
        if self._gpus:
            rdma = self._spec.scheduling.rdma is not None
            transports = self.call("transport")
            self.network = gang_network(self._group.hosts, transports, self.versions.nccl, rdma)

    def _ray_group(self, pool: PlacementGroup) -> RankGroup:
        profile = str(self._disk / "profile")
        env = runtime_env(self._spec.observability.profile, profile)
        processes = RayProcesses(TrainerWorker, pool, self._gpus, env or None)
        limit = self._spec.restart_policy.hang_limit
        return WorkerGroup(TrainerWorker, processes, limit, f"{profile}/hang", self._clock)

    @property
    def newest(self) -> "StorePath | None":
        """Return the newest complete checkpoint in the store; None: there is none.

        Damaged checkpoints are set aside.
        """
        return newest_sound(self._checkpoints, model_digest(self.hf))

    def restore(self) -> Restored:
        """Load the newest complete checkpoint of the store into the ranks."""
        path = self.newest
        if path is None:
            return Restored(0, None)
        log.info("loading the checkpoint %s", path)
        try:
            self.call("load_checkpoint", str(path))
        except GangError as error:
            if isinstance(error.__cause__, DamagedCheckpointError):
                set_aside(path, error.__cause__)  # the next attempt takes the one before
            raise
        step, attempt = step_and_attempt(path)
        return Restored(step, json.loads((path / CONTROLLER_STATE).read_text()), attempt=attempt)

    def stop(self) -> None:
        """End every rank and release the pool. Can be called when nothing runs."""
        if self._group is not None:
            self._group.kill()
            if self._group.leaving.done():
                self._pools.avoid(self._group.leaving.result().address)
        self._group = self._pool = None
        self._pools.release(RESOURCE)

    def call(self, method: str, *args: Any) -> Any:
        """Call a registered method by its dispatch protocol; see WorkerGroup.call."""
        assert self._group is not None, "the gang is not started"
        return self._group.call(method, *args)

    def one_of_each_pod(self) -> frozenset[int]:
        """Return one rank of each pod for every data-parallel, pipeline and context-parallel rank in it."""
        assert self._group is not None, "the gang is not started"
        first: dict[tuple[str, int, int, int], int] = {}
        for info, address in zip(self._group.ranks, self._group.addresses, strict=True):
            first.setdefault((address, info.dp_rank, info.pp_rank, info.cp_rank), info.rank)
        return frozenset(first.values())

    def share(self, batch: RaggedBatch, per_step: int) -> SharedBatch:
        """Return the batch for calls. ``per_step``: rows of one optimizer step."""
        assert self._group is not None, "the gang is not started"
        return self._group.share(batch, per_step)

    def begin(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Start a call of all ranks; return a function that waits for the results."""
        assert self._group is not None, "the gang is not started"
        return self._group.begin(method, *args)

    def beside(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Start a method of all ranks beside their calls; see WorkerGroup.beside."""
        assert self._group is not None, "the gang is not started"
        return self._group.beside(method, *args)

    def beside_on(self, ranks: Sequence[int], method: str, *args: Any) -> Callable[[], list[Any]]:
        """Start a method of some ranks beside their calls; see WorkerGroup.beside_on."""
        if self._group is None:
            raise GangError("the trainer ranks do not run now: ask again when they do", [])
        return self._group.beside_on(ranks, method, *args)

    def notify(self, method: str, *args: Any) -> None:
        """Call a method of rank 0 during another call, without waiting. The rank may be gone."""
        if self._group is not None:
            self._group.notify(method, *args)

    @property
    def died(self) -> "Future[None]":
        """Completed when the process of a rank has ended, whether or not a call runs."""
        return self._group.died if self._group is not None else Future()

    @property
    def leaving(self) -> "Future[RankHost]":
        """Completed with the first pod of ranks that is about to end."""
        return self._group.leaving if self._group is not None else Future()

    def check(self) -> None:
        """Raise GangError, which names them, if processes of ranks have ended."""
        if self._group is not None and self._group.died.done():
            raise self._group.death()

    @property
    def hosts(self) -> list[RankHost]:
        """Return where each rank runs."""
        assert self._group is not None, "the gang is not started"
        return self._group.hosts

    @property
    def address(self) -> str:
        """Return the IP address of rank 0."""
        assert self._group is not None, "the gang is not started"
        return str(self._group.addresses[0])

    def sources(self) -> dict[int, str]:
        """Return the URL of the agent that serves each rank's weights."""
        assert self._group is not None, "the gang is not started"
        return {rank: tls.url(address, AGENT_PORT) for rank, address in enumerate(self._group.addresses)}

    def members(self) -> list[Member]:
        """Return the ranks as the watch for stragglers compares them."""
        assert self._group is not None, "the gang is not started"
        return members_of(self._group.ranks, self._group.hosts)

    def processes(self) -> list[dict[str, Any]]:
        """Return rank, address and process id of each rank, as in the status."""
        if self._group is None:
            return []
        pairs = zip(self._group.addresses, self._group.pids, strict=True)
        return [{"rank": r, "address": a, "pid": p} for r, (a, p) in enumerate(pairs)]
