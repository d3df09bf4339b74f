"""Snapshot of one job or pool, gathered before anything is decided."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_operator.api import names
from grpo_operator.api.base import LONGEST_MESSAGE
from grpo_operator.api.messages import AgentStatus, ControllerStatus, EngineHost
from grpo_operator.api.urls import pod_url
from grpo_operator.api.v1alpha1.status import (
    EngineHostStatus,
    EngineState,
    EngineStatus,
    FailingNodeStatus,
)
from grpo_operator.kuberay_client.models import RayClusterStatus
from grpo_operator.plan.status.container_failures import ContainerFailure, container_failures
from grpo_operator.plan.status.unschedulable import without_nodes


@dataclass(frozen=True, slots=True)
class Observed:
    """State of one job or pool. ``controller``: None while the controller cannot be reached.
    ``agents``: by pod name. ``pool_pods``: pods of a RolloutPool that the job uses but does not own.
    ``sick_nodes``: nodes that lost pods of the job to a sick GPU, and why. ``node_problem``: a message about
    nodes of its pods that are not Ready. ``failing_nodes``: nodes on which its ranks have failed.
    ``held_pods``: a message about pods that wait to leave an unhealthy node.
    """

    ray_cluster: RayClusterStatus | None = None
    pods: tuple[dict[str, Any], ...] = ()
    controller: ControllerStatus | None = None
    agents: dict[str, AgentStatus] = field(default_factory=dict)
    pool_pods: tuple[dict[str, Any], ...] = ()
    sick_nodes: tuple[str, ...] = ()
    node_problem: str = ""
    failing_nodes: tuple[FailingNodeStatus, ...] = ()
    held_pods: str = ""

    def of_pool(self, pool: str) -> list[dict[str, Any]]:
        """Return the pods of one pool that are not being deleted."""
        return of_pool(self.pods, pool)

    def nodes_of(self, pool: str) -> set[str]:
        """Return the names of the nodes of a pool's pods, including pods that are being deleted."""
        pods = (pod for pod in self.pods if pod["metadata"]["labels"].get(names.POOL_LABEL) == pool)
        return {pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")}

    def ready(self, pool: str) -> int:
        """Return the number of ready pods of a pool, or of ready engines for the rollout pool."""
        pods = self.engine_pods() if pool == names.ROLLOUT else self.of_pool(pool)
        return sum(is_ready(pod) for pod in pods)

    def engines(self) -> list[EngineStatus]:
        """Return each engine's status. An engine whose agent does not answer counts as RESTARTING."""
        return [self._engine(pod) for pod in sorted(self.engine_pods(), key=pod_name)]

    def engine_pods(self) -> list[dict[str, Any]]:
        """Return the first pod of each engine; its agent reports for the whole engine."""
        return first_hosts(of_pool((*self.pods, *self.pool_pods), names.ROLLOUT))

    def _engine(self, pod: dict[str, Any]) -> EngineStatus:
        name, address = pod_name(pod), pod.get("status", {}).get("podIP")
        tls = names.TLS_LABEL in pod["metadata"].get("labels", {})
        endpoint = pod_url(address, names.ENGINE_PORT, tls=tls) if address else None
        agent = self.agents.get(name)
        if agent is None:
            dead = pod.get("status", {}).get("phase") == "Failed"
            state = EngineState.DEAD if dead else EngineState.RESTARTING
            error = self._error_of_hosts(pod)
            return EngineStatus(name=name, state=state, endpoint=endpoint, message=error)
        return EngineStatus(
            name=name,
            state=agent.state,
            weight_version=agent.weight_version,
            endpoint=endpoint,
            last_transition=agent.since or None,
            restarts=agent.restarts,
            waits=agent.waits or None,
            message=self._error_of_hosts(pod) or _reason(agent),
            hosts=[_host(host) for host in agent.hosts] or None,
        )

    def _error_of_hosts(self, first: dict[str, Any]) -> str | None:
        """Return the container error of the engine's first pod, or of another pod of it."""
        name = first["metadata"]["labels"].get(names.REPLICA_NAME)
        pods = of_pool((*self.pods, *self.pool_pods), names.ROLLOUT)
        others = [p for p in pods if name and p["metadata"]["labels"].get(names.REPLICA_NAME) == name]
        return next((error for error in map(_container_error, (first, *others)) if error), None)

    def unschedulable(self) -> str:
        """Return what the scheduler says about the pods of the job and of its pool without a node, or ""."""
        return without_nodes((*self.pods, *self.pool_pods))

    def container_failures(self) -> list[ContainerFailure]:
        """Return the failing containers of the job's pods and of the pool that it uses."""
        return container_failures((*self.pods, *self.pool_pods))


def own_report(job: dict[str, Any], report: ControllerStatus | None) -> ControllerStatus | None:
    """Return the report if the job's own controller sent it.

    Another one is that of a deleted job of the same name, or of this job before it was resumed after its end.
    """
    if report is None or report.writer not in ("", names.writer(job)):
        return None
    resumed = ((job.get("status") or {}).get("resumption") or {}).get("times", 0)
    return None if report.resumes is not None and report.resumes < resumed else report


def given_way(pods: Iterable[dict[str, Any]], superseded: Collection[str]) -> list[dict[str, Any]]:
    """Return the job's controller pods if all of them have given way to a controller that is no pod of it.

    That one runs on a node which is cut off, and whose pods were replaced. None of the job's own controllers
    would do anything any more, but the next one takes over again.
    """
    controllers = of_pool(pods, names.CONTROLLER)
    return controllers if all(pod_name(pod) in superseded for pod in controllers) else []


def _host(host: EngineHost) -> EngineHostStatus:
    role: Literal["leader", "worker"] = "worker" if host.host else "leader"
    return EngineHostStatus(pod=host.pod, role=role, host=host.host, state=host.state)


def _container_error(pod: dict[str, Any]) -> str | None:
    return next((failure.text[:LONGEST_MESSAGE] for failure in container_failures([pod])), None)


def _reason(agent: AgentStatus) -> str | None:
    """Return why an engine does not serve, as reported by its agent."""
    reason = "" if agent.state == EngineState.SERVING else agent.reason
    return reason[:LONGEST_MESSAGE] or None


def of_pool(pods: Iterable[dict[str, Any]], pool: str) -> list[dict[str, Any]]:
    """Return the pods of one pool that are not being deleted."""
    return [
        pod
        for pod in pods
        if pod["metadata"]["labels"].get(names.POOL_LABEL) == pool
        and not pod["metadata"].get("deletionTimestamp")
    ]


def first_hosts(pods: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the pods that are the first host of their engine."""
    return [pod for pod in pods if pod["metadata"]["labels"].get(names.HOST_INDEX, "0") == "0"]


def pod_name(pod: dict[str, Any]) -> str:
    """Return metadata.name."""
    return str(pod["metadata"]["name"])


def is_ready(pod: dict[str, Any]) -> bool:
    """Return whether the pod condition Ready is true."""
    conditions = pod.get("status", {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
