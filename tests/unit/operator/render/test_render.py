"""Children of a job: one RayCluster with three groups, and stable digests."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_operator.render.config_map import job_config_map, owned_pool, owned_pool_spec
from grpo_operator.render.job_pods import _LEAVING, _RANK, _WAIT_FOR_HEAD
from grpo_operator.render.metadata import is_current, with_hash
from grpo_operator.render.pod_template import stoppable
from grpo_operator.render.ray_cluster import job_cluster
from grpo_operator.render.services import rollout_service
from grpo_operator.settings import OperatorSettings
from support.objects import job, pool_of, spec_of

SETTINGS = OperatorSettings("trainer:1", "rollout:1", pod_overlay={"env": [{"name": "X", "value": "1"}]})
S3_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def cluster(suspend: bool = False, **spec: Any) -> dict[str, Any]:
    manifest = job(**spec)
    parsed = spec_of(manifest)
    return job_cluster(manifest, parsed, pool_of(parsed), SETTINGS, suspend).wire()


def group(name: str, **spec: Any) -> dict[str, Any]:
    groups = cluster(**spec)["spec"]["workerGroupSpecs"]
    return dict(next(g for g in groups if g["groupName"] == name))


def test_worker_groups_have_their_sizes() -> None:
    groups = cluster()["spec"]["workerGroupSpecs"]
    assert [(g["groupName"], g["replicas"]) for g in groups] == [
        ("controller", 1),
        ("trainer", 2),
        ("rollout", 2),
    ]


def test_every_pod_is_owned_labelled_and_evicted_soon() -> None:
    manifest = cluster()
    assert manifest["metadata"]["ownerReferences"][0]["kind"] == "GRPOJob"
    templates = [g["template"] for g in manifest["spec"]["workerGroupSpecs"]]
    for template in [*templates, manifest["spec"]["headGroupSpec"]["template"]]:
        assert template["metadata"]["labels"]["rl.grpo.dev/job"] == "tiny-moe"
        assert {t["tolerationSeconds"] for t in template["spec"]["tolerations"]} == {30}
        assert template["spec"]["automountServiceAccountToken"] is False
        for container in template["spec"]["containers"]:
            assert {"name": "X", "value": "1"} in container["env"]


def test_only_trainer_pods_have_the_pool_resource_and_are_replaced() -> None:
    assert group("trainer")["rayStartParams"]["resources"] == '"{\\"trainer\\": 1}"'
    assert group("trainer")["template"]["spec"]["restartPolicy"] == "Never"
    prepare, agent = group("trainer")["template"]["spec"]["initContainers"]
    assert prepare["name"] == "prepare-store"
    assert (agent["name"], agent["restartPolicy"]) == ("agent", "Always"), "a dead agent costs no pod"
    for other in ("controller", "rollout"):
        assert "resources" not in group(other)["rayStartParams"]
        assert "restartPolicy" not in group(other)["template"]["spec"]


def test_probes_of_an_engine_go_through_its_agent() -> None:
    engine, agent = group("rollout")["template"]["spec"]["containers"]
    assert agent["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert engine["livenessProbe"]["httpGet"] == {"path": "/enginez", "port": 9000}
    assert "sglang.launch_server" in engine["args"][0] and "--device cpu" in engine["args"][0]


@pytest.mark.parametrize("buffered", [False, True])
def test_agents_fill_a_double_buffer_when_configured(buffered: bool) -> None:
    template = job()["spec"]["rollout"]["template"]
    made = cluster(rollout={"template": template | {"engine": {"doubleBuffer": buffered}}})
    groups = {g["groupName"]: g["template"]["spec"] for g in made["spec"]["workerGroupSpecs"]}
    agent = groups["rollout"]["containers"][1]
    assert ("--double-buffer" in agent["args"][0]) == buffered


@pytest.mark.parametrize("transport", ["auto", "nccl", "gloo", "staged", "nixl"])
def test_agents_read_through_nixl_when_configured(transport: str) -> None:
    made = cluster(weightSync={"transport": transport})
    groups = {g["groupName"]: g["template"]["spec"] for g in made["spec"]["workerGroupSpecs"]}
    assert ("--nixl" in groups["rollout"]["containers"][1]["args"][0]) == (transport == "nixl")


def test_an_engine_shares_routed_experts_with_its_agent_in_memory_of_a_bounded_size() -> None:
    def rollout_pod(**engine: Any) -> dict[str, Any]:
        base = job()["spec"]["rollout"]["template"]
        made = cluster(rollout={"template": base | {"engine": base.get("engine", {}) | engine}})
        groups = {g["groupName"]: g["template"]["spec"] for g in made["spec"]["workerGroupSpecs"]}
        return dict(groups["rollout"])

    pod = rollout_pod(returnRoutedExperts=True, routedExpertsGibibytes=9)
    volume = next(v for v in pod["volumes"] if v["name"] == "routed-experts")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "9Gi"}
    engine, agent = pod["containers"]
    (path,) = {
        m["mountPath"] for c in (engine, agent) for m in c["volumeMounts"] if m["name"] == "routed-experts"
    }
    values = {variable["name"]: variable.get("value") for variable in engine["env"]}
    assert values["GRPO_ROUTED_EXPERTS"] == path and f"--routed-experts {path}" in agent["args"][0]
    assert values["GRPO_ROUTED_EXPERTS_URL"] == "http://$(POD_IP):9000"
    names = [variable["name"] for variable in engine["env"]]
    assert names.index("POD_IP") < names.index("GRPO_ROUTED_EXPERTS_URL"), "Kubernetes expands earlier ones"
    assert "routed-experts" not in str(rollout_pod())


def test_ray_is_restarted_when_a_busy_node_delays_its_start(tmp_path: Path) -> None:
    """Run a training pod's command in a real shell: Ray fails after another one has run, or fails on."""
    (command,) = group("trainer")["template"]["spec"]["containers"][0]["args"]
    command = "sleep() { :; }; SECONDS=400; " + command.replace(_WAIT_FOR_HEAD, "")
    count = f"echo x >>{tmp_path}/tries; tries=$(wc -l <{tmp_path}/tries); "
    ray = count + "((tries > 1)) || SECONDS=$((SECONDS + 5000)); ((tries > 3))"
    assert _shell(command, ray) == 0 and (tmp_path / "tries").read_text() == "x\n" * 4
    assert _shell(command, "SECONDS=$((SECONDS + 299)); (exit 7)") == 7, (
        "a start that never succeeds has no end"
    )


def test_a_training_pod_waits_at_sigterm_until_its_ranks_have_ended(tmp_path: Path) -> None:
    """Run a training pod's command in a real shell; a rank is a process with the command line of one."""
    (command,) = group("trainer")["template"]["spec"]["containers"][0]["args"]
    command = command.replace(_WAIT_FOR_HEAD, "").replace(_LEAVING, f"{tmp_path}/leaving")
    command = command.replace(_RANK, f"ray::{tmp_path}")  # others may run ranks on this machine
    rank = subprocess.Popen(["/bin/bash", "-c", f"exec -a 'ray::{tmp_path}.update_actor' sleep 600"])
    environment = os.environ | {"KUBERAY_GEN_RAY_START_CMD": f": >{tmp_path}/started; exec sleep 600"}
    pod = subprocess.Popen(["/bin/bash", "-c", command], env=environment, start_new_session=True)
    try:
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        pod.terminate()
        while not (tmp_path / "leaving").exists():
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            pod.wait(1.0)
        rank.kill()
        rank.wait()
        assert pod.wait(5) == 0
    finally:
        rank.kill()
        with suppress(ProcessLookupError):
            os.killpg(pod.pid, signal.SIGKILL)


def test_a_process_ends_at_sigterm_as_it_wants_and_its_exit_code_is_that_of_the_container() -> None:
    assert subprocess.run(["/bin/bash", "-c", stoppable("(exit 7)")], check=False).returncode == 7
    saves = "trap 'sleep 0.5; echo saved; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    for command, code, said in ((f'bash -c "{saves}"', 3, "saved\n"), ("echo ready; sleep 60", 143, "")):
        shell = subprocess.Popen(
            ["/bin/bash", "-c", stoppable(f"({command})")], stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            assert shell.stdout is not None and shell.stdout.readline() == "ready\n"
            shell.terminate()
            assert shell.wait(10) == code
            assert said == "" or shell.stdout.read() == said
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)


def test_pods_that_save_have_the_grace_and_others_end_at_once() -> None:
    def graces(**spec: Any) -> dict[str, int]:
        made = cluster(**spec)["spec"]
        templates = {g["groupName"]: g["template"] for g in made["workerGroupSpecs"]}
        templates["head"] = made["headGroupSpec"]["template"]
        return {name: t["spec"]["terminationGracePeriodSeconds"] for name, t in templates.items()}

    assert graces() == {"controller": 60, "trainer": 60, "rollout": 5, "head": 5}
    assert graces(restartPolicy={"graceSeconds": 777})["trainer"] == 777


def _shell(command: str, ray: str) -> int:
    environment = os.environ | {"KUBERAY_GEN_RAY_START_CMD": ray}
    return subprocess.run(["/bin/bash", "-c", command], env=environment, check=False, timeout=30).returncode


def test_only_gpu_jobs_request_gpus() -> None:
    assert "nvidia.com/gpu" not in str(cluster())
    manifest = job()
    manifest["spec"]["trainer"]["device"] = "cuda"
    parsed = spec_of(manifest)
    gpu = job_cluster(manifest, parsed, pool_of(parsed), SETTINGS, False).wire()
    ranks = gpu["spec"]["workerGroupSpecs"][1]["template"]["spec"]["containers"][0]
    assert ranks["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_suspend_is_left_to_kueue() -> None:
    assert cluster(suspend=True)["spec"]["suspend"] is True
    assert "suspend" not in cluster(suspend=True, scheduling={"queueName": "team-a"})["spec"]


def test_the_digest_depends_only_on_the_manifest() -> None:
    first, again, other = with_hash(cluster()), with_hash(cluster()), with_hash(cluster(suspend=True))
    assert is_current(first, again)
    assert not is_current(first, other) and not is_current(first, None)


def test_pools_and_services_follow_the_job() -> None:
    manifest = job()
    spec = spec_of(manifest)
    service = rollout_service(manifest, pool_of(spec_of(manifest)))
    assert service["spec"]["publishNotReadyAddresses"] is True
    model = owned_pool(manifest, owned_pool_spec(spec) or {})["spec"]["model"]
    assert model == {"path": "preset:tiny-moe", "multiTokenPrediction": False}
    config = yaml.safe_load(
        job_config_map(manifest, spec, "tiny-moe-rollout", pool_of(spec))["data"]["job.json"]
    )
    assert config["rolloutService"] == "tiny-moe-rollout.default.svc.cluster.local"
    assert config["writer"] == "tiny-moe-12345678" and config["minAvailable"] == 1
    assert config["fp8"] is False
    assert config["maxRunningRequests"] == pool_of(spec).engine.max_running_requests
    assert config["store"] == "/store/default-tiny-moe-12345678"
    suspended = job(suspend=True)
    again = job_config_map(suspended, spec_of(suspended), "tiny-moe-rollout", pool_of(spec))
    assert again == job_config_map(manifest, spec, "tiny-moe-rollout", pool_of(spec))


@pytest.mark.parametrize("replay", [False, True])
def test_ranks_get_the_key_only_when_they_read_from_engines(replay: bool) -> None:
    spec = job()["spec"]
    spec["algorithm"] = spec.get("algorithm", {}) | {"routingReplay": replay}
    spec["rollout"]["template"]["engine"]["returnRoutedExperts"] = replay
    groups = cluster(algorithm=spec["algorithm"], rollout=spec["rollout"])["spec"]["workerGroupSpecs"]
    (trainer,) = (g["template"]["spec"] for g in groups if g["groupName"] == "trainer")
    (ranks,) = trainer["containers"]
    assert any(env["name"] == "GRPO_KEY_FILE" for env in ranks["env"]) == replay
    assert any(mount["name"] == "key" for mount in ranks["volumeMounts"]) == replay
    assert any(volume["name"] == "key" for volume in trainer["volumes"])


def test_agents_find_their_peers_by_the_service_of_all_engines() -> None:
    service = rollout_service(job(), pool_of(spec_of(job())))["metadata"]["name"]
    agent = group("rollout")["template"]["spec"]["containers"][1]
    assert f"--peers {service}" in agent["args"][0]


def test_agents_of_a_jobs_own_engines_read_its_folder_and_write_only_to_its_logs() -> None:
    engine, agent = group("rollout")["template"]["spec"]["containers"]
    assert "--store /store/default-tiny-moe-12345678" in agent["args"][0]
    name = "default-tiny-moe-12345678"
    read = {"name": "store", "mountPath": f"/store/{name}", "subPath": name, "readOnly": True}
    written = {"name": "store", "mountPath": f"/store/{name}/logs", "subPath": f"{name}/logs"}
    for container, mounts in ((engine, [read]), (agent, [read, written])):
        assert [m for m in container["volumeMounts"] if m["name"] == "store"] == mounts


def test_agents_keep_the_lines_of_their_engines() -> None:
    engine, agent = group("rollout")["template"]["spec"]["containers"]
    (file,) = (env["value"] for env in engine["env"] if env["name"] == "GRPO_ENGINE_LOG")
    assert f"--logs /store/default-tiny-moe-12345678/logs --engine-log {file}" in agent["args"][0]
    shared = [
        {m["name"] for m in c["volumeMounts"] if file.startswith(m["mountPath"] + "/")}
        for c in (engine, agent)
    ]
    assert [names - {"tmp-engine", "tmp-agent"} for names in shared] == [{"model"}, {"model"}]
    trainer = group("trainer")["template"]["spec"]["initContainers"][-1]
    assert "trainer --logs /store/default-tiny-moe-12345678/logs" in trainer["args"][0]


def test_agents_of_a_job_in_an_object_store_keep_no_lines() -> None:
    store = {"uri": "s3://runs/grpo"}
    for name in ("rollout", "trainer"):
        assert "--logs" not in str(group(name, checkpoint={"store": store}))
        assert "GRPO_ENGINE_LOG" not in str(group(name, checkpoint={"store": store}))


@pytest.mark.parametrize(
    ("uri", "keys"),
    [
        ("s3://runs/grpo", {key: key for key in S3_KEYS}),
        ("gs://runs/grpo", {"GOOGLE_APPLICATION_CREDENTIALS_JSON": "key.json"}),
    ],
)
def test_beside_an_object_store_each_pod_has_its_own_disk_and_only_its_users_have_the_keys(
    uri: str, keys: dict[str, str]
) -> None:
    store = {"uri": uri, "endpoint": "http://server:9000", "secret": "keys"}
    groups = cluster(checkpoint={"store": store})["spec"]["workerGroupSpecs"]
    pods = {group["groupName"]: group["template"]["spec"] for group in groups}
    with_keys = set()
    for name, pod in pods.items():
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            named = {env["name"]: env for env in container["env"]}
            found = {name: env for name, env in named.items() if name.startswith(("AWS", "GOOGLE"))}
            if found:
                with_keys.add(container["name"])
                assert found.keys() == keys.keys()
                for variable, env in found.items():
                    reference = {"name": "keys", "key": keys[variable], "optional": True}
                    assert env["valueFrom"] == {"secretKeyRef": reference}
        stores = [volume for volume in pod["volumes"] if volume["name"] == "store"]
        assert stores == ([] if name == "rollout" else [{"name": "store", "emptyDir": {}}])
        mounts = [
            m["mountPath"] for c in pod["containers"] for m in c["volumeMounts"] if m["name"] == "store"
        ]
        assert mounts == ([] if name == "rollout" else ["/store/default-tiny-moe-12345678"])
        for container in pod.get("initContainers", []):
            assert container["securityContext"].get("runAsUser") != 0, "an emptyDir needs no root"
    assert with_keys == {"controller", "ray-worker"}
    assert "--store" not in pods["rollout"]["containers"][1]["args"][0]


def test_agents_of_colocated_engines_wait_for_the_next_version_of_their_trainers() -> None:
    agent = group("rollout", mode="colocated")["template"]["spec"]["containers"][1]
    assert "--store" not in agent["args"][0] and "--peers" not in agent["args"][0]
