"""Names and labels of everything that belongs to a job."""

import hashlib
from typing import Any, NamedTuple

JOB_LABEL = "rl.grpo.dev/job"
ROLLOUT_POOL_LABEL = "rl.grpo.dev/rolloutpool"  # of what belongs to a RolloutPool without a job
POOL_LABEL = "rl.grpo.dev/pool"
HASH_ANNOTATION = "rl.grpo.dev/applied"
LEAVES_ANNOTATION = "rl.grpo.dev/leaves"
OWNER_UID = "rl.grpo.dev/owner-uid"  # annotation: a RayCluster may have no owner reference

# Ports inside the cluster. 8080 is taken: there Ray itself exports metrics.
ENGINE_PORT, AGENT_PORT, CONTROLLER_PORT, GCS_PORT = 30000, 9000, 8090, 6379
RENDEZVOUS_PORT = 20000

# KubeRay 1.6 labels the pods of a replica that spans several hosts.
GROUP = "ray.io/group"
REPLICA_NAME = "ray.io/worker-group-replica-name"
REPLICA_INDEX = "ray.io/worker-group-replica-index"
HOST_INDEX = "ray.io/replica-host-index"

KEY_SECRET, KEY = "grpo-agents", "key"  # what the pods of a namespace share to move weights

HEAD, CONTROLLER, TRAINER, ROLLOUT = "head", "controller", "trainer", "rollout"


OWNER_LABELS = {"GRPOJob": JOB_LABEL, "RolloutPool": ROLLOUT_POOL_LABEL}


class Owner(NamedTuple):
    """The GRPOJob, or the RolloutPool without a job, to which children belong."""

    kind: str
    namespace: str
    name: str

    @property
    def label(self) -> dict[str, str]:
        """The label of every child."""
        return {OWNER_LABELS[self.kind]: self.name}

    def labels(self, pool: str) -> dict[str, str]:
        """Labels of a pod of one pool."""
        return self.label | {POOL_LABEL: pool}

    @property
    def rollout_service(self) -> str:
        """Headless service whose addresses are the engines' pods: named like the RolloutPool."""
        return rollout_pool(self.name) if self.kind == "GRPOJob" else self.name

    def engine_service(self, group: str, index: int) -> str:
        """Headless service of one engine's first host."""
        return f"{self.name}-{group}-{index}"


def owner_of(obj: dict[str, Any]) -> Owner:
    """A GRPOJob or RolloutPool object as owner."""
    return Owner(obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"])


def owner_in_labels(child: dict[str, Any]) -> Owner | None:
    """The owner that a child's labels name."""
    labels, namespace = child["metadata"].get("labels") or {}, child["metadata"].get("namespace", "")
    found = ((kind, labels[label]) for kind, label in OWNER_LABELS.items() if label in labels)
    return next((Owner(kind, namespace, name) for kind, name in found), None)


def leaf_group(leaf: str) -> str:
    """Worker group of the engines in one leaf: short, and always the same for that leaf."""
    return f"{ROLLOUT}-{hashlib.sha256(leaf.encode()).hexdigest()[:6]}"


def rollout_pool(job: str) -> str:
    """Name of the RolloutPool that a job owns."""
    return f"{job}-rollout"


def writer(job: dict[str, Any]) -> str:
    """What a job calls itself to the agents: unlike its name, never used again."""
    return f"{job['metadata']['name']}-{job['metadata']['uid'][:8]}"


def job_config(job: str) -> str:
    """ConfigMap with the job's configuration."""
    return f"{job}-job"


def owner_reference(owner: dict[str, Any]) -> dict[str, Any]:
    """Owner reference to a GRPOJob or RolloutPool object."""
    meta = owner["metadata"]
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
