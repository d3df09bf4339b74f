"""A RolloutPool between two jobs: an engine that is lost serves again, filled by the other one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.addons import kubectl
from grpo_devcluster.paths import REPO
from support.faults import agent, kill_container, until
from support.jobs import ENDED, Start, apply

pytestmark = pytest.mark.slow  # two engines without a job, and one that starts again: five minutes
STEPS = 4
SELECTOR = "rl.grpo.dev/rolloutpool=standing,rl.grpo.dev/pool=rollout"


@pytest.fixture(scope="module")
def pool(kubeconfig: Path) -> Iterator[Path]:
    """Two engines that no job owns."""
    spec = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())["spec"]
    manifest = {
        "apiVersion": "rl.grpo.dev/v1alpha1",
        "kind": "RolloutPool",
        "metadata": {"name": "standing"},
        "spec": spec["rollout"]["template"] | {"replicas": 2, "model": spec["model"]},
    }
    apply(kubeconfig, yaml.safe_dump(manifest), "apply", "-f", "-")
    until("its agents", lambda: [_states(kubeconfig)] == [["STALE", "STALE"]], 300)
    yield kubeconfig
    kubectl("delete", "rolloutpool", "standing", kubeconfig=kubeconfig)


def _pods(kubeconfig: Path) -> list[dict[str, Any]]:
    text = kubectl("get", "pods", "-l", SELECTOR, "-o", "json", kubeconfig=kubeconfig)
    return [pod for pod in json.loads(text)["items"] if "deletionTimestamp" not in pod["metadata"]]


def _states(kubeconfig: Path) -> list[str]:
    return sorted(agent(pod)["state"] for pod in _pods(kubeconfig))


def _serving(kubeconfig: Path) -> list[dict[str, Any]]:
    """Return the statuses of all agents once both engines serve the last version."""
    found = [agent(pod) for pod in _pods(kubeconfig)]
    ready = [status for status in found if (status["state"], status["weightVersion"]) == ("SERVING", STEPS)]
    return ready if len(ready) == len(found) == 2 else []


def test_a_lost_engine_of_a_pool_without_a_job_serves_the_last_jobs_version_again(
    pool: Path, start: Start
) -> None:
    job = start("before", steps=STEPS, rollout={"poolRef": {"name": "standing"}})
    assert job.wait(ENDED, 300)["phase"] == "Succeeded"
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")
    until("both serve", lambda: _serving(pool), 60)
    assert job.pods() == [], "no trainer and no controller is left"
    checksums = {status["checksum"] for status in _serving(pool)}
    assert len(checksums) == 1

    replaced, kept = _pods(pool)
    kubectl("delete", "pod", replaced["metadata"]["name"], "--wait", kubeconfig=pool)
    until("a new pod serves", lambda: _serving(pool), 300)
    assert {status["checksum"] for status in _serving(pool)} == checksums
    uids = {pod["metadata"]["uid"] for pod in _pods(pool)}
    assert replaced["metadata"]["uid"] not in uids and kept["metadata"]["uid"] in uids

    kill_container(kept, "engine")
    until("its server is lost", lambda: agent(kept)["restarts"] == 1, 60)
    until("it serves again", lambda: _serving(pool), 300)
    assert {status["checksum"] for status in _serving(pool)} == checksums
    status = json.loads(kubectl("get", "rolloutpool", "standing", "-o", "json", kubeconfig=pool))["status"]
    assert status["weightVersion"] == STEPS
