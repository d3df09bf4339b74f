"""What the operator sees of one job, gathered before anything is decided."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.v1alpha1.status import LONGEST_MESSAGE, EngineState, EngineStatus
from grpo_operator.kuberay_client.models import RayClusterStatus
from grpo_operator.plan.status.container_failures import ContainerFailure, container_failures


@dataclass(frozen=True, slots=True)
class Observed:
    """One look. ``progress``: the controller's own report, None while it cannot be reached.
    ``pool_pods``: those of a RolloutPool that the job does not own but uses."""

    ray_cluster: RayClusterStatus | None = None
    pods: tuple[dict[str, Any], ...] = ()
    progress: dict[str, Any] | None = None
    agents: dict[str, dict[str, Any]] = field(default_factory=dict)
    pool_pods: tuple[dict[str, Any], ...] = ()

    def of_pool(self, pool: str) -> list[dict[str, Any]]:
        """Pods of one pool that are not on their way out."""
        return of_pool(self.pods, pool)

    def nodes_of(self, pool: str) -> set[str]:
        """Names of the nodes on which pods of a pool run or end."""
        found = (pod for pod in self.pods if pod["metadata"]["labels"].get(names.POOL_LABEL) == pool)
        return {pod["spec"]["nodeName"] for pod in found if pod["spec"].get("nodeName")}

    def ready(self, pool: str) -> int:
        """Ready pods of a pool; of the rollout pool, ready engines."""
        pods = self.engine_pods() if pool == names.ROLLOUT else self.of_pool(pool)
        return sum(is_ready(pod) for pod in pods)

    def engines(self) -> list[EngineStatus]:
        """Each engine as its agent describes it; a silent agent means RESTARTING."""
        return [self._engine(pod) for pod in sorted(self.engine_pods(), key=pod_name)]

    def engine_pods(self) -> list[dict[str, Any]]:
        """The first pod of each engine: it answers for the others."""
        return first_hosts(of_pool((*self.pods, *self.pool_pods), names.ROLLOUT))

    def _engine(self, pod: dict[str, Any]) -> EngineStatus:
        name, address = pod_name(pod), pod.get("status", {}).get("podIP")
        endpoint = f"http://{address}:{names.ENGINE_PORT}" if address else None
        report = self.agents.get(name)
        if report is None:
            dead = pod.get("status", {}).get("phase") == "Failed"
            state = EngineState.DEAD if dead else EngineState.RESTARTING
            return EngineStatus(name=name, state=state, endpoint=endpoint, message=self._trouble(pod))
        return EngineStatus(
            name=name,
            state=EngineState(report["state"]),
            weight_version=report["weightVersion"],
            endpoint=endpoint,
            last_transition=report["since"] or None,
            restarts=report["restarts"],
            waits=report.get("waits") or None,
            message=self._trouble(pod) or _reason(report),
        )

    def _trouble(self, pod: dict[str, Any]) -> str | None:
        return next((failure.text[:LONGEST_MESSAGE] for failure in container_failures([pod])), None)

    def container_failures(self) -> list[ContainerFailure]:
        """Containers of the job's pods that fail."""
        return container_failures((*self.pods, *self.pool_pods))


def _reason(report: dict[str, Any]) -> str | None:
    """Why an engine does not serve, as its agent says."""
    reason = "" if report["state"] == EngineState.SERVING else report.get("reason") or ""
    return reason[:LONGEST_MESSAGE] or None


def of_pool(pods: Iterable[dict[str, Any]], pool: str) -> list[dict[str, Any]]:
    """Those pods of one pool that are not on their way out."""
    return [
        pod
        for pod in pods
        if pod["metadata"]["labels"].get(names.POOL_LABEL) == pool
        and not pod["metadata"].get("deletionTimestamp")
    ]


def first_hosts(pods: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the pods that are a further host of an engine."""
    return [pod for pod in pods if pod["metadata"]["labels"].get(names.HOST_INDEX, "0") == "0"]


def pod_name(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def is_ready(pod: dict[str, Any]) -> bool:
    """Pod condition Ready."""
    conditions = pod.get("status", {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
