"""A job trains where the Pod Security Standard ``restricted`` is enforced; its processes have no rights.

Its model writes programs, which the controller runs in the sandbox.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.addons import kubectl
from grpo_devcluster.claims import claim, with_claims
from grpo_devcluster.follow import JobView
from grpo_devcluster.install import install_operator
from grpo_devcluster.paths import JOB_DATA, REPO
from grpo_devcluster.report import load, summarise
from grpo_devcluster.results import record_from_test
from grpo_operator.render.pod_security import USER
from support.attacks import ATTACKS
from support.faults import until
from support.jobs import ENDED, apply
from support.pod_attacks import attack, offer

pytestmark = pytest.mark.slow  # a whole job more, of six minutes
NAMESPACE = "restricted"
STORE, PROMPTS = JOB_DATA / NAMESPACE, JOB_DATA / f"{NAMESPACE}-prompts"
STEPS = 60
# A model with random weights writes such a program of two tokens twice in a step of 128, by chance.
TESTS = {"assert_case": ["assert isinstance(eval(open(__file__).read()), int)"]}
# Attacks that fail in a pod without the sandbox: the runtime's own filter, and the container's memory limit.
HELD_BACK = {"clone3", "memory", "memory of another"}
OTHER = "default-another-job-12345678"  # folder of a job that is not this one


@pytest.fixture(scope="module")
def job(kubeconfig: Path, chart_values: dict[str, Any]) -> Iterator[JobView]:
    """The tiny job in a namespace that enforces the standard, with claims in place of folders."""
    shutil.rmtree(STORE, ignore_errors=True)
    (STORE / OTHER).mkdir(parents=True)
    os.chown(STORE, USER, USER)  # as a provisioner does for the fsGroup of a pod
    PROMPTS.mkdir(exist_ok=True)
    rows = [{"prompt": f"an integer like {n}:\n", "answer": json.dumps(TESTS)} for n in range(1, 33)]
    (PROMPTS / "programs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overlay, objects = with_claims(chart_values["podOverlay"], NAMESPACE)
    kubectl("create", "namespace", NAMESPACE)
    kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    objects += claim("checkpoints", NAMESPACE, STORE) + claim("prompts", NAMESPACE, PROMPTS)
    apply(kubeconfig, yaml.safe_dump_all(objects), "apply", "-f", "-")
    install_operator(kubeconfig, chart_values | {"podOverlay": overlay})
    manifest = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())
    manifest["metadata"]["namespace"] = NAMESPACE
    manifest["spec"] |= {"totalSteps": STEPS, "reward": {"builtin": "code", "workers": 2}}
    manifest["spec"]["checkpoint"]["store"] = {"pvc": "checkpoints"}
    volume = {"mountPath": "/prompts", "pvc": "prompts"}
    manifest["spec"]["data"] |= {"train": "/prompts/programs.jsonl", "volume": volume, "responseLength": 2}
    apply(kubeconfig, yaml.safe_dump(manifest), "apply", "-f", "-")
    yield JobView(kubeconfig, "tiny-moe", NAMESPACE)
    kubectl("delete", "grpojob", "tiny-moe", "-n", NAMESPACE, "--cascade=foreground")
    kubectl("delete", "namespace", NAMESPACE)
    install_operator(kubeconfig, chart_values)


def _containers(job: JobView) -> list[tuple[str, str]]:
    """Return pod and container of everything that runs."""
    return [
        (pod["metadata"]["name"], status["name"])
        for pod in job.pods()
        for status in (
            *pod["status"].get("containerStatuses", []),
            *pod["status"].get("initContainerStatuses", []),
        )
        if "running" in status["state"]
    ]


# Prints what a process may do, as JSON.
PROBE = """
import glob, json, os
lines = open("/proc/self/status").read().splitlines()
status = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
def writes(path):
    try:
        open(path, "w").close()
        os.unlink(path)
        return True
    except OSError:
        return False
print(json.dumps({
    "uid": os.getuid(), "gid": os.getgid(), "capabilities": int(status["CapBnd"], 16),
    "no_new_privileges": status["NoNewPrivs"].strip(), "seccomp": status["Seccomp"].strip(),
    "writes": [p for p in ("/x", "/etc/x", "/usr/x", "/opt/x", "/tmp/x") if writes(p)],
    "store": sorted(os.listdir("/store")) if os.path.isdir("/store") else [],
    "writes in it": [p for p in ("", "logs/") if any(writes(f"{f}/{p}x") for f in glob.glob("/store/*"))],
    "home": os.path.expanduser("~"),
}))
"""


def test_processes_have_no_rights_and_see_one_jobs_folder(job: JobView) -> None:
    until("all containers run", lambda: len(_containers(job)) == 10, 300)
    uid = job.get()["metadata"]["uid"][:8]
    for pod, container in _containers(job):
        seen = json.loads(job.exec(pod, container, "python3", "-c", PROBE))
        without = container == "ray-head"
        writes = {"ray-head": [], "engine": [], "agent": ["logs/"]}.get(container, ["", "logs/"])
        assert seen == {
            "uid": USER,
            "gid": USER,
            "capabilities": 0,
            "no_new_privileges": "1",
            "seccomp": "2",
            "writes": ["/tmp/x"],
            "store": [] if without else [f"{NAMESPACE}-tiny-moe-{uid}"],
            "writes in it": writes,
            "home": "/tmp",
        }, (pod, container)


def test_no_attack_escapes_the_sandbox_in_the_controllers_container(job: JobView) -> None:
    (pod,) = (pod["metadata"]["name"] for pod in job.pods("controller"))
    assert offer(job, pod, "controller") == {"landlock": True, "namespaces": False}
    outcomes = attack(job, pod, "controller")
    assert list(outcomes) == list(ATTACKS)
    possible = [name for name, (plain, _) in outcomes.items() if plain]
    assert set(outcomes) - set(possible) <= HELD_BACK
    escapes = [name for name, (_, confined) in outcomes.items() if confined]
    figures = {"sandbox_attacks_in_pod": len(possible), "sandbox_escapes_in_pod": len(escapes)}
    record_from_test("reliability", figures)
    assert escapes == []


def test_the_job_learns_to_write_programs(job: JobView) -> None:
    status = job.wait(ENDED, 1200)
    assert status["phase"] == "Succeeded", status
    assert status.get("restarts", {}).get("job", 0) == 0
    (folder,) = [path for path in STORE.iterdir() if path.name != OTHER]
    records = load(folder)
    figures = summarise(records)
    print(figures, flush=True)
    assert figures["p_value"] < 0.01 and figures["reward_last_quarter"] > 2 * figures["reward_first_quarter"]
    assert records[-1]["reward/failures"] == 0
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files and {path.stat().st_uid for path in files} == {USER}
    kept = {path.name.partition(".")[0] for path in (folder / "logs").iterdir()}
    assert kept >= {"controller", "engine", "trainer-agent", "trainer-0"}
    servers = [path for path in (folder / "logs").glob("engine.*.log") if " INFO engine " in path.read_text()]
    assert len(servers) >= 2, "lines of the engines' servers"
    assert not list((STORE / OTHER).iterdir())


def _capabilities(kubeconfig: Path, image: str, user: int) -> int:
    """Return the effective capabilities of a process whose container adds IPC_LOCK."""
    name = f"ipc-lock-{user}"
    container: dict[str, Any] = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["grep", "CapEff", "/proc/self/status"],
        "securityContext": {"runAsUser": user, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}},
    }
    spec = {"restartPolicy": "Never", "containers": [container]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    apply(kubeconfig, yaml.safe_dump(pod), "apply", "-f", "-")
    try:
        path = "jsonpath={.status.phase}"
        until("the pod ended", lambda: kubectl("get", "pod", name, "-o", path) == "Succeeded", 60)
        return int(kubectl("logs", name).split()[-1], 16)
    finally:
        kubectl("delete", "pod", name, "--now")


def test_a_capability_has_no_effect_for_a_user_other_than_root(
    kubeconfig: Path, chart_values: dict[str, Any]
) -> None:
    """The reason for which RDMA runs as root by default."""
    image, ipc_lock = chart_values["images"]["trainer"], 1 << 14
    assert _capabilities(kubeconfig, image, 0) == ipc_lock
    assert _capabilities(kubeconfig, image, USER) == 0
