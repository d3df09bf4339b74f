"""Pod templates of a job's head, controller and training pool (pure)."""

import json
from dataclasses import dataclass
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.base import Device
from grpo_operator.api.names import CONTROLLER_PORT, GCS_PORT
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.plan.capacity.topology import Leaves
from grpo_operator.render.placement import apart_from, open_to_neighbours, packed, prefer_leaves
from grpo_operator.render.pod_template import PYTHON, PodParts, overlaid, probe, share_key
from grpo_operator.render.rollout_pods import EnginePods
from grpo_operator.render.volumes import STORE_MOUNT, fetch, job_files, model_files

# Ray lowers the priority of its workers by 15; the ranks are what the pod is for.
_RANK_ENV = {"GRPO_WEIGHTS_DIR": "/weights", "RAY_worker_niceness": "0"}
# KubeRay's generated command starts Ray; waiting by hand costs no interpreter start.
_WAIT_FOR_HEAD = f'until (exec 3<>"/dev/tcp/$FQ_RAY_IP/{GCS_PORT}") 2>/dev/null; do sleep 0.5; done; '
# Ray gives its own raylet 30 seconds to start, which a busy node does not always have, and gives up. A
# raylet that dies later is another matter: it ends the pod.
_START_RAY = (
    'while eval "$KUBERAY_GEN_RAY_START_CMD"; rc=$?; ((rc && SECONDS < 300)); do sleep 1; done; exit $rc'
)


@dataclass(frozen=True, slots=True)
class JobPods:
    """Builds the PodTemplateSpecs of one job. ``writer``: what the job calls itself to the agents."""

    parts: PodParts
    spec: GRPOJobSpec
    leaves: Leaves
    writer: str

    def head(self) -> dict[str, Any]:
        return self.parts.head(self._image(), self.spec.controller)

    def controller(self) -> dict[str, Any]:
        """The single controller: a Ray node without resources that runs the GRPO loop."""
        # The controller reads the job's files while Ray's head is still on its way.
        start = f"({_WAIT_FOR_HEAD}{_START_RAY}) & exec {PYTHON} -m grpo_worker.controller.main"
        of = self.spec.controller
        container = self.parts.container("controller", self._image(), of.resources, command=start)
        share_key(container)
        container["ports"] = [{"name": "status", "containerPort": CONTROLLER_PORT}]
        container["readinessProbe"] = probe("/healthz", CONTROLLER_PORT, period=2, failures=3)
        container["livenessProbe"] = probe("/healthz", CONTROLLER_PORT, period=10, failures=30)
        pod = self._with_files(self.parts.pod(names.CONTROLLER, [container], of, self.parts.off_gpus()))
        given = job_files(self.spec)
        for files in given:
            files.mount_into(pod, container)
        first = fetch(self.parts, self._image(), of.resources, given)
        if first:
            pod["spec"]["initContainers"] = [first]
        return overlaid(pod, of)

    def trainer(self) -> dict[str, Any]:
        """One training pod: a Ray node for its ranks, and the agent that serves their weights."""
        trainer = self.spec.trainer
        gpus = trainer.gpus_per_node if trainer.device == Device.CUDA else 0
        command = _WAIT_FOR_HEAD + _START_RAY
        ranks = self.parts.container("ray-worker", self._image(), trainer.resources, gpus, _RANK_ENV, command)
        agent = self.parts.agent(self._image(), "trainer")
        for container in (ranks, agent):
            container["volumeMounts"].append({"name": "weights", "mountPath": "/weights"})
        pod = self.parts.pod(names.TRAINER, [ranks], trainer, self._trainer_affinity(gpus), gpus)
        self._with_files(pod)
        if self.spec.weight_sync.transport == "cuda-ipc":
            open_to_neighbours(pod["spec"])
        pod["spec"]["volumes"].append({"name": "weights", "emptyDir": {"medium": "Memory"}})
        # Dead ranks cost the pod, since they restart as a gang anyway. A dead agent is repaired in its
        # place, which of a pod that is never restarted holds for sidecars alone.
        pod["spec"]["restartPolicy"] = "Never"
        pod["spec"]["initContainers"] = [agent | {"restartPolicy": "Always"}]
        model = model_files(self.spec.model)
        if model:
            model.mount_into(pod, ranks)
            wait = model.wait(self.parts, self._image())
            pod["spec"]["initContainers"][:0] = [wait] if wait else []
        return overlaid(pod, trainer)

    def engines(self) -> EnginePods:
        """The engines of the job's own pool; models may lie in the job's store."""
        mounts = ((self._store(), {"name": "store", "mountPath": STORE_MOUNT}),)
        colocated = self.spec.mode == "colocated"
        return EnginePods(
            self.parts,
            self.spec.model.path,
            self.spec.weight_sync,
            self.writer,
            mounts,
            colocated,
            model_files(self.spec.model),
        )

    def _trainer_affinity(self, gpus: int) -> dict[str, Any]:
        """Off the engines' nodes, packed leaf by leaf, out of the leaves that engines need whole."""
        if not gpus:
            return self.parts.off_gpus()
        owner, key = self.parts.owner, self.parts.scheduling.topology_key
        result = {} if self.spec.mode == "colocated" else apart_from(owner.labels(names.ROLLOUT))
        if key:
            result |= packed(owner.labels(names.TRAINER), key, hosts=1)
            result |= prefer_leaves(key, self.leaves)
        return result

    def _with_files(self, pod: dict[str, Any]) -> dict[str, Any]:
        config = {"name": "job", "configMap": {"name": names.job_config(self.parts.owner.name)}}
        pod["spec"].setdefault("volumes", []).extend([config, self._store()])
        for container in pod["spec"]["containers"]:
            container["volumeMounts"] += [
                {"name": "job", "mountPath": "/etc/grpo", "readOnly": True},
                {"name": "store", "mountPath": STORE_MOUNT},
            ]
        return pod

    def _store(self) -> dict[str, Any]:
        store = self.spec.checkpoint.store
        if store.pvc:
            return {"name": "store", "persistentVolumeClaim": {"claimName": store.pvc}}
        return {"name": "store", "hostPath": {"path": store.path, "type": "DirectoryOrCreate"}}

    def _image(self) -> str:
        return self.spec.image or self.parts.settings.trainer_image


def trainer_ray_resources(ranks: int) -> str:
    """Value of Ray's ``--resources``: what makes the training pool a pool of its own."""
    return json.dumps(json.dumps({"trainer": ranks}))
