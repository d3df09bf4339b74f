"""Trainers and engines on the same GPUs: validation, manifests and the hand-over of GPU memory."""

import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from grpo_operator.api import names
from grpo_operator.api.messages import AgentStatus
from grpo_operator.api.names import Owner
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.api.v1alpha1.status import EngineState
from grpo_operator.cli.report import as_data, as_table
from grpo_operator.plan.capacity.feasibility import GPU, oversized_node
from grpo_operator.plan.capacity.pod_requests import job_requests
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.resolve import RefusedError, resolve, training_pool
from grpo_operator.plan.status.rolloutpool import pool_status
from grpo_operator.render.ray_cluster import job_cluster
from grpo_operator.settings import OperatorSettings
from grpo_worker.rollout.engine_pool import RolloutPool, SyncError
from grpo_worker.rollout.routing import EngineEntry
from grpo_worker.rollout.sglang.prepare import await_turn
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.http import rollout_application
from support.objects import NOW, job, pod, pool_of, spec_of

JOB = "default/tiny"
ALL, BOTH = ["weights", "kv_cache"], "kv_cache weights"
RELEASED, TAKEN = f"released {BOTH}", f"taken {BOTH}"
OFFLOAD = dict.fromkeys(("parameters", "gradients", "optimizer"), True)


def colocated(**changes: Any) -> dict[str, Any]:
    """A job on two nodes of 4 GPUs; ``changes`` by dotted path."""
    manifest = job(mode="colocated")
    spec = manifest["spec"]
    spec["trainer"] |= {"device": "cuda", "nodes": 2, "gpusPerNode": 4, "offload": dict(OFFLOAD)}
    spec["trainer"]["microBatchSizePerGpu"] = 1
    spec["trainer"]["parallelism"] = {"expert": 4}
    engine = {"device": "cuda", "tensorParallel": 4, "gpusPerNode": 4, "contextLength": 4096}
    spec["rollout"] = {"template": {"replicas": 2, "minAvailable": 2, "engine": engine}}
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = spec
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
    return manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout": {"poolRef": {"name": "x"}}}, "engines of a RolloutPool have GPUs of their own"),
        ({"rollout__template__replicas": 3}, "must not exceed trainer.nodes"),
        ({"trainer__offload__optimizer": False}, "needs trainer.offload"),
        ({"trainer__gpusPerNode": 8}, "and, on cuda, trainer.gpusPerNode"),
        ({"staleness": {"maxVersionLag": 1}}, "requires staleness.maxVersionLag 0"),
        ({"rollout__template__engine__doubleBuffer": True}, "excludes engine.doubleBuffer"),
        ({"weightSync": {"transport": "nccl"}}, "excludes weightSync.transport nccl"),
        (
            {"weightSync": {"transport": "cuda-ipc"}},
            "cuda-ipc needs mode colocated on cuda and trainer.nodes 1",
        ),
    ],
)
def test_settings_that_cannot_be_colocated_are_refused(change: dict[str, Any], message: str) -> None:
    spec_of(colocated())
    with pytest.raises(ValidationError, match=message):
        spec_of(colocated(**change))


def test_memory_is_planned_for_what_the_other_role_keeps() -> None:
    spec = spec_of(colocated())
    alone = GRPOJobSpec.model_validate(spec.wire() | {"mode": "static"})
    plan = resolve(spec, pool_of(spec))
    assert plan.model is not None
    rooms = [
        training_pool(each, pool_of(each), plan.model, plan.recompute, plan.offload).gpu.usable
        for each in (alone, spec)
    ]
    assert rooms[0] - rooms[1] == 6 * 10**9
    table = as_table(as_data(spec, pool_of(spec), plan, 1e9))
    assert "2 engines on 2 nodes, 8 x h100-80gb, shared with the training pool" in table
    greedy = spec_of(colocated(rollout__template__engine__memoryFraction=0.95))
    with pytest.raises(RefusedError, match=r"memoryFraction=0.95: .*set it to 0.85 or less"):
        resolve(greedy, pool_of(greedy))


def node(name: str, gpus: int) -> dict[str, Any]:
    offer = {"cpu": "64", "memory": "1000Gi", GPU: str(gpus)}
    labels = {"gpus": str(gpus)}
    return {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": {"allocatable": offer}}


def test_a_pod_must_have_all_of_its_nodes_gpus() -> None:
    nodes = [node("a", 8), node("b", 4), node("c", 0)]
    assert oversized_node(8, {}, nodes) is None and oversized_node(4, {"gpus": "4"}, nodes) is None
    assert "node a has 8 GPUs" in (oversized_node(4, {}, nodes) or "")


def test_colocated_engines_request_no_gpus() -> None:
    spec = spec_of(colocated())
    gpus = {request.pool: request.gpus for request in job_requests(spec, pool_of(spec))}
    assert (gpus["trainer"], gpus["rollout"]) == (4, 0)


def test_an_engine_is_bound_to_a_training_pods_node() -> None:
    manifest = colocated(scheduling={"rdma": {"devices": [{"resource": "rdma/ib", "count": 8}]}})
    spec = spec_of(manifest)
    cluster = job_cluster(manifest, spec, pool_of(spec), OperatorSettings("t:1", "r:1"), False).wire()
    pods = {g["groupName"]: g["template"]["spec"] for g in cluster["spec"]["workerGroupSpecs"]}
    server, agent = pods["rollout"]["containers"]
    for kind in ("requests", "limits"):
        assert not {GPU, "rdma/ib"} & server["resources"][kind].keys()
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in server["env"]
    assert "--enable-memory-saver" in server["args"][0]
    assert "--turn http://127.0.0.1:9000/turnz && exec" in server["args"][0]
    assert "--turns /tmp/model/turns.json" in agent["args"][0]
    assert "--peers" not in agent["args"][0], "the others have no weights either while the trainers compute"
    near = pods["rollout"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert near[0]["labelSelector"]["matchLabels"]["rl.grpo.dev/pool"] == "trainer"
    apart = pods["rollout"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart[0]["labelSelector"]["matchLabels"]["rl.grpo.dev/pool"] == "rollout", "one engine a node"
    assert "podAntiAffinity" not in pods["trainer"].get("affinity", {})
    assert pods["trainer"]["containers"][0]["resources"]["limits"][GPU] == "4"


def test_only_the_training_pods_of_shared_gpus_reach_the_fabric() -> None:
    rdma = {"hostNetwork": True}
    manifest = colocated(scheduling={"rdma": rdma, "networkPolicy": False})
    spec = spec_of(manifest)
    cluster = job_cluster(manifest, spec, pool_of(spec), OperatorSettings("t:1", "r:1"), False).wire()
    pods = {g["groupName"]: g["template"]["spec"] for g in cluster["spec"]["workerGroupSpecs"]}
    assert pods["trainer"]["hostNetwork"] is True, "an agent of each pod listens on port 9000"
    assert "hostNetwork" not in pods["rollout"] and "IPC_LOCK" not in str(pods["rollout"])
    apart = pods["trainer"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [t["labelSelector"]["matchLabels"]["rl.grpo.dev/pool"] for t in apart] == ["trainer"]


def test_pods_meet_on_their_node_for_cuda_ipc_only() -> None:
    one = {"trainer__nodes": 1, "rollout__template__replicas": 1, "rollout__template__minAvailable": 1}
    for transport in ("cuda-ipc", "auto"):
        manifest = colocated(**one, weightSync={"transport": transport})
        spec = spec_of(manifest)
        cluster = job_cluster(manifest, spec, pool_of(spec), OperatorSettings("t:1", "r:1"), False).wire()
        pods = {g["groupName"]: g["template"]["spec"] for g in cluster["spec"]["workerGroupSpecs"]}
        meet = {pool for pool, pod in pods.items() if _meets(pod)}
        assert meet == ({"trainer", "rollout"} if transport == "cuda-ipc" else set())
        assert not any(pod.get("hostIPC") or pod.get("hostPID") for pod in pods.values())


def _meets(pod: dict[str, Any]) -> bool:
    container = pod["containers"][0]
    mounted = {"name": "sockets", "mountPath": names.SOCKETS} in container["volumeMounts"]
    return mounted and {"name": "GRPO_SOCKETS", "value": names.SOCKETS} in container["env"]


class Server(Engine):
    """Records requests for its memory. ``up``: whether it answers."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", 1)
        self.up, self.memory, self.broken = False, [], False  # type: tuple[bool, list[str], bool]

    def alive(self) -> bool:
        return self.up

    def weight_version(self) -> str:
        return "default"

    def release_memory(self, parts: Sequence[str]) -> None:
        if self.broken:
            raise EngineError("/release_memory_occupation: HTTP 500")
        self.memory.append("released " + " ".join(parts))

    def resume_memory(self, parts: Sequence[str]) -> None:
        self.memory.append("taken " + " ".join(parts))


def agent_of(server: Server, folder: Path) -> Agent:
    return Agent("engine-0", server, 1, 1 << 20, 5, JOB, lease_file=folder / "turns.json")


def running(server: Server, folder: Path) -> Agent:
    """Return the agent of an engine that was allowed to start."""
    agent = agent_of(server, folder)
    agent.grant_gpu_memory(JOB, ALL)
    agent.may_start()
    server.up = True
    agent.watch()
    return agent


def test_an_engine_starts_after_the_trainers_release_the_gpus(tmp_path: Path) -> None:
    server = Server()
    agent = agent_of(server, tmp_path)
    assert not agent.may_start() and agent.status()["settled"], "until the controller speaks it waits"
    assert not agent.grant_gpu_memory(JOB, ALL)["settled"]
    assert agent.may_start() and not agent.grant_gpu_memory(JOB, [])["settled"], "it may be half way up"
    server.up = True
    agent.watch()
    assert server.memory == [RELEASED] and agent.status()["settled"]
    for _ in range(2):  # twice is once
        assert agent.grant_gpu_memory(JOB, ALL)["settled"]
        assert agent.grant_gpu_memory(JOB, [])["settled"]
    assert server.memory == [RELEASED] + [TAKEN, RELEASED] * 2


def test_no_weights_are_written_while_trainers_hold_the_gpus(tmp_path: Path) -> None:
    server = Server()
    agent = running(server, tmp_path)
    agent.grant_gpu_memory(JOB, [])
    with pytest.raises(EngineError, match="the trainers use the GPUs now"):
        agent._engine.write(1, lambda: pytest.fail("it was written"))
    agent.grant_gpu_memory(JOB, ["weights"])
    assert server.memory[1:] == ["taken weights"] and not agent.status()["waits"]
    agent._engine.write(1, lambda: "checksum")
    assert agent.status()["state"] == EngineState.SERVING
    agent.grant_gpu_memory(JOB, ALL)
    assert server.memory[2:] == ["taken kv_cache"] and agent.status()["weightVersion"] == 1
    with pytest.raises(ValueError, match="parts of an engine's memory are kv_cache, weights"):
        agent.grant_gpu_memory(JOB, ["cuda_graph"])


def test_a_restarted_agent_knows_the_memory_its_engine_holds(tmp_path: Path) -> None:
    server = Server()
    first = running(server, tmp_path)
    first.grant_gpu_memory(JOB, [])
    second = agent_of(server, tmp_path)
    second.watch()
    assert server.memory == [RELEASED], "SGLang does not take a second release"
    second.grant_gpu_memory(JOB, ALL)
    third = agent_of(server, tmp_path)
    third.watch()
    assert third.status()["settled"] and server.memory == [RELEASED, TAKEN]


def test_an_engine_that_died_waits_until_the_trainers_release(tmp_path: Path) -> None:
    server = Server()
    agent = running(server, tmp_path)
    agent.grant_gpu_memory(JOB, [])
    server.up = False
    agent.watch()
    assert agent.status()["state"] == EngineState.RESTARTING and not agent.may_start()
    agent.grant_gpu_memory(JOB, ALL)
    assert agent.may_start()
    server.up = True
    agent.watch()
    assert server.memory == [RELEASED] and agent.status()["settled"], "a new server has taken everything"


def test_an_agent_that_waits_for_the_gpus_is_ready(tmp_path: Path) -> None:
    """Otherwise pods and pools would become unready in every step."""
    server = Server()
    agent = running(server, tmp_path)
    with TestClient(rollout_application(agent)) as client:
        assert client.get("/readyz").status_code == 503, "its turn, and no weights yet"
        agent.grant_gpu_memory(JOB, [])
        assert client.get("/readyz").status_code == 200 and client.get("/v1/status").json()["waits"]
    pods = (pod("rollout", 0), pod("rollout", 1))
    answer = AgentStatus.model_validate(agent.status())
    agents = {p["metadata"]["name"]: answer for p in pods}
    engines = Observed(pods=pods, agents=agents)
    owner = {"metadata": {"name": "tiny-moe-rollout", "generation": 1}}
    spec = RolloutPoolSpec.model_validate(
        pool_of(spec_of(job())).wire() | {"model": {"path": "preset:tiny-moe"}}
    )
    status = pool_status(owner, spec, Owner("GRPOJob", "default", "tiny-moe"), engines, JOB, NOW)
    assert status.phase == "Serving" and status.ready_replicas == 2 and status.weight_version is None
    assert [(e.state, e.waits) for e in status.engines] == [(EngineState.STALE, True)] * 2


def test_a_failed_release_is_not_reported_as_released(tmp_path: Path) -> None:
    server = Server()
    agent = running(server, tmp_path)
    server.broken = True
    with TestClient(rollout_application(agent)) as client:
        answer = client.post("/v1/turn", json={"writer": JOB, "attempt": 0, "parts": []})
        assert answer.status_code == 500
        assert "HTTP 500" in answer.json()["error"] and not answer.json()["settled"]
        assert client.get("/turnz").status_code == 503
        server.broken = False
        assert client.post("/v1/turn", json={"writer": JOB, "attempt": 0, "parts": []}).json()["settled"]


def test_engines_on_dedicated_gpus_are_never_asked_for_memory() -> None:
    server = Server()
    agent = Agent("engine-0", server, 1, 1 << 20, 5, JOB)
    assert agent.may_start() and agent.status()["settled"]
    server.up = True
    agent.watch()
    assert not server.memory


def test_the_engine_container_waits_for_the_gpus() -> None:
    answers = [503, 503, 200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answers.pop(0))
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        await_turn(f"http://127.0.0.1:{server.server_port}/turnz", pause=0.01)
        server.shutdown()
    assert not answers


class Pool(RolloutPool):
    """Agents with scripted answers, without a network."""

    def __init__(self, *answers: Callable[[list[str]], Any]) -> None:
        super().__init__("localhost.invalid", len(answers), 1, JOB, False)
        self.answers = dict(zip("abc", answers, strict=False))
        self.table.replace([EngineEntry(n, n, EngineState.STALE, None) for n in self.answers])

    def _poll_forever(self) -> None: ...

    def _post(self, engine: EngineEntry, what: str, timeout: float, body: dict[str, Any]) -> dict[str, Any]:
        assert what == "turn"
        return dict(self.answers[engine.name](body["parts"]))


def test_the_pool_waits_until_every_engine_has_released() -> None:
    looks = iter([False, False, True])
    pool = Pool(lambda _: {"settled": True, "attempt": 0}, lambda _: {"settled": next(looks), "attempt": 0})
    pool.turn([], 10)
    assert next(looks, None) is None
    stuck = Pool(
        lambda _: {"settled": True, "attempt": 0},
        lambda _: {"settled": True, "attempt": 0, "error": "/release: HTTP 500"},
    )
    with pytest.raises(SyncError, match=r"did not release their GPU memory in 0 s: \['b'\]"):
        stuck.turn([], 0.2)


def test_a_superseded_controller_does_not_wait() -> None:
    with pytest.raises(SyncError, match="obeys attempt 2 of this job, this is attempt 0"):
        Pool(lambda _: {"settled": False, "attempt": 2}).turn([], 60)


def test_zero_engines_do_not_count_as_released() -> None:
    with pytest.raises(SyncError, match="no engine found"):
        Pool().turn([], 0.1)
