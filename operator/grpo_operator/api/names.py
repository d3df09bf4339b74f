"""Names, labels and ports of the objects that belong to a GRPOJob or RolloutPool."""

import hashlib
from typing import Any, NamedTuple

JOB_LABEL = "rl.grpo.dev/job"
ROLLOUT_POOL_LABEL = "rl.grpo.dev/rolloutpool"  # on children of a RolloutPool without a job
POOL_LABEL = "rl.grpo.dev/pool"
HASH_ANNOTATION = "rl.grpo.dev/applied"
LEAVES_ANNOTATION = "rl.grpo.dev/leaves"
PARTS_ANNOTATION = "rl.grpo.dev/parts"  # on a RayCluster: what its pods run, and what that was made of
PROFILE_ANNOTATION = "rl.grpo.dev/profile"  # a user's request to profile the job
ACCEPTED_PROFILE = "rl.grpo.dev/profile-accepted"  # annotation: the last request that the operator has taken
FORGET_ANNOTATION = "rl.grpo.dev/forget-nodes"  # a new value makes the job use all nodes again
NODE_VARIABLE = "NODE_NAME"  # environment variable of training pods: the node that they run on
TLS_LABEL = "rl.grpo.dev/tls"  # on pods whose servers speak HTTPS
EXPORT_ANNOTATION = "rl.grpo.dev/export"  # a new value exports a checkpoint of the job
RESUME_ANNOTATION = "rl.grpo.dev/resume"  # a new value resumes a job that has failed
OWNER_UID = "rl.grpo.dev/owner-uid"  # annotation: a RayCluster may have no owner reference

# Ports inside the cluster. Ray exports its own metrics on 8080.
ENGINE_PORT, AGENT_PORT, CONTROLLER_PORT, GCS_PORT = 30000, 9000, 8090, 6379
RENDEZVOUS_PORT = 20000
OWN_VERSION = 0  # weight version of an engine that serves the weights of its own model
SOCKETS, SOCKETS_VARIABLE = "/run/grpo-operator", "GRPO_SOCKETS"  # folder of a node in which its pods meet

# Labels that KubeRay 1.6 puts on the pods of a replica that spans several hosts.
GROUP = "ray.io/group"
REPLICA_NAME = "ray.io/worker-group-replica-name"
REPLICA_INDEX = "ray.io/worker-group-replica-index"
HOST_INDEX = "ray.io/replica-host-index"

# Secrets of a namespace: the master key, which no pod mounts, and the epochs, which all pods mount.
MASTER_SECRET, EPOCH_SECRET = "grpo-agents", "grpo-agents-epoch"
KEY, PAIR_KEY, EPOCH = "key", "pair", "epoch"  # entries of Secrets
CERTIFICATE, PRIVATE_KEY, TRUSTED, GENERATE = (
    "tls.crt",
    "tls.key",
    "ca.crt",
    "generate",
)  # files of scheduling.tls
API_KEY, API_KEY_VARIABLE = "api-key", "GRPO_API_KEY_FILE"  # of a pool that serves: entry, and variable
ROTATE_ANNOTATION = "rl.grpo.dev/rotate"  # on the Secret with the epochs: begins a new one

STORE_MOUNT = "/store"  # of the checkpoint store in a job's pods
LOGS = "logs"  # folder of a job's folder in it, for the log files of its pods
ENGINE_LOG_VARIABLE = "GRPO_ENGINE_LOG"  # of engines: file in their pod for the lines that their agents keep
GOOGLE_KEY = "key.json"  # entry of the Secret for a store of gs://: the key of a service account
GOOGLE_KEY_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS_JSON"  # has that key in the containers with the store
STORE_FINALIZER = "rl.grpo.dev/store"  # of a job whose folder in the store is removed before it is gone

HEAD, CONTROLLER, TRAINER, ROLLOUT = "head", "controller", "trainer", "rollout"
STORE_REMOVAL = "store-removal"  # label of the pod that removes the folder of a deleted job
EXPORT = "export"  # label of the pods that export checkpoints


OWNER_LABELS = {"GRPOJob": JOB_LABEL, "RolloutPool": ROLLOUT_POOL_LABEL}


class Owner(NamedTuple):
    """Owner of child objects: a GRPOJob, or a RolloutPool without a job."""

    kind: str
    namespace: str
    name: str

    @property
    def label(self) -> dict[str, str]:
        """Return the label of every child."""
        return {OWNER_LABELS[self.kind]: self.name}

    def labels(self, pool: str) -> dict[str, str]:
        """Return the labels of a pod of one pool."""
        return self.label | {POOL_LABEL: pool}

    @property
    def rollout_service(self) -> str:
        """Return the name of the headless service of all engine pods, which is the RolloutPool's name."""
        return rollout_pool(self.name) if self.kind == "GRPOJob" else self.name

    @property
    def serve_service(self) -> str:
        """Return the name of the Service of the engines of a pool that serves its model."""
        return f"{self.name}-serve"

    @property
    def tls_name(self) -> str:
        """Return the name in the certificates of the pods; it is no name of any DNS."""
        return f"{self.name}.{self.namespace}.grpo"

    @property
    def text(self) -> str:
        """Return kind, namespace and name for messages."""
        return f"{self.kind} {self.namespace}/{self.name}"

    def engine_service(self, group: str, index: int) -> str:
        """Return the name of the headless service of one engine's first pod."""
        return f"{self.name}-{group}-{index}"


def owner_of(obj: dict[str, Any]) -> Owner:
    """Return the owner that a GRPOJob or RolloutPool object stands for."""
    return Owner(obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"])


def owner_in_labels(child: dict[str, Any]) -> Owner | None:
    """Return the owner named in a child's labels, or None."""
    labels, namespace = child["metadata"].get("labels") or {}, child["metadata"].get("namespace", "")
    for kind, label in OWNER_LABELS.items():
        if label in labels:
            return Owner(kind, namespace, labels[label])
    return None


def leaf_group(leaf: str) -> str:
    """Return the name of the Ray worker group of the engines in one network leaf; short and stable."""
    return f"{ROLLOUT}-{hashlib.sha256(leaf.encode()).hexdigest()[:6]}"


def rollout_pool(job: str) -> str:
    """Return the name of the RolloutPool that a job owns."""
    return f"{job}-rollout"


def writer(job: dict[str, Any]) -> str:
    """Return the identity of a job, as a writer of weights; unlike the name, it is never reused."""
    return f"{job['metadata']['name']}-{job['metadata']['uid'][:8]}"


def key_secret(owner: dict[str, Any]) -> str:
    """Return the name of the Secret with the key of a job, or of a pool without a job."""
    return f"{writer(owner)}-key"


def tls_secret(owner: dict[str, Any]) -> str:
    """Return the name of the Secret for the TLS of a job, or of a pool without a job."""
    return f"{writer(owner)}-tls"


def api_secret(pool: dict[str, Any]) -> str:
    """Return the name of the Secret with the API key of a pool that serves its model."""
    return f"{writer(pool)}-api"


def tls_config(owner: str) -> str:
    """Return the name of the ConfigMap with the certificates of a job, or of a pool without a job."""
    return f"{owner}-tls"


def job_store(namespace: str, writer: str) -> str:
    """Return the folder of a job in its store. ``writer``: identity of the job.

    It contains the uid, so a new job of the same name does not resume the old checkpoints.
    """
    return f"{STORE_MOUNT}/{namespace}-{writer}"


def in_bucket(uri: str, folder: str) -> str:
    """Return the URI of a job's folder. ``uri``: of its store. ``folder``: see ``job_store``."""
    return f"{uri.rstrip('/')}/{folder.rpartition('/')[2]}"


def store_removal(job: dict[str, Any]) -> str:
    """Return the name of the pod that removes the folder of a deleted job."""
    return f"{writer(job)}-{STORE_REMOVAL}"


def export_pod(job: dict[str, Any], request: str) -> str:
    """Return the name of the pod that exports a checkpoint, which is another one for each request."""
    return f"{writer(job)}-{EXPORT}-{hashlib.sha256(request.encode()).hexdigest()[:6]}"


def export_folder(folder: str, name: str) -> str:
    """Return the place of an export. ``folder``: directory or URI of the job in its store."""
    return f"{folder}/{EXPORT}/{name}"


def job_config(job: str) -> str:
    """Return the name of the ConfigMap with the job's configuration."""
    return f"{job}-job"


def owner_reference(owner: dict[str, Any]) -> dict[str, Any]:
    """Return an owner reference to a GRPOJob or RolloutPool object."""
    meta = owner["metadata"]
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
