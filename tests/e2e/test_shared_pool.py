"""A RolloutPool of its own: two jobs write to the same engines in turn, through a helm upgrade."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from conftest import ENDED, Start, apply, store_of
from faults import AGENT_PORT, agent, step_of, uids, until, wait_step

from grpo_devcluster.addons import kubectl
from grpo_devcluster.follow import JobView
from grpo_devcluster.gobuild import binary
from grpo_devcluster.install import CHART, NAMESPACE
from grpo_devcluster.paths import REPO

LAST = 32
REFERENCE = {"poolRef": {"name": "shared"}}


@pytest.fixture(scope="module")
def engine(kubeconfig: Path) -> Iterator[dict[str, Any]]:
    """The pod of the pool's one engine."""
    spec = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())["spec"]
    pool = {
        "apiVersion": "rl.grpo.dev/v1alpha1",
        "kind": "RolloutPool",
        "metadata": {"name": "shared"},
        "spec": spec["rollout"]["template"] | {"replicas": 1, "model": spec["model"]},
    }
    apply(kubeconfig, yaml.safe_dump(pool), "apply", "-f", "-")
    selector = "rl.grpo.dev/rolloutpool=shared,rl.grpo.dev/pool=rollout"
    until("the engine's pod", lambda: _pods(kubeconfig, selector), 60)
    until("its agent", lambda: agent(_pods(kubeconfig, selector)[0]).get("state") == "STALE", 240)
    (pod,) = _pods(kubeconfig, selector)
    yield pod
    kubectl("delete", "rolloutpool", "shared", kubeconfig=kubeconfig)


def _pods(kubeconfig: Path, selector: str) -> list[dict[str, Any]]:
    return list(
        json.loads(kubectl("get", "pods", "-l", selector, "-o", "json", kubeconfig=kubeconfig))["items"]
    )


def _reason(job: JobView) -> str:
    return str((job.status().get("conditions") or [{"reason": ""}])[0]["reason"])


def test_two_jobs_write_in_turn_and_an_upgrade_disturbs_neither(
    kubeconfig: Path, start: Start, engine: dict[str, Any]
) -> None:
    first = start("first", steps=8, rollout=REFERENCE)
    wait_step(first, 1)
    second = start("second", steps=LAST, rollout=REFERENCE)
    until("the second waits", lambda: _reason(second) == "WaitingForPool", 30)
    assert second.pods() == [] and agent(engine)["writer"].startswith("first-")
    assert first.wait(ENDED, 300)["phase"] == "Succeeded"
    wait_step(second, 2)
    before = uids(second)
    _upgrade(kubeconfig)
    wait_step(second, step_of(second) + 2)
    assert uids(second) == before, "the upgrade replaced a pod"
    assert second.wait(ENDED, 300)["phase"] == "Succeeded"
    for job, steps in ((first, 8), (second, LAST)):
        lines = (store_of(job) / "ledger.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        assert len(entries) == steps * 8 * 16
        assert all(e["version"] == e["step"] - 1 for e in entries), "sampled with another policy"
    _the_engine_served_both(kubeconfig, engine)
    _a_job_whose_turn_is_over_cannot_write(first, engine)


def _the_engine_served_both(kubeconfig: Path, engine: dict[str, Any]) -> None:
    (pod,) = _pods(kubeconfig, "rl.grpo.dev/rolloutpool=shared,rl.grpo.dev/pool=rollout")
    assert pod["metadata"]["uid"] == engine["metadata"]["uid"]
    state = agent(pod)
    assert state["restarts"] == 0 and state["writer"].startswith("second-") and state["weightVersion"] == LAST
    pool = json.loads(kubectl("get", "rolloutpool", "shared", "-o", "json", kubeconfig=kubeconfig))["status"]
    assert pool["phase"] == "Serving" and pool["weightVersion"] == LAST


def _a_job_whose_turn_is_over_cannot_write(job: JobView, engine: dict[str, Any]) -> None:
    writer = f"{job.name}-{job.get()['metadata']['uid'][:8]}"
    url = f"http://{engine['status']['podIP']}:{AGENT_PORT}/v1/sync"
    answer = httpx.post(url, json={"writer": writer, "version": 99, "sources": {}}, timeout=5)
    assert answer.status_code == 409 and "may not write" in answer.json()["error"]
    assert agent(engine)["state"] == "SERVING" and agent(engine)["weightVersion"] == LAST


def _upgrade(kubeconfig: Path) -> None:
    """helm upgrade with a changed value: another operator pod."""
    command = [
        *(str(binary("helm")), "upgrade", "grpo-operator", str(CHART), "-n", NAMESPACE, "--reuse-values"),
        *("--set", "resources.limits.memory=600Mi", "--wait", "--timeout", "2m"),
        f"--kubeconfig={kubeconfig}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
