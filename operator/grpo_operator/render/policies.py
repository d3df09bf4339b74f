"""PodDisruptionBudgets and the NetworkPolicy of a job (pure)."""

from typing import Any

from grpo_operator.api.rolloutpool import RolloutPoolSpec
from grpo_operator.plan import names
from grpo_operator.plan.names import AGENT_PORT, CONTROLLER_PORT
from grpo_operator.render.metadata import metadata
from grpo_operator.render.settings import OperatorSettings


def disruption_budgets(job: dict[str, Any], trainers: int, pool: RolloutPoolSpec) -> list[dict[str, Any]]:
    """A drain takes no training pod (suspend the job first), and engines down to minAvailable.

    RayClusters have no scale subresource: the API allows minAvailable as a number only.
    """
    return [
        _budget(job, names.TRAINER, trainers),
        _budget(job, names.ROLLOUT, pool.min_available * pool.engine.nodes_per_engine),
    ]


def _budget(job: dict[str, Any], pool: str, available: int) -> dict[str, Any]:
    name = job["metadata"]["name"]
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(job, f"{name}-{pool}"),
        "spec": {
            "minAvailable": available,
            "selector": {"matchLabels": names.labels(name, pool)},
        },
    }


def network_policy(job: dict[str, Any], settings: OperatorSettings) -> dict[str, Any]:
    """The job's pods talk to each other; of the rest of the cluster only the operator gets in.

    Nothing is said of what goes out, so DNS, stores and verifiers stay in reach.
    """
    name = job["metadata"]["name"]
    selector = {"matchLabels": {names.JOB_LABEL: name}}
    operator = {"matchLabels": {"kubernetes.io/metadata.name": settings.namespace}}
    ports = [{"port": port, "protocol": "TCP"} for port in (CONTROLLER_PORT, AGENT_PORT)]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, name),
        "spec": {
            "podSelector": selector,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": selector}]},
                {"from": [{"namespaceSelector": operator}], "ports": ports},
            ],
        },
    }
