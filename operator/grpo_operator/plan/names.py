"""Names and labels of everything that belongs to a job."""

import hashlib

JOB_LABEL = "rl.grpo.dev/job"
POOL_LABEL = "rl.grpo.dev/pool"
HASH_ANNOTATION = "rl.grpo.dev/applied"
LEAVES_ANNOTATION = "rl.grpo.dev/leaves"

# Ports inside the cluster. 8080 is taken: there Ray itself exports metrics.
ENGINE_PORT, AGENT_PORT, CONTROLLER_PORT, GCS_PORT = 30000, 9000, 8090, 6379
RENDEZVOUS_PORT = 20000

# KubeRay 1.6 labels the pods of a replica that spans several hosts.
GROUP = "ray.io/group"
REPLICA_NAME = "ray.io/worker-group-replica-name"
REPLICA_INDEX = "ray.io/worker-group-replica-index"
HOST_INDEX = "ray.io/replica-host-index"

HEAD, CONTROLLER, TRAINER, ROLLOUT = "head", "controller", "trainer", "rollout"


def labels(job: str, pool: str) -> dict[str, str]:
    """Labels of a pod of one pool."""
    return {JOB_LABEL: job, POOL_LABEL: pool}


def rollout_service(job: str) -> str:
    """Headless service whose addresses are the engines' pods."""
    return f"{job}-rollout"


def engine_service(job: str, group: str, index: int) -> str:
    """Headless service of one engine's first host."""
    return f"{job}-{group}-{index}"


def leaf_group(leaf: str) -> str:
    """Worker group of the engines in one leaf: short, and always the same for that leaf."""
    return f"{ROLLOUT}-{hashlib.sha256(leaf.encode()).hexdigest()[:6]}"


def rollout_pool(job: str) -> str:
    """Name of the RolloutPool that a job owns."""
    return f"{job}-rollout"


def job_config(job: str) -> str:
    """ConfigMap with the job's configuration."""
    return f"{job}-job"


def owner_reference(job: dict[str, object]) -> dict[str, object]:
    """Owner reference to a GRPOJob or RolloutPool object."""
    meta = job["metadata"]
    assert isinstance(meta, dict)
    return {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
