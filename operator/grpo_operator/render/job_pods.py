"""Pod templates of a job's head, controller and training pool (pure)."""

import json
from dataclasses import dataclass
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.base import Device
from grpo_operator.api.names import CONTROLLER_PORT, GCS_PORT
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.weight_path import Backend, WeightPath
from grpo_operator.plan.capacity.pod_requests import job_head_resources
from grpo_operator.plan.capacity.topology import Leaves
from grpo_operator.render.fabric import connect
from grpo_operator.render.placement import (
    avoid_hosts,
    packed,
    prefer_apart_from,
    prefer_leaves,
    share_sockets,
)
from grpo_operator.render.pod_template import (
    PYTHON,
    START_RAY,
    PodParts,
    finished,
    stoppable,
)
from grpo_operator.render.rollout_pods import EnginePods
from grpo_operator.render.store import JobStore
from grpo_operator.render.volumes import fetch, job_files, model_files

# Ray lowers the priority of its workers by 15, but the ranks are the main processes of the pod.
_RANK_ENV = {"GRPO_WEIGHTS_DIR": "/weights", "RAY_worker_niceness": "0"}
# With one hardware queue, kernels of two streams would wait for each other.
_OVERLAP_ENV = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
# Names in KubeRay: it makes the Secret, which has the name of the cluster.
_TOKEN, _TOKEN_KEY = "RAY_AUTH_TOKEN", "auth_token"
# Waiting in the shell saves the start of a Python interpreter.
_WAIT_FOR_HEAD = f'until (exec 3<>"/dev/tcp/$FQ_RAY_IP/{GCS_PORT}") 2>/dev/null; do sleep 0.5; done; '
# A start that fails is repeated, not at the same time as those of other pods. After a raylet that ends later,
# as all do without a head, another one is started, because the pod's agent has copies of the state in memory.
# Starts that have failed for 15 minutes in a row end the container.
_RAY_NODE = (
    f"since=$SECONDS; while began=$SECONDS; {START_RAY}; rc=$?; ((rc)); do "
    "((SECONDS - began < 300)) || since=$SECONDS; ((SECONDS - since < 900)) || break; "
    "sleep $((1 + RANDOM % 10)); done"
)
# Process 1 of a container ignores SIGTERM without a handler. The ranks see the file and tell the controller,
# which saves the finished steps and ends them; then the pod ends, too. A pod without ranks ends at once.
_LEAVING = "/weights/leaving"
_RANK = "ray::TrainerWorker"  # with which the command line of a rank's process begins
_UNTIL_LEFT = (
    f"& ray=$!; wait $ray; rc=$?; [ -e {_LEAVING} ] || exit $rc; "
    f"while kill -0 $ray 2>/dev/null && grep -qsa '^{_RANK}' /proc/[0-9]*/cmdline; do sleep 0.2; done"
)


@dataclass(frozen=True, slots=True)
class JobPods:
    """Builds the PodTemplateSpecs of one job.

    ``writer``: identity of the job towards the engines' agents. ``path``: of weights into its own engines.
    ``failing``: hosts that training pods must not run on.
    """

    parts: PodParts
    spec: GRPOJobSpec
    leaves: Leaves
    writer: str
    path: WeightPath
    failing: tuple[str, ...] = ()

    def head(self) -> dict[str, Any]:
        spec = self.spec
        env = [_optional_token(self.parts.owner.name)] if spec.head.gcs_fault_tolerance else []
        resources, overlay = job_head_resources(spec), spec.head.pod_template
        return self.parts.head(self._image(), spec.controller, resources, overlay, env)

    def controller(self) -> dict[str, Any]:
        """Return the pod of the single controller: a Ray node without resources that runs the GRPO loop."""
        # The controller reads the job's files while Ray's head is still starting.
        main = stoppable(f"{PYTHON} -m grpo_worker.controller.main")
        start = f"({_WAIT_FOR_HEAD}{_RAY_NODE}; kill $$) & {main}"
        of = self.spec.controller
        container = self.parts.container("controller", self._image(), of.resources, command=start)
        self.parts.share_key(container)
        container["ports"] = [{"name": "status", "containerPort": CONTROLLER_PORT}]
        container["readinessProbe"] = self.parts.probe("/healthz", CONTROLLER_PORT, period=2, failures=3)
        container["livenessProbe"] = self.parts.liveness(CONTROLLER_PORT, failures=30)
        pod = self._with_files(self.parts.pod(names.CONTROLLER, [container], of, self.parts.off_gpus()))
        pod["spec"]["terminationGracePeriodSeconds"] = self.spec.restart_policy.grace_limit
        given = job_files(self.spec)
        for files in given:
            files.mount_into(pod, container)
        first = fetch(self.parts, self._image(), of.resources, given)
        if first:
            pod["spec"]["initContainers"].append(first)
        return finished(pod, of, self.parts.security)

    def trainer(self) -> dict[str, Any]:
        """Return one training pod: a Ray node for its ranks, and the agent that serves their weights."""
        trainer = self.spec.trainer
        gpus = trainer.gpus_per_node if trainer.device == Device.CUDA else 0
        command = f"trap ': > {_LEAVING}' TERM; ({_WAIT_FOR_HEAD}{_RAY_NODE}; exit $rc) {_UNTIL_LEFT}"
        env = self._rank_env()
        ranks = self.parts.container("ray-worker", self._image(), trainer.resources, gpus, env, command)
        if self.spec.algorithm.routing_replay:
            self.parts.share_key(ranks)  # ranks read the routed experts from the engines' agents
        node_name = {"fieldRef": {"fieldPath": "spec.nodeName"}}
        ranks["env"].append({"name": names.NODE_VARIABLE, "valueFrom": node_name})
        agent = self._trainer_agent(gpus > 0)
        for container in (ranks, agent):
            container["volumeMounts"].append({"name": "weights", "mountPath": "/weights"})
        pod = self.parts.pod(names.TRAINER, [ranks], trainer, self._trainer_affinity(gpus), gpus)
        self._with_files(pod)
        if gpus:
            connect(pod, self.parts.scheduling.rdma, self.parts.security.user == 0)
        avoid_hosts(pod["spec"], [*(self.parts.avoided if gpus else ()), *self.failing])
        if self.path.direct is Backend.CUDA_IPC:
            share_sockets(pod["spec"])
        pod["spec"]["volumes"].append({"name": "weights", "emptyDir": {"medium": "Memory"}})
        # A failed rank ends the pod, because the ranks restart as a gang anyway. A failed agent is restarted
        # in place: in a pod with restartPolicy Never, Kubernetes does that for sidecars only.
        pod["spec"]["restartPolicy"] = "Never"
        pod["spec"]["terminationGracePeriodSeconds"] = self.spec.restart_policy.grace_limit
        model = model_files(self.spec.model)
        if model:
            model.mount_into(pod, ranks)
            wait = model.wait(self.parts, self._image())
            pod["spec"]["initContainers"] += [wait] if wait else []
        pod["spec"]["initContainers"].append(agent | {"restartPolicy": "Always"})
        return finished(pod, trainer, self.parts.security)

    def _trainer_agent(self, gpus: bool) -> dict[str, Any]:
        store = None if self.spec.checkpoint.store.uri else self._store()
        arguments = f"trainer --logs {store.logs}" if store else "trainer"
        agent = self.parts.agent(self._image(), self.spec.trainer, arguments, gpus)
        if store:
            store.share_logs(agent)
        return agent

    def _rank_env(self) -> dict[str, str]:
        if not self.spec.trainer.moe.overlap_communication:
            return _RANK_ENV
        given = self.spec.scheduling.nccl_env
        return _RANK_ENV | {name: value for name, value in _OVERLAP_ENV.items() if name not in given}

    def engines(self) -> EnginePods:
        """Return the builder of the job's own engines. They read models and weight versions in the store."""
        return EnginePods(
            self.parts,
            self.spec.model.path,
            self.spec.weight_sync,
            self.path,
            self.writer,
            self.spec.mode == "colocated",
            model_files(self.spec.model),
            None if self.spec.checkpoint.store.uri else self._store(),
            self.spec.fills_engines_from_store,
        )

    def _trainer_affinity(self, gpus: int) -> dict[str, Any]:
        """Return the affinity: off the engines' nodes and reserved leaves, packed leaf by leaf."""
        if not gpus:
            return self.parts.off_gpus()
        owner, key = self.parts.owner, self.parts.scheduling.topology_key
        result = {} if self.spec.mode == "colocated" else prefer_apart_from(owner.labels(names.ROLLOUT))
        if key:
            result |= packed(owner.labels(names.TRAINER), key, hosts=1)
            result |= prefer_leaves(key, self.leaves)
        return result

    def _with_files(self, pod: dict[str, Any]) -> dict[str, Any]:
        config = {"name": "job", "configMap": {"name": names.job_config(self.parts.owner.name)}}
        store = self._store()
        pod["spec"].setdefault("volumes", []).extend([config, store.volume])
        pod["spec"]["initContainers"] = [store.prepare(self._image())]
        for container in pod["spec"]["containers"]:
            mounts = [{"name": "job", "mountPath": "/etc/grpo", "readOnly": True}, *store.mounts()]
            container["volumeMounts"] += mounts
            container["env"] += store.credentials()
        return pod

    def _store(self) -> JobStore:
        folder = names.job_store(self.parts.owner.namespace, self.writer)
        return JobStore(self.parts, self.spec, folder)

    def _image(self) -> str:
        return self.spec.image or self.parts.settings.trainer_image


def trainer_ray_resources(ranks: int) -> str:
    """Return the value of Ray's ``--resources`` that marks nodes of the training pool."""
    return json.dumps(json.dumps({"trainer": ranks}))


def _optional_token(cluster: str) -> dict[str, Any]:
    """Return the variable of Ray's token, with which a container starts without the token's Secret, too.

    KubeRay runs the head's container to remove a deleted cluster's keys from Redis. In a foreground deletion
    the Secret is gone by then, and with KubeRay's own variable the container would never start.
    """
    reference = {"name": cluster, "key": _TOKEN_KEY, "optional": True}
    return {"name": _TOKEN, "valueFrom": {"secretKeyRef": reference}}
