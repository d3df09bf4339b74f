"""PodDisruptionBudgets and NetworkPolicies (pure)."""

from typing import Any

from grpo_operator.api import names
from grpo_operator.api.names import AGENT_PORT, CONTROLLER_PORT, owner_of
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.render.metadata import metadata
from grpo_operator.settings import OperatorSettings

Selector = dict[str, Any]  # LabelSelector
ANY_JOB: Selector = {"matchExpressions": [{"key": names.JOB_LABEL, "operator": "Exists"}]}


def trainer_budget(job: dict[str, Any], trainers: int) -> dict[str, Any]:
    """A drain takes no training pod: suspend the job first."""
    return _budget(job, names.TRAINER, trainers)


def rollout_budget(owner: dict[str, Any], pool: RolloutTemplate) -> dict[str, Any]:
    """A drain takes engines down to minAvailable."""
    return _budget(owner, names.ROLLOUT, pool.min_available * pool.engine.nodes_per_engine)


def _budget(owner: dict[str, Any], pool: str, available: int) -> dict[str, Any]:
    """RayClusters have no scale subresource: the API allows minAvailable as a number only."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(owner, f"{owner['metadata']['name']}-{pool}"),
        "spec": {
            "minAvailable": available,
            "selector": {"matchLabels": owner_of(owner).labels(pool)},
        },
    }


def network_policy(
    owner: dict[str, Any], settings: OperatorSettings, friends: Selector | None = None
) -> dict[str, Any]:
    """The owner's pods talk to each other; of the rest of the cluster only the operator gets in,
    Prometheus for metrics, and the pods of ``friends``: a job's standing pool, or its jobs.

    Nothing is said of what goes out, so DNS, stores and verifiers stay in reach.
    """
    selector = {"matchLabels": owner_of(owner).label}
    scraper = settings.scrape_namespace
    peers = [{"podSelector": selector}, *([{"podSelector": friends}] if friends else [])]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(owner, owner["metadata"]["name"]),
        "spec": {
            "podSelector": selector,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": peers},
                _from_namespace(settings.namespace, CONTROLLER_PORT, AGENT_PORT),
                *([_from_namespace(scraper, CONTROLLER_PORT, AGENT_PORT)] if scraper else []),
            ],
        },
    }


def _from_namespace(name: str, *ports: int) -> dict[str, Any]:
    selector = {"matchLabels": {"kubernetes.io/metadata.name": name}}
    return {
        "from": [{"namespaceSelector": selector}],
        "ports": [{"port": port, "protocol": "TCP"} for port in ports],
    }
