"""The 512-GPU job's manifests: engines of several hosts, devices, topology, policies, overlays."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.plan.capacity.pod_requests import job_requests
from grpo_operator.plan.capacity.topology import Leaves
from grpo_operator.render.overlay import merge
from grpo_operator.render.policies import network_policy, rollout_budget, trainer_budget
from grpo_operator.render.ray_cluster import job_cluster, settled_leaves
from grpo_operator.render.services import engine_services, rollout_service
from grpo_operator.settings import OperatorSettings
from support.objects import pool_of

MANIFEST = Path(__file__).parents[4] / "manifests" / "deepseek-v3-512xh100.yaml"
SETTINGS = OperatorSettings("trainer:1", "rollout:1", namespace="ops")


def job() -> dict[str, Any]:
    manifest = yaml.safe_load(MANIFEST.read_text())
    manifest["metadata"] |= {"namespace": "rl", "uid": "12345678-aaaa", "generation": 1}
    return dict(manifest)


def cluster(manifest: dict[str, Any] | None = None) -> dict[str, Any]:
    manifest = manifest or job()
    spec = GRPOJobSpec.model_validate(manifest["spec"])
    return job_cluster(manifest, spec, pool_of(spec), SETTINGS, False).wire()


def template(name: str, manifest: dict[str, Any] | None = None) -> dict[str, Any]:
    groups = cluster(manifest)["spec"]["workerGroupSpecs"]
    return dict(next(g["template"] for g in groups if g["groupName"] == name))


def test_agents_see_all_gpus_of_their_node_through_nvml_only() -> None:
    manifest = job()
    for name in ("trainer", "rollout"):
        spec = template(name, manifest)["spec"]
        containers = [*spec["containers"], *spec.get("initContainers", ())]
        (agent,) = [c for c in containers if c["name"] == "agent"]
        env = {e["name"]: e.get("value") for e in agent["env"]}
        assert (env["NVIDIA_VISIBLE_DEVICES"], env["NVIDIA_DRIVER_CAPABILITIES"]) == ("all", "utility")
        assert "nvidia.com/gpu" not in agent["resources"]["limits"]


def test_pods_with_gpus_avoid_hosts_in_quarantine_besides_their_other_rules() -> None:
    manifest = job()
    spec = GRPOJobSpec.model_validate(manifest["spec"])
    leaves = Leaves(("leaf-a",), (("leaf-b", 8),), ("leaf-b",))

    def rules(avoided: tuple[str, ...]) -> dict[str, list[list[dict[str, Any]]]]:
        made = job_cluster(manifest, spec, pool_of(spec), SETTINGS, False, leaves, avoided).wire()
        found: dict[str, list[list[dict[str, Any]]]] = {}
        for group in made["spec"]["workerGroupSpecs"]:
            affinity = group["template"]["spec"]["affinity"].get("nodeAffinity", {})
            required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
            terms = required.get("nodeSelectorTerms", [])
            found[group["groupName"].split("-")[0]] = [term["matchExpressions"] for term in terms]
        return found

    before, after = rules(()), rules(("h1", "h2"))
    extra = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["h1", "h2"]}
    assert after["controller"] == before["controller"], "it runs on no GPU node"
    for name in ("trainer", "rollout"):
        assert before[name] and after[name] == [[*rules_of, extra] for rules_of in before[name]]


def test_pods_of_an_engine_restart_together() -> None:
    (group,) = [g for g in cluster()["spec"]["workerGroupSpecs"] if g["groupName"] == "rollout"]
    assert (group["replicas"], group["numOfHosts"]) == (8, 4)
    engine = template("rollout")["spec"]["containers"][0]
    command = engine["args"][0]
    for part in ("--tp-size 32", "--ep-size 32", "--dp-size 32 --enable-dp-attention", "--nnodes 4",
                 '--node-rank "$HOST_INDEX"', "engine_process --rounds http://127.0.0.1:9000/hostz python3",
                 "/models/DeepSeek-V3 /tmp/model --fp8-block128"):  # fmt: skip
        assert part in command
    fields = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in engine["env"] if "valueFrom" in e}
    assert fields["HOST_INDEX"] == "metadata.labels['ray.io/replica-host-index']"
    agent = template("rollout")["spec"]["containers"][1]["args"][0]
    first = "http://deepseek-v3-grpo-$GROUP-$REPLICA_INDEX:9000"
    probes = {name: engine[name]["httpGet"] for name in ("startupProbe", "livenessProbe")}
    assert set(map(str, probes.values())) == {"{'path': '/enginez', 'port': 9000}"}, "it may wait for hosts"
    assert f'--hosts 4 --host-index "$HOST_INDEX" --first-host "{first}" --address "$POD_IP"' in agent


def test_the_start_of_a_server_is_limited_by_a_field() -> None:
    manifest = job()
    default = template("rollout")["spec"]["containers"]
    manifest["spec"]["rollout"]["template"]["engine"]["startSeconds"] = 3601
    longer = template("rollout", manifest)["spec"]["containers"]
    for (server, agent), seconds in ((default, 1800), (longer, 3601)):
        probe = server["startupProbe"]
        assert 0 <= probe["periodSeconds"] * probe["failureThreshold"] - seconds < probe["periodSeconds"]
        assert f"--start-seconds {seconds}" in agent["args"][0]


def test_each_engine_has_a_service_for_its_first_host() -> None:
    spec = GRPOJobSpec.model_validate(job()["spec"])
    services = engine_services(job(), pool_of(spec))
    assert [s["metadata"]["name"] for s in services] == [f"deepseek-v3-grpo-rollout-{i}" for i in range(8)]
    assert services[3]["spec"]["selector"]["ray.io/worker-group-replica-index"] == "3"
    selector = rollout_service(job(), pool_of(spec))["spec"]["selector"]
    assert selector["ray.io/replica-host-index"] == "0"


def test_ranks_whose_streams_overlap_have_several_hardware_queues() -> None:
    manifest = job()
    manifest["spec"]["trainer"] |= {"moe": {"overlapCommunication": True}, "recompute": "none"}
    manifest["spec"]["trainer"]["parallelism"]["virtualPipeline"] = 2

    def queues() -> list[str]:
        container = template("trainer", manifest)["spec"]["containers"][0]
        return [e["value"] for e in container["env"] if e["name"] == "CUDA_DEVICE_MAX_CONNECTIONS"]

    assert queues() == ["32"]
    manifest["spec"]["scheduling"] |= {"ncclEnv": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}}
    assert queues() == ["8"]


@pytest.mark.parametrize("pool", ["trainer", "rollout"])
def test_gpu_pods_get_devices_and_anti_affinity(pool: str) -> None:
    spec = template(pool)["spec"]
    main = spec["containers"][0]
    assert main["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert main["resources"]["limits"]["rdma/hca"] == "8"
    assert main["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    env = {e["name"]: e.get("value") for e in main["env"]}
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and env["NCCL_CUMEM_ENABLE"] == "0"
    assert {"name": "shm", "mountPath": "/dev/shm"} in main["volumeMounts"]
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in spec["affinity"]["podAntiAffinity"]
    (preferred,) = spec["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    apart = preferred["podAffinityTerm"]
    other = {"trainer": "rollout", "rollout": "trainer"}[pool]
    assert apart["labelSelector"]["matchLabels"]["rl.grpo.dev/pool"] == other
    assert apart["topologyKey"] == "kubernetes.io/hostname"


def test_an_engine_stays_within_one_leaf() -> None:
    affinity = template("rollout")["spec"]["affinity"]["podAffinity"]
    (together,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert together["matchLabelKeys"] == ["ray.io/worker-group-replica-name"]
    assert together["topologyKey"] == "topology.kubernetes.io/leaf"
    assert (
        "requiredDuringSchedulingIgnoredDuringExecution"
        not in (template("trainer")["spec"]["affinity"]["podAffinity"])
    )


def test_the_controller_and_the_head_prefer_nodes_without_gpus() -> None:
    """They do not require them: all nodes of a small cluster may have GPUs."""
    rule = {"key": "nvidia.com/gpu.present", "operator": "NotIn", "values": ["true"]}
    preferred = {"weight": 100, "preference": {"matchExpressions": [rule]}}
    head = cluster()["spec"]["headGroupSpec"]["template"]["spec"]
    for spec in (head, template("controller")["spec"]):
        assert spec["affinity"]["nodeAffinity"] == {
            "preferredDuringSchedulingIgnoredDuringExecution": [preferred]
        }
        assert "nvidia.com/gpu" not in spec["containers"][0]["resources"]["limits"]


def test_queues_and_gangs_are_labels_of_the_job_cluster() -> None:
    manifest = job()
    manifest["spec"]["scheduling"] |= {
        "queueName": "team-a", "gangScheduler": "volcano", "gangQueue": "rl", "priorityClassName": "high",
    }  # fmt: skip
    labels = cluster(manifest)["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team-a"
    assert labels["ray.io/gang-scheduling-enabled"] == "true"
    assert labels["volcano.sh/queue-name"] == "rl" and labels["ray.io/priority-class-name"] == "high"


def test_the_gang_has_a_disruption_budget_and_a_network_policy() -> None:
    spec = GRPOJobSpec.model_validate(job()["spec"])
    trainer, rollout = trainer_budget(job(), spec), rollout_budget(job(), pool_of(spec))
    assert trainer["spec"]["minAvailable"] == 32 and rollout["spec"]["minAvailable"] == 30
    evictable = spec.scheduling.model_copy(update={"evict_trainers": True})
    one = trainer_budget(job(), spec.model_copy(update={"scheduling": evictable}))
    assert one["spec"]["minAvailable"] == 31, "a drain evicts one training pod at a time"
    policy = network_policy(job(), SETTINGS)["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"][1]["from"][0]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "ops"
    }
    assert len(policy["ingress"]) == 2
    watched = network_policy(job(), replace(SETTINGS, scrape_namespace="monitoring"))["spec"]["ingress"][2]
    assert watched["from"][0]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "monitoring"
    }
    assert [port["port"] for port in watched["ports"]] == [8090, 9000]


def test_overlays_merge_as_kubectl_would() -> None:
    manifest = job()
    manifest["spec"]["trainer"]["podTemplate"] = {
        "metadata": {"annotations": {"team": "rl"}},
        "spec": {
            "hostNetwork": True,
            "containers": [{"name": "ray-worker", "env": [{"name": "NCCL_IB_HCA", "value": "=mlx5_0"}]}],
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
        },
    }
    made = template("trainer", manifest)
    ranks = made["spec"]["containers"][0]
    assert made["spec"]["hostNetwork"] is True and made["metadata"]["annotations"]["team"] == "rl"
    assert {"name": "NCCL_IB_HCA", "value": "=mlx5_0"} in ranks["env"] and "args" in ranks
    assert {v["name"] for v in made["spec"]["volumes"]} >= {"models", "shm", "weights", "store"}
    assert len(made["spec"]["containers"]) == 1


def test_the_controller_can_run_in_another_runtime_than_gpu_pods() -> None:
    manifest = job()
    manifest["spec"]["scheduling"] = manifest["spec"].get("scheduling", {}) | {"runtimeClassName": "nvidia"}
    manifest["spec"]["controller"] = {"podTemplate": {"spec": {"runtimeClassName": "kata"}}}
    found = {name: template(name, manifest)["spec"]["runtimeClassName"] for name in ("controller", "trainer")}
    assert found == {"controller": "kata", "trainer": "nvidia"}


def test_merge_changes_neither_side_and_null_removes() -> None:
    base: dict[str, Any] = {"a": 1, "b": {"c": [1]}, "env": [{"name": "x", "value": "1"}]}
    over = {"a": None, "b": {"c": [2]}, "env": [{"name": "x", "value": "2"}, {"name": "y"}]}
    merged = merge(base, over)
    assert merged == {"b": {"c": [2]}, "env": [{"name": "x", "value": "2"}, {"name": "y"}]}
    assert base["a"] == 1 and base["env"][0]["value"] == "1"


def test_each_leaf_has_its_own_group_bound_to_it() -> None:
    manifest = job()
    spec = GRPOJobSpec.model_validate(manifest["spec"])
    leaves = Leaves(("leaf-2",), (("leaf-0", 5), ("leaf-1", 3)))
    made = job_cluster(manifest, spec, pool_of(spec), SETTINGS, False, leaves).wire()
    groups = made["spec"]["workerGroupSpecs"][2:]
    assert [(g["replicas"], g["numOfHosts"]) for g in groups] == [(5, 4), (3, 4)]
    rule = groups[1]["template"]["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"][0]["matchExpressions"][0]
    assert rule == {"key": "topology.kubernetes.io/leaf", "operator": "In", "values": ["leaf-1"]}
    assert settled_leaves(made) == leaves
    services = engine_services(manifest, pool_of(spec), leaves)
    assert len({s["metadata"]["name"] for s in services}) == 8
    assert {s["spec"]["selector"]["ray.io/group"] for s in services} == {g["groupName"] for g in groups}


def test_the_heads_memory_follows_the_ranks_and_equals_the_request() -> None:
    head = cluster()["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    memory = head["resources"]["requests"]["memory"]
    assert memory == "4096Mi"  # 2 GiB, and 8 MiB for each of 256 ranks
    spec = GRPOJobSpec.model_validate(job()["spec"])
    (request,) = [r for r in job_requests(spec, pool_of(spec)) if r.pool == "head"]
    assert request.memory == 4 * 2**30
