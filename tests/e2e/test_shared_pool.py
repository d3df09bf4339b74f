"""A RolloutPool of its own: jobs write to the same engine in turn, through a helm upgrade; one whose
engine computes something else; one whose answers go on under new weights.
"""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from grpo_devcluster.addons import kubectl
from grpo_devcluster.follow import JobView
from grpo_devcluster.gobuild import binary
from grpo_devcluster.install import CHART, NAMESPACE
from grpo_devcluster.paths import REPO
from grpo_worker.controller.recovery.run_record import RunRecord
from support.faults import AGENT_PORT, agent, report, step_of, uids, until, wait_step
from support.jobs import ENDED, Start, apply
from support.pod_keys import bearer

pytestmark = pytest.mark.slow  # several jobs, one after the other
LAST, SAMPLES = 32, 16
REFERENCE = {"poolRef": {"name": "shared"}}
READS = {"transport": "nixl"}  # what does not come over a link; all of the last job


@pytest.fixture(scope="module")
def engine(kubeconfig: Path) -> Iterator[dict[str, Any]]:
    """The pod of the pool's one engine."""
    spec = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())["spec"]
    pool = {
        "apiVersion": "rl.grpo.dev/v1alpha1",
        "kind": "RolloutPool",
        "metadata": {"name": "shared"},
        "spec": spec["rollout"]["template"] | {"replicas": 1, "model": spec["model"], "weightSync": READS},
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
        lines = (job.store() / "ledger.jsonl").read_text().splitlines()
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
    body = {"writer": writer, "attempt": 99, "version": 99, "sources": {}}
    assert httpx.post(url, json=body, timeout=5).status_code == 401, "taken without the key"
    pool = json.loads(job.kubectl("get", "rolloutpool", "shared", "-o", "json"))
    its_own = bearer(job.kubectl, job.get(), "pair")
    assert httpx.post(url, json=body, headers=its_own, timeout=5).status_code == 401, "it had its turn"
    answer = httpx.post(url, json=body, headers=bearer(job.kubectl, pool), timeout=5)
    assert answer.status_code == 409 and "may not write" in answer.json()["error"]
    assert agent(engine)["state"] == "SERVING" and agent(engine)["weightVersion"] == LAST


def _upgrade(kubeconfig: Path) -> None:
    """Helm upgrade with a changed value: another operator pod."""
    command = [
        *(str(binary("helm")), "upgrade", "grpo-operator", str(CHART), "-n", NAMESPACE, "--reuse-values"),
        *("--set", "resources.limits.memory=600Mi", "--wait", "--timeout", "2m"),
        f"--kubeconfig={kubeconfig}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.fault(
    row="29",
    point="the allowed gap of log-probabilities is 1e-12",
    witness="the message names the gap and the field",
    bound="refused before the first step, in 400 s",
    partial="no configuration differs; nothing to compare with",
)
def test_a_job_whose_engines_compute_something_else_is_refused(start: Start, engine: dict[str, Any]) -> None:
    algorithm = {"samplesPerPrompt": SAMPLES, "maxLogProbGap": 1e-12}
    job = start("apart", steps=5, rollout=REFERENCE, algorithm=algorithm)
    status = job.wait(ENDED, 400)
    (message,) = [c["message"] for c in status["conditions"] if c["type"] == "Failed"]
    assert status["phase"] == "Failed" and (status.get("step") or 0) == 0
    assert "trainer and engines disagree" in message and "maxLogProbGap" in message
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")


def _reads(engine: dict[str, Any]) -> dict[str, float]:
    """Versions that the engine's agent has read over NIXL, and that it could not."""
    text = httpx.get(f"http://{engine['status']['podIP']}:{AGENT_PORT}/metrics", timeout=5).text
    found = re.findall(r'grpo_weight_nixl_reads_total{outcome="(\w+)"} (\S+)', text)
    return {outcome: float(count) for outcome, count in found}


def _superseded(job: JobView) -> int:
    """Another controller of the job has begun an attempt, as when a node is cut off: the one that still
    runs touches nothing any more. The attempt.
    """
    record = RunRecord.load(job.store() / "run.json")
    record.begin_attempt()
    until("it gives way", lambda: "has begun in another controller" in report(job)["message"], 120)
    before = (job.store() / "ledger.jsonl").read_bytes()
    time.sleep(5)  # the operator replaces it meanwhile; the next one needs longer until its first step
    assert before == (job.store() / "ledger.jsonl").read_bytes()
    return record.attempt


@pytest.mark.fault(
    row="18",
    point="another controller begins an attempt, by its record",
    witness="the controller says that it has given way",
    bound="a new attempt in 240 s",
    partial="the other controller is a record only; the ledger is checked, not compared",
)
def test_one_step_ahead_answers_go_on_and_none_is_lost_through_a_restart(
    start: Start, engine: dict[str, Any]
) -> None:
    """Answers under way take new weights; prompts of a controller that dies are asked again."""
    steps = 12
    manifest = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())["spec"]
    data = manifest["data"] | {"responseLength": 64}
    ahead = {"maxVersionLag": 1, "partialRollouts": True}
    job = start("partial", steps=steps, data=data, staleness=ahead, weightSync=READS, rollout=REFERENCE)
    before = _reads(engine)
    wait_step(job, 5)
    attempt = _superseded(job)
    # The operator replaces a controller that has given way to one that is no pod of the job.
    until("a new attempt", lambda: step_of(job) >= 0 and report(job)["attempt"] > attempt, 240)
    status = job.wait(ENDED, 600)
    assert status["phase"] == "Succeeded", status
    rows = [json.loads(line) for line in (job.store() / "ledger.jsonl").read_text().splitlines()]
    uids = [row["uid"] for row in rows]
    assert len(set(uids)) == len(uids) == steps * 8 * SAMPLES
    assert {int(uid.split(".")[0]) for uid in uids} == set(range(steps * 8)), "short ones were not favoured"
    for row in rows:
        versions = [version for version, _ in row.get("spans", [(row["version"], row["tokens"])])]
        assert versions == sorted(set(versions)), row
        assert set(versions) <= {max(row["step"] - 2, 0), row["step"] - 1}, row
        assert "spans" not in row or row["spans"][-1][1] == row["tokens"], row
    assert sum("spans" in row for row in rows) > 0, "the weights changed under no answer"
    after = _reads(engine)
    assert after["success"] >= before["success"] + steps and after["fallback"] == before["fallback"]
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")
