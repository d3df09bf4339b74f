"""Pod templates of engines, in the RayCluster of a job or of a pool without a job (pure)."""

from dataclasses import dataclass
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.base import Device
from grpo_operator.api.names import AGENT_PORT, ENGINE_PORT
from grpo_operator.api.urls import pod_url
from grpo_operator.api.v1alpha1.model import WeightSyncSpec
from grpo_operator.api.v1alpha1.rolloutpool import EngineSpec, RolloutTemplate
from grpo_operator.api.weight_path import Backend, WeightPath
from grpo_operator.plan.serving import Serving
from grpo_operator.render.fabric import connect
from grpo_operator.render.placement import (
    avoid_hosts,
    beside,
    bind_to_leaf,
    packed,
    prefer_apart_from,
    see_all_gpus,
    share_sockets,
)
from grpo_operator.render.pod_template import PodParts, finished
from grpo_operator.render.serving import share_api_key
from grpo_operator.render.sglang_command import (
    ADMIN_KEY,
    API_KEY_COPY,
    ENGINE_LOG,
    KEYED_ENGINE_ENV,
    MODEL_DIRECTORY,
    ROUTED_EXPERTS,
    SERVING_ENV,
    TURNS,
    WRITER,
    cpu_engine_env,
    engine_command,
    serving_command,
)
from grpo_operator.render.store import JobStore
from grpo_operator.render.volumes import Files

_START_PERIOD = 2  # seconds between two probes of a server that starts


@dataclass(frozen=True, slots=True)
class EnginePods:
    """Builds the pods of one owner's engines.

    ``weight_path``: path of new weights into the engines.
    ``writer``: the only job that may write weights; None: the operator names the writer to the agents later.
    ``colocated``: the engines run beside the job's training pods and share their GPUs.
    ``model``: volume from which the server reads the model's configuration.
    ``store``: of the job. ``fill``: agents fill engines from it that nobody else can fill.
    ``serving``: the servers load the model's own weights and serve them; None: they wait for those of a job.
    """

    parts: PodParts
    model_path: str
    weight_sync: WeightSyncSpec
    weight_path: WeightPath
    writer: str | None = None
    colocated: bool = False
    model: Files | None = None
    store: JobStore | None = None
    fill: bool = False
    serving: Serving | None = None

    def pod(self, pool: RolloutTemplate, leaf: str | None = None) -> dict[str, Any]:
        """Return one pod of an engine: a stock SGLang server, restarted in place, and its weight agent.

        ``leaf``: network leaf in which the pod must run.
        """
        engine, parts = pool.engine, self.parts
        gpus = engine.gpus_per_node if engine.device == Device.CUDA else 0
        containers = [self._server(pool, gpus), self._agent(pool)]
        if engine.nodes_per_engine > 1:
            for container in containers:
                container["env"] += _host_env()
        pod = parts.pod(names.ROLLOUT, containers, pool, self._affinity(pool, gpus), gpus)
        if gpus and self.colocated:
            see_all_gpus(containers[0])  # and no fabric: each engine stays within its host
        elif gpus:
            connect(pod, parts.scheduling.rdma, parts.security.user == 0)
        if self.weight_path.direct is Backend.CUDA_IPC:
            share_sockets(pod["spec"])
        shared = ({"name": "model", "emptyDir": {}}, {"name": "model", "mountPath": MODEL_DIRECTORY})
        experts = [_expert_memory(pool.engine)] if pool.engine.return_routed_experts else []
        if experts:
            containers[0]["env"] += _expert_env(parts.tls is not None)
        for volume, mount in (shared, *experts):
            pod["spec"].setdefault("volumes", []).append(volume)
            for container in containers:
                container["volumeMounts"].append(mount)
        if self.serving:
            share_api_key(pod, self.serving)
        self._mount_files(pod, self._image(pool))
        key = parts.scheduling.topology_key
        if leaf and key:
            bind_to_leaf(pod["spec"], key, leaf)
        if pool.engine.device == Device.CUDA:
            avoid_hosts(pod["spec"], parts.avoided)
        return finished(pod, pool, parts.security)

    def _mount_files(self, pod: dict[str, Any], image: str) -> None:
        containers = pod["spec"]["containers"]
        first = []
        if self.store:
            pod["spec"]["volumes"].append(self.store.volume)
            first.append(self.store.prepare(image))
            for container in containers:
                container["volumeMounts"] += self.store.mounts(read_only=True)
            self.store.share_logs(containers[1])
        if self.model:
            self.model.mount_into(pod, containers[0])
            wait = self.model.wait(self.parts, image)
            first += [wait] if wait else []
        if first:
            pod["spec"]["initContainers"] = first

    def _affinity(self, pool: RolloutTemplate, gpus: int) -> dict[str, Any]:
        """Return the affinity: off the trainers' nodes, packed leaf by leaf, each engine within one leaf."""
        owner, key = self.parts.owner, self.parts.scheduling.topology_key
        if self.colocated:
            return beside(owner.labels(names.TRAINER), owner.labels(names.ROLLOUT) if gpus else None)
        if not gpus:
            return self.parts.off_gpus()
        result = prefer_apart_from(owner.labels(names.TRAINER)) if owner.kind == "GRPOJob" else {}
        if not key:
            return result
        return result | packed(owner.labels(names.ROLLOUT), key, pool.engine.nodes_per_engine)

    def _server(self, pool: RolloutTemplate, gpus: int) -> dict[str, Any]:
        tls, several = self.parts.tls is not None, pool.engine.nodes_per_engine > 1
        keyed = tls or self.serving is not None
        env = (cpu_engine_env(pool.engine) if not gpus else {}) | (KEYED_ENGINE_ENV if keyed else {})
        if self.serving:
            command = serving_command(self.model_path, pool, self.serving.name, tls)
            env |= SERVING_ENV
        else:
            command = engine_command(self.model_path, pool, self.colocated and gpus > 0, tls)
        if self.store:
            env |= {names.ENGINE_LOG_VARIABLE: ENGINE_LOG}
        server = self.parts.container("engine", self._image(pool), pool.resources, gpus, env, command)
        self.parts.share_tls(server)
        server["ports"] = [{"name": "http", "containerPort": ENGINE_PORT}]
        # A server of several hosts may wait for them; its agent counts the time from when all are there.
        own, of_agent = ("/health" if keyed else "/ping", ENGINE_PORT), ("/enginez", AGENT_PORT)
        server["startupProbe"] = self.parts.probe(
            *(of_agent if several else own),
            period=_START_PERIOD,
            failures=-(-pool.engine.start_seconds // _START_PERIOD),
        )
        # The server of a further host does not know TLS.
        server["readinessProbe"] = self.parts.probe(
            *(of_agent if several and tls else own), period=5, failures=3
        )
        # The agent answers this probe, because the server also answers while its scheduler hangs. Twelve
        # failures leave enough time to restart the agent.
        server["livenessProbe"] = self.parts.probe(*of_agent, period=10, failures=12)
        return server

    def _agent(self, pool: RolloutTemplate) -> dict[str, Any]:
        arguments = (
            f"rollout --engine-ranks {pool.engine.tensor_parallel}"
            f" --bucket-megabytes {self.weight_sync.bucket_megabytes}"
            f" --timeout {self.weight_sync.patience}"
            f" --start-seconds {pool.engine.start_seconds}"
            f" --model-config {MODEL_DIRECTORY}/config.json --admin-key {ADMIN_KEY}"
        )
        arguments += (
            f" --own-weights --api-key {API_KEY_COPY}" if self.serving else f" --writer-file {WRITER}"
        )
        if self.weight_path.delta:
            arguments += " --deltas"
        if self.weight_path.staged == "nixl":
            arguments += " --nixl"
        if pool.engine.double_buffer:
            arguments += " --double-buffer"
        if self.colocated and pool.engine.device == Device.CUDA:
            arguments += f" --turns {TURNS}"
        # Colocated engines have no weights while their trainers compute.
        if not self.colocated and not self.serving:
            arguments += f" --peers {self.parts.owner.rollout_service}"
        if self.store:
            arguments += f" --logs {self.store.logs} --engine-log {ENGINE_LOG}"
        if self.store and self.fill:
            arguments += f" --store {self.store.folder}"
        if pool.engine.return_routed_experts:
            arguments += f" --routed-experts {ROUTED_EXPERTS}"
        if self.writer:
            arguments += f" --writer {self.writer}"
        if pool.engine.nodes_per_engine > 1:
            first = f"{self.parts.owner.name}-$GROUP-$REPLICA_INDEX"  # Owner.engine_service
            arguments += f' --hosts {pool.engine.nodes_per_engine} --host-index "$HOST_INDEX"'
            url = pod_url(first, AGENT_PORT, tls=self.parts.tls is not None)
            arguments += f' --first-host "{url}" --address "$POD_IP"'
        gpus = pool.engine.device == Device.CUDA
        agent = self.parts.agent(self._image(pool), pool, arguments, gpus)
        # Ready means that the engine serves the pool's version. Two failures: one update is no reason for
        # unreadiness, and it is shorter than two periods.
        agent["readinessProbe"] = self.parts.probe("/readyz", AGENT_PORT, period=2, failures=2)
        return agent

    def _image(self, pool: RolloutTemplate) -> str:
        return pool.image or self.parts.settings.rollout_image


def _expert_memory(engine: EngineSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the volume for routed experts, and its mount."""
    size = engine.routed_experts_gibibytes
    memory = {"medium": "Memory"} | ({"sizeLimit": f"{size}Gi"} if size else {})
    mount = {"name": "routed-experts", "mountPath": ROUTED_EXPERTS}
    return {"name": "routed-experts", "emptyDir": memory}, mount


def _expert_env(tls: bool) -> list[dict[str, Any]]:
    """Return the environment variables by which the engine refers to routed experts in its pod."""
    return [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "GRPO_ROUTED_EXPERTS", "value": ROUTED_EXPERTS},
        {"name": "GRPO_ROUTED_EXPERTS_URL", "value": pod_url("$(POD_IP)", AGENT_PORT, tls=tls)},
    ]


def _host_env() -> list[dict[str, Any]]:
    """Return the environment variables that name the pod's engine, its host within it, and its address."""
    labels = {"GROUP": names.GROUP, "REPLICA_INDEX": names.REPLICA_INDEX, "HOST_INDEX": names.HOST_INDEX}
    fields = {name: f"metadata.labels['{label}']" for name, label in labels.items()}
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in (fields | {"POD_IP": "status.podIP"}).items()
    ]
