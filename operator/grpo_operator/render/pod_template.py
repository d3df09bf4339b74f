"""Common parts of all pods of a job or pool (pure): fields of PodTemplateSpecs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.base import Resources
from grpo_operator.api.names import AGENT_PORT, EPOCH, EPOCH_SECRET, KEY, MASTER_SECRET, PAIR_KEY, Owner
from grpo_operator.api.v1alpha1.grpojob import ControllerSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.api.v1alpha1.scheduling import PodOverlay, SchedulingSpec
from grpo_operator.api.v1alpha1.trainer import TrainerSpec
from grpo_operator.plan.capacity.feasibility import GPU
from grpo_operator.plan.capacity.pod_requests import agent_resources
from grpo_operator.render.overlay import merge
from grpo_operator.render.placement import (
    MANAGEMENT_ENV,
    prefer_off_gpu_nodes,
    prepare_for_nccl,
    shared_memory,
    tolerations,
)
from grpo_operator.render.pod_security import PodSecurity
from grpo_operator.render.tls import PodTls
from grpo_operator.settings import OperatorSettings

PYTHON = "python3"
# KubeRay's generated command contains ``ray start``, which is too impatient for busy nodes.
START_RAY = f'eval "${{KUBERAY_GEN_RAY_START_CMD/ray start/{PYTHON} -m grpo_worker.roles.ray_node}}"'
GRACE_SECONDS = 5  # of pods and processes that have nothing to save
_PROGRAMS = (names.STORE_REMOVAL, names.EXPORT)  # pods without Ray
_WITHOUT_SERVERS = (names.HEAD, *_PROGRAMS)  # pods that need neither keys nor certificates
_KEY_MOUNT = "/etc/grpo-key"
_Pool = ControllerSpec | TrainerSpec | RolloutTemplate
# Ray's GCS detects dead nodes within seconds.
_HEAD_ENV = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "5",
}


@dataclass(frozen=True, slots=True)
class PodParts:
    """Builder of the common parts of one owner's pods.

    ``gpu_cluster``: whether any pool uses GPUs. ``avoided``: hosts that pods with GPUs must not run on.
    ``sockets``: whether pods with GPUs share the folder of their node for sockets. ``key_secret``: name of
    the Secret with the owner's key. ``paired``: whether it has the key between a job and a shared pool, too.
    ``tls``: of the servers in the pods; None: they speak HTTP.
    """

    owner: Owner
    scheduling: SchedulingSpec
    settings: OperatorSettings
    gpu_cluster: bool
    key_secret: str
    avoided: tuple[str, ...] = ()
    sockets: bool = False
    paired: bool = False
    tls: PodTls | None = None

    @property
    def security(self) -> PodSecurity:
        """Return the security of the pods: one user for all, since they share the job's folder."""
        needs_root = self.sockets or self.scheduling.rdma is not None
        return PodSecurity(self.scheduling.security_context, needs_root)

    def head(
        self, image: str, of: ControllerSpec, resources: Resources, overlay: PodOverlay | None = None,
        env: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """Return the pod of Ray's head, which runs no actors. ``env``: further variables."""
        command = stoppable(f"({START_RAY})")
        container = self.container("ray-head", image, resources, env=_HEAD_ENV, command=command)
        container["env"] += env
        pod = self.security.hardened(self.pod(names.HEAD, [container], of, self.off_gpus()))
        return merge(pod, overlay.wire()) if overlay else pod

    def off_gpus(self) -> dict[str, Any]:
        """Return the affinity of pods without GPUs."""
        return prefer_off_gpu_nodes() if self.gpu_cluster else {}

    def agent(
        self, image: str, of: TrainerSpec | RolloutTemplate, arguments: str, gpus: bool
    ) -> dict[str, Any]:
        """Return the sidecar container that transfers weights. ``gpus``: it watches the node's GPUs, too."""
        command = stoppable(f"{PYTHON} -m grpo_worker.weightsync.main {arguments}")
        env = MANAGEMENT_ENV if gpus else {}
        agent = self.container("agent", image, agent_resources(of), env=env, command=command)
        self.share_key(agent)
        agent["ports"] = [{"name": "agent", "containerPort": AGENT_PORT}]
        # Enough time to import torch on a busy node.
        agent["livenessProbe"] = self.liveness(AGENT_PORT, failures=18)
        return agent

    def container(
        self, name: str, image: str, resources: Resources, gpus: int = 0,
        env: dict[str, str] | None = None, command: str = "",
    ) -> dict[str, Any]:  # fmt: skip
        requests = resources.requests() | ({GPU: str(gpus)} if gpus else {})
        limits = {name: amount for name, amount in requests.items() if name != "cpu"}
        values = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} if not gpus else {}
        variables = [{"name": k, "value": v} for k, v in (values | (env or {})).items()]
        pod_name = {"fieldRef": {"fieldPath": "metadata.name"}}
        overlay = self.settings.pod_overlay
        container = {
            "name": name,
            "image": image,
            "imagePullPolicy": self.settings.image_pull_policy,
            "resources": {"requests": requests, "limits": limits},
            "env": [*variables, {"name": "POD_NAME", "valueFrom": pod_name}, *overlay.get("env", [])],
            "volumeMounts": list(overlay.get("volumeMounts", [])),
            # The pod's status then has the last output of a failed container, and the job's status quotes it.
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
        if command:
            container |= {"command": ["/bin/bash", "-c"], "args": [command]}
        return container

    def pod(
        self, pool: str, containers: list[dict[str, Any]], of: _Pool, affinity: dict[str, Any], gpus: int = 0
    ) -> dict[str, Any]:
        """Return the PodTemplateSpec of one pool; its first container is the one that uses ``gpus``."""
        scheduling = self.scheduling
        volumes = list(self.settings.pod_overlay.get("volumes", []))
        if pool not in _WITHOUT_SERVERS:
            volumes.append({"name": "key"} | self._key_source())
            volumes += [self.tls.volume()] if self.tls else []
        spec: dict[str, Any] = {
            "containers": containers,
            "volumes": volumes,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "tolerations": tolerations(scheduling, of),
            "affinity": affinity,
            "nodeSelector": of.node_selector,
            "priorityClassName": scheduling.priority_class_name,
            "runtimeClassName": scheduling.runtime_class_name if gpus else None,
            "imagePullSecrets": [{"name": name} for name in scheduling.image_pull_secrets],
        }
        if gpus:
            prepare_for_nccl(containers[0], scheduling)
            volumes.append(shared_memory(scheduling))
        overwrite = {} if pool in _PROGRAMS else {"ray.io/overwrite-container-cmd": "true"}
        return {
            "metadata": {"labels": self._labels(pool), "annotations": overwrite},
            "spec": {key: value for key, value in spec.items() if value or value is False},
        }

    def _labels(self, pool: str) -> dict[str, str]:
        serves_tls = self.tls is not None and pool not in _WITHOUT_SERVERS
        return self.owner.labels(pool) | ({names.TLS_LABEL: "enabled"} if serves_tls else {})

    def share_tls(self, container: dict[str, Any]) -> None:
        """Mount the owner's certificates into a container, if it has any."""
        if self.tls is not None:
            self.tls.share(container)

    def share_key(self, container: dict[str, Any]) -> None:
        """Mount the owner's key into a container, and its certificates, if it has any."""
        self.share_tls(container)
        files = {"GRPO_KEY_FILE": KEY}
        if self.settings.key_scope == "owner":
            files |= {"GRPO_EPOCH_FILE": EPOCH} | ({"GRPO_PAIR_KEY_FILE": PAIR_KEY} if self.paired else {})
        container["env"] += [{"name": name, "value": f"{_KEY_MOUNT}/{file}"} for name, file in files.items()]
        container["volumeMounts"].append({"name": "key", "mountPath": _KEY_MOUNT, "readOnly": True})

    def liveness(self, port: int, *, failures: int) -> dict[str, Any]:
        """Return a liveness probe every ten seconds. A process that does not answer saves nothing."""
        asked = self.probe("/healthz", port, period=10, failures=failures)
        return asked | {"terminationGracePeriodSeconds": GRACE_SECONDS}

    def probe(self, path: str, port: int, *, period: int, failures: int) -> dict[str, Any]:
        """Return an HTTP probe, for which kubelet verifies no certificate.

        ``period``: seconds. ``failures``: failureThreshold.
        """
        return {
            "httpGet": {"path": path, "port": port} | ({"scheme": "HTTPS"} if self.tls else {}),
            "periodSeconds": period,
            "timeoutSeconds": 5,
            "failureThreshold": failures,
        }

    def _key_source(self) -> dict[str, Any]:
        if self.settings.key_scope == "namespace":
            return {"secret": {"secretName": MASTER_SECRET}}
        sources = [{"secret": {"name": name}} for name in (self.key_secret, EPOCH_SECRET)]
        return {"projected": {"sources": sources}}


def finished(pod: dict[str, Any], of: _Pool, security: PodSecurity) -> dict[str, Any]:
    """Return the pod template with its security contexts, merged with the pool's ``podTemplate`` overlay."""
    hardened = security.hardened(pod)
    return merge(hardened, of.pod_template.wire()) if of.pod_template else hardened


def stoppable(command: str) -> str:
    """Return a shell command that runs another one so that SIGTERM ends it.

    Process 1 of a container ignores signals until it has handlers, and a pod may have a long grace.
    """
    wait = "until wait $main; rc=$?; ! kill -0 $main 2>/dev/null; do :; done; exit $rc"
    trap = "trap 'stop=1; ${main:+kill $main}' TERM"  # before there is anything to end
    return f"main=; stop=; {trap}; {command} & main=$!; ${{stop:+kill $main}}; {wait}"
