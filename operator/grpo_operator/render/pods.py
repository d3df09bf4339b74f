"""Pod templates of the four groups (pure)."""

import json
from typing import Any

from grpo_operator.api.base import Device, Resources
from grpo_operator.api.grpojob import ControllerSpec, GRPOJobSpec, TrainerSpec
from grpo_operator.api.rolloutpool import RolloutPoolSpec
from grpo_operator.plan import names
from grpo_operator.plan.feasibility import GPU
from grpo_operator.plan.names import AGENT_PORT, CONTROLLER_PORT, ENGINE_PORT, GCS_PORT
from grpo_operator.plan.needs import AGENT_RESOURCES, HEAD_RESOURCES
from grpo_operator.plan.topology import Leaves
from grpo_operator.render.engine import CPU_ENGINE_ENV, engine_command
from grpo_operator.render.merge import merge
from grpo_operator.render.placement import add_devices, affinity, bind_to_leaf, shared_memory, tolerations
from grpo_operator.render.settings import OperatorSettings

STORE_MOUNT = "/store"
# Ray lowers the priority of its workers by 15; the ranks are what the pod is for.
RANK_ENV = {"GRPO_WEIGHTS_DIR": "/weights", "RAY_worker_niceness": "0"}
_PYTHON = "python3"

# KubeRay's generated command starts Ray; waiting by hand costs no interpreter start.
_WAIT_FOR_HEAD = f'until (exec 3<>"/dev/tcp/$FQ_RAY_IP/{GCS_PORT}") 2>/dev/null; do sleep 0.5; done; '
_START_RAY = 'eval "$KUBERAY_GEN_RAY_START_CMD"'


_Pool = ControllerSpec | TrainerSpec | RolloutPoolSpec


class PodBuilder:
    """Builds PodTemplateSpecs of one job."""

    def __init__(self, job: str, spec: GRPOJobSpec, settings: OperatorSettings, leaves: Leaves) -> None:
        self._leaves = leaves
        self._job = job
        self._spec = spec
        self._settings = settings

    def head(self) -> dict[str, Any]:
        """Ray's head. It schedules nothing; GCS learns of dead nodes within seconds."""
        env = {
            "RAY_health_check_initial_delay_ms": "5000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "5000",
            "RAY_health_check_failure_threshold": "5",
        }
        container = self._container("ray-head", self._trainer_image(), HEAD_RESOURCES, env=env)
        return self._pod(names.HEAD, [container], self._spec.controller, job_files=False)

    def controller(self) -> dict[str, Any]:
        """The single controller: a Ray node without resources that runs the GRPO loop."""
        start = f"{_WAIT_FOR_HEAD}{_START_RAY} & exec {_PYTHON} -m grpo_worker.controller.main"
        container = self._container(
            "controller", self._trainer_image(), self._spec.controller.resources, command=start
        )
        container["ports"] = [{"name": "status", "containerPort": CONTROLLER_PORT}]
        container["readinessProbe"] = _probe("/healthz", CONTROLLER_PORT, period=2, failures=3)
        container["livenessProbe"] = _probe("/healthz", CONTROLLER_PORT, period=10, failures=30)
        pod = self._pod(names.CONTROLLER, [container], self._spec.controller)
        return self._overlaid(pod, self._spec.controller)

    def trainer(self) -> dict[str, Any]:
        """One training pod: a Ray node for its ranks, and the agent that serves their weights."""
        trainer = self._spec.trainer
        gpus = trainer.gpus_per_node if trainer.device == Device.CUDA else 0
        ranks = self._container(
            "ray-worker", self._trainer_image(), trainer.resources, gpus, RANK_ENV,
            _WAIT_FOR_HEAD + "exec bash -c " + "'" + _START_RAY + "'",
        )  # fmt: skip
        agent = self._agent(self._trainer_image(), "trainer")
        for container in (ranks, agent):
            container["volumeMounts"].append({"name": "weights", "mountPath": "/weights"})
        pod = self._pod(names.TRAINER, [ranks, agent], trainer, gpus)
        memory = {"name": "weights", "emptyDir": {"medium": "Memory"}}
        pod["spec"]["volumes"].append(memory)
        # A dead training pod is replaced, not repaired: its ranks restart as a gang anyway.
        pod["spec"]["restartPolicy"] = "Never"
        return self._overlaid(pod, trainer)

    def rollout(self, pool: RolloutPoolSpec, leaf: str | None = None) -> dict[str, Any]:
        """One pod of an engine: a stock SGLang server, restarted in place, and its weight agent.

        ``leaf``: the leaf that the pod must be in.
        """
        engine = pool.engine
        gpus = engine.gpus_per_node if engine.device == Device.CUDA else 0
        image = pool.image or self._settings.rollout_image
        env = CPU_ENGINE_ENV if not gpus else {}
        server = self._container(
            "engine", image, pool.resources, gpus, env, engine_command(self._job, self._spec.model.path, pool)
        )
        server["ports"] = [{"name": "http", "containerPort": ENGINE_PORT}]
        server["startupProbe"] = _probe("/ping", ENGINE_PORT, period=2, failures=900)
        server["readinessProbe"] = _probe("/ping", ENGINE_PORT, period=5, failures=3)
        server["livenessProbe"] = _probe("/ping", ENGINE_PORT, period=10, failures=12)
        arguments = (
            f"rollout --engine-ranks {engine.tensor_parallel}"
            f" --bucket-megabytes {self._spec.weight_sync.bucket_megabytes}"
            f" --timeout {self._spec.weight_sync.timeout_seconds}"
        )
        agent = self._agent(image, arguments)
        # Ready means: serves the pool's version. A sync is shorter than two looks.
        agent["readinessProbe"] = _probe("/readyz", AGENT_PORT, period=2, failures=2)
        if engine.nodes_per_engine > 1:
            for container in (server, agent):
                container["env"] += _host_env()
        pod = self._pod(names.ROLLOUT, [server, agent], pool, gpus, engine.nodes_per_engine)
        if leaf and self._spec.scheduling.topology_key:
            bind_to_leaf(pod["spec"], self._spec.scheduling.topology_key, leaf)
        return self._overlaid(pod, pool)

    def _agent(self, image: str, arguments: str) -> dict[str, Any]:
        command = f"exec {_PYTHON} -m grpo_worker.weightsync.main {arguments}"
        agent = self._container("agent", image, AGENT_RESOURCES, command=command)
        agent["ports"] = [{"name": "agent", "containerPort": AGENT_PORT}]
        agent["livenessProbe"] = _probe("/healthz", AGENT_PORT, period=10, failures=6)
        return agent

    def _container(
        self, name: str, image: str, resources: Resources, gpus: int = 0,
        env: dict[str, str] | None = None, command: str = "",
    ) -> dict[str, Any]:  # fmt: skip
        limits = {"memory": resources.memory} | ({GPU: str(gpus)} if gpus else {})
        values = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} if not gpus else {}
        variables = [{"name": k, "value": v} for k, v in (values | (env or {})).items()]
        pod_name = {"fieldRef": {"fieldPath": "metadata.name"}}
        overlay = self._settings.pod_overlay
        container = {
            "name": name,
            "image": image,
            "imagePullPolicy": self._settings.image_pull_policy,
            "resources": {"requests": limits | {"cpu": resources.cpu}, "limits": limits},
            "env": [*variables, {"name": "POD_NAME", "valueFrom": pod_name}, *overlay.get("env", [])],
            "volumeMounts": list(overlay.get("volumeMounts", [])),
        }
        if command:
            container |= {"command": ["/bin/bash", "-c"], "args": [command]}
        return container

    def _pod(
        self, pool: str, containers: list[dict[str, Any]], of: _Pool, gpus: int = 0, hosts: int = 1,
        job_files: bool = True,
    ) -> dict[str, Any]:  # fmt: skip
        scheduling = self._spec.scheduling
        volumes = list(self._settings.pod_overlay.get("volumes", []))
        if job_files:
            volumes += [{"name": "job", "configMap": {"name": names.job_config(self._job)}}, self._store()]
            mounts = [
                {"name": "job", "mountPath": "/etc/grpo", "readOnly": True},
                {"name": "store", "mountPath": STORE_MOUNT},
            ]
            for container in containers:
                container["volumeMounts"].extend(mounts)
        spec: dict[str, Any] = {
            "containers": containers,
            "volumes": volumes,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 5,
            "tolerations": tolerations(scheduling, of.eviction_seconds),
            "affinity": affinity(self._job, pool, self._spec, gpus, hosts, self._leaves),
            "nodeSelector": of.node_selector,
            "priorityClassName": scheduling.priority_class_name,
            "runtimeClassName": scheduling.runtime_class_name if gpus else None,
            "imagePullSecrets": [{"name": name} for name in scheduling.image_pull_secrets],
        }
        if gpus:
            add_devices(containers[0], scheduling)
            volumes.append(shared_memory(scheduling))
        overwrite = {} if pool == names.HEAD else {"ray.io/overwrite-container-cmd": "true"}
        return {
            "metadata": {"labels": names.labels(self._job, pool), "annotations": overwrite},
            "spec": {key: value for key, value in spec.items() if value or value is False},
        }

    def _overlaid(self, pod: dict[str, Any], of: _Pool) -> dict[str, Any]:
        return merge(pod, of.pod_template.wire()) if of.pod_template else pod

    def _store(self) -> dict[str, Any]:
        store = self._spec.checkpoint.store
        if store.pvc:
            return {"name": "store", "persistentVolumeClaim": {"claimName": store.pvc}}
        return {"name": "store", "hostPath": {"path": store.path, "type": "DirectoryOrCreate"}}

    def _trainer_image(self) -> str:
        return self._spec.image or self._settings.trainer_image


def _host_env() -> list[dict[str, Any]]:
    """Which engine, and which of its hosts, this pod is."""
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}
        for name, label in (
            ("GROUP", names.GROUP),
            ("REPLICA_INDEX", names.REPLICA_INDEX),
            ("HOST_INDEX", names.HOST_INDEX),
        )
    ]


def _probe(path: str, port: int, *, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def trainer_ray_resources(ranks: int) -> str:
    """Value of Ray's ``--resources``: what makes the training pool a pool of its own."""
    return json.dumps(json.dumps({"trainer": ranks}))
