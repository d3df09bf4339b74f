"""PodDisruptionBudgets and NetworkPolicies (pure)."""

from collections.abc import Iterable
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.names import AGENT_PORT, CONTROLLER_PORT, ENGINE_PORT, owner_of
from grpo_operator.api.v1alpha1.egress import EgressPeer, EgressSpec
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.render.metadata import metadata
from grpo_operator.settings import OperatorSettings

Selector = dict[str, Any]  # LabelSelector
# Of the cluster's DNS, whose pods have another port on OpenShift, and of caches on the nodes: anywhere.
_DNS = {"ports": [{"port": port, "protocol": kind} for port in (53, 5353) for kind in ("UDP", "TCP")]}
ANY_JOB: Selector = {"matchExpressions": [{"key": names.JOB_LABEL, "operator": "Exists"}]}


def trainer_budget(job: dict[str, Any], spec: GRPOJobSpec) -> dict[str, Any]:
    """Return a budget that keeps a drain from evicting any training pod: users suspend the job first.

    With ``scheduling.evictTrainers`` it may evict one at a time: the job saves its steps then.
    """
    return _budget(job, names.TRAINER, spec.trainer.pods - spec.scheduling.evict_trainers)


def rollout_budget(owner: dict[str, Any], pool: RolloutTemplate) -> dict[str, Any]:
    """Return a budget that lets a drain evict engines down to minAvailable.

    Each evicted pod costs its whole engine, so no more pods than spare engines may be evicted at once.
    """
    pods = pool.replicas * pool.engine.nodes_per_engine
    return _budget(owner, names.ROLLOUT, pods - (pool.replicas - pool.min_available))


def _budget(owner: dict[str, Any], pool: str, available: int) -> dict[str, Any]:
    # A percentage would need a scale subresource, which RayClusters do not have.
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(owner, f"{owner['metadata']['name']}-{pool}"),
        "spec": {
            "minAvailable": available,
            # A pod that is not ready does nothing that a drain would interrupt.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": owner_of(owner).labels(pool)},
        },
    }


def network_policy(
    owner: dict[str, Any], settings: OperatorSettings, egress: EgressSpec | None = None,
    allowed: Selector | None = None, serves: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return a policy for ingress: the owner's pods, the operator, Prometheus and ``allowed`` pods only.

    ``egress``: limits of the connections that the pods open; None: there are none. ``allowed``: pods of the
    shared pool of a job, or of all jobs for a shared pool. ``serves``: all pods of the namespace may call the
    engines, which require a key.
    """
    selector = {"matchLabels": owner_of(owner).label}
    scraper = settings.scrape_namespace
    peers = [{"podSelector": selector}, *([{"podSelector": allowed}] if allowed else [])]
    outgoing = {} if egress is None else {"egress": [{"to": peers}, _DNS, *map(_outgoing, egress.to)]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(owner, owner["metadata"]["name"]),
        "spec": {
            "podSelector": selector,
            "policyTypes": ["Ingress", *(["Egress"] if outgoing else [])],
            "ingress": [
                {"from": peers},
                *([{"from": [{"podSelector": {}}], "ports": _tcp([ENGINE_PORT])}] if serves else []),
                _from_namespace(settings.namespace, CONTROLLER_PORT, AGENT_PORT),
                *([_from_namespace(scraper, CONTROLLER_PORT, AGENT_PORT)] if scraper else []),
            ],
        }
        | outgoing,
    }


def _from_namespace(name: str, *ports: int) -> dict[str, Any]:
    return {"from": [_pods_of(name)], "ports": _tcp(ports)}


def _outgoing(to: EgressPeer) -> dict[str, Any]:
    peer = {"ipBlock": {"cidr": to.cidr}} if to.namespace is None else _pods_of(to.namespace)
    return {"to": [peer]} | ({"ports": _tcp(to.ports)} if to.ports else {})


def _pods_of(namespace: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}


def _tcp(ports: Iterable[int]) -> list[dict[str, Any]]:
    return [{"port": port, "protocol": "TCP"} for port in ports]
