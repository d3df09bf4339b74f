"""A node with training pods is drained, and an engine's pod is deleted: no step and no sample is lost.

The job saves its steps before a training pod ends, and an engine answers what it has begun. Both are compared
with a calm run, bit for bit.
"""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from grpo_devcluster.addons import kubectl
from grpo_devcluster.follow import JobView
from grpo_devcluster.gobuild import binary
from grpo_devcluster.paths import KUBECONFIG
from grpo_devcluster.settings import NODE
from support.faults import agent, report, step_of, uids, until, wait_step
from support.held_samples import engines_of, exported, metrics_of, samples_held
from support.jobs import ENDED, Start
from support.runs import Outcome, recoveries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # a job, and the calm one: ten minutes
STEPS = 60
DRAIN = 60  # seconds, which are the drain's own limit: it never ends, because the second pod stays
GRACE = 60.0  # restartPolicy.graceSeconds: its smallest default
RECOVERED = 400.0  # seconds from the node's return to two new steps
LEFT = 4.0  # seconds in which an engine has left its pool: within its grace of five
ANSWERED = 60.0  # seconds from then to the end of the step whose samples it had
REFUSED = "it would violate the pod's disruption budget"


@pytest.fixture(scope="module")
def job(start: Start, calm: Outcome) -> JobView:
    """A job whose training pods may be evicted. Checkpoints are due after its end. The calm one has ended."""
    checkpoint = {"store": {"path": "/var/lib/grpo-devcluster/data"}, "everySteps": 10 * STEPS}
    job = start("drained", steps=STEPS, checkpoint=checkpoint, scheduling={"evictTrainers": True})
    wait_step(job, 4, 900)
    until("a budget", lambda: _allowed(job) == 1, 60)
    return job


@pytest.mark.fault(
    row="26",
    point="kubectl drain of the node of both training pods",
    witness="the drain's own output; one pod is gone; the end of the attempt says what was saved",
    bound="the pod ends in 60 s, the smallest default of graceSeconds; two new steps 400 s after the node is "
    "back",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, at the end of "
    "the run",
)
def test_a_drain_takes_one_training_pod_when_its_steps_are_saved(job: JobView) -> None:
    pods, others, step = uids(job, "trainer"), uids(job, "controller", "rollout", "head"), step_of(job)
    with _drained(job) as drain:
        until("one pod is gone", lambda: len(uids(job, "trainer").items() & pods.items()) == 1, GRACE)
        evicted, kept = _evicted(job, pods)
        saved = until("the job says what it saved", lambda: _saved(job, evicted), 60)
        assert saved >= step
        folder = job.store() / "checkpoints"
        assert [path.name.partition(".")[0] for path in folder.glob("step-*")] == [f"step-{saved:08}"]
        _waits_for_a_node(job, pods)
        assert REFUSED in _evict(job, kept)
        _, refusals = drain.communicate(timeout=2 * DRAIN)
        assert drain.returncode == 1 and f'"{kept}"' in refusals and REFUSED in refusals, refusals
        assert uids(job, "trainer").items() & pods.items() == {(kept, pods[kept])}
    started = time.monotonic()
    wait_step(job, saved + 2, RECOVERED)
    print(f"two new steps {time.monotonic() - started:.1f} s after the node was back")
    seen = report(job)
    assert seen["restored"] == {"step": saved, "source": "store"}
    assert seen["restarts"] == {"job": 0, "infrastructure": 1}
    assert uids(job, "controller", "rollout", "head") == others, "pods that the drain did not select"
    until("the next pod may be evicted", lambda: _allowed(job) == 1, 60)


@pytest.mark.fault(
    row="26",
    point="kubectl delete of an engine's pod with samples in flight, which its scheduler, stopped until the "
    "agent has left, cannot have answered before",
    witness="the controller counts the same requests in flight before and after; the step that waits for "
    "them is trained on samples of this engine",
    bound="it has left the pool in 4 s and gets no sample of a later step; the step ends in 60 s, and no "
    "request is sent again",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, at the end of "
    "the run",
    partial="an engine alone, which can answer within its grace",
)
def test_an_engine_that_is_deleted_answers_what_it_has_begun(job: JobView) -> None:
    until("both engines serve", lambda: all(_serves(pod) for pod in _engines(job)), RECOVERED)
    pod, url = _engines(job)[0], metrics_of(job)
    name, seen, others = pod["metadata"]["name"], report(job), uids(job, "trainer", "controller", "head")
    retries = exported(url, "retries_total")
    with samples_held(pod, url) as held:
        step = step_of(job)
        job.kubectl("delete", "pod", name, "--wait=false")
        until("the engine has left", lambda: _has_left(job, pod), LEFT, every=0.1)
        assert (exported(url, "in_flight"), step_of(job)) == (held, step), "others have answered them"
    print(f"{name} has left with {held} samples in flight")
    wait_step(job, step + 1, ANSWERED)
    assert exported(url, "retries_total") == retries, "the engine ended before its answers"
    wait_step(job, step + 3, RECOVERED)
    assert name in engines_of(job, step + 1)
    assert not any(name in engines_of(job, later) for later in (step + 2, step + 3))
    assert all(report(job)[key] == seen[key] for key in ("attempt", "restarts"))
    assert uids(job, "trainer", "controller", "head") == others
    until("another engine", lambda: len(uids(job, "rollout").keys() - {name}) == 2, 60)


def test_the_steps_are_those_of_a_calm_run(job: JobView, calm: Outcome) -> None:
    status = job.wait(ENDED, 900)
    assert status["phase"] == "Succeeded" and status["restarts"] == {"job": 0, "infrastructure": 1}
    assert len(recoveries(job.store())) == 1
    outcome = Outcome.of(job.store(), STEPS)
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")
    outcome.assert_same(calm.first(STEPS))


@contextmanager
def _drained(job: JobView) -> "Iterator[subprocess.Popen[str]]":
    """Drain the only node of the job's training pods; let pods run there again at the end."""
    selector = f"--pod-selector=rl.grpo.dev/job={job.name},rl.grpo.dev/pool=trainer"
    command = [str(binary("kubectl")), f"--kubeconfig={KUBECONFIG}", "drain", NODE, selector]
    command += ["--delete-emptydir-data", f"--timeout={DRAIN}s"]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as drain:
            yield drain
    finally:
        kubectl("uncordon", NODE)


def _allowed(job: JobView) -> int:
    """Return how many training pods may be evicted now."""
    text = job.kubectl(
        "get", "poddisruptionbudget", f"{job.name}-trainer", "--ignore-not-found", "-o", "json"
    )
    return int(json.loads(text)["status"].get("disruptionsAllowed", 0)) if text else 0


def _evicted(job: JobView, pods: dict[str, str]) -> tuple[str, str]:
    """Return which of the pods is gone, and which is left."""
    (kept,) = uids(job, "trainer").keys() & pods.keys()
    (evicted,) = pods.keys() - {kept}
    return evicted, kept


def _saved(job: JobView, pod: str) -> int | None:
    """Return the step that the job has saved because of the pod's end, as its status says."""
    failure = str(job.status().get("lastFailure"))
    found = re.search(r"pod (\S+) .*is being deleted; the checkpoint of step (\d+) is complete", failure)
    assert found is None or found[1] == pod, failure
    return int(found[2]) if found else None


def _waits_for_a_node(job: JobView, pods: dict[str, str]) -> None:
    """Check that the evicted pod was replaced by one that no node takes."""

    def waiting() -> bool:
        (new,) = [pod for pod in job.pods("trainer") if pod["metadata"]["name"] not in pods]
        conditions: list[dict[str, Any]] = new["status"].get("conditions", [])
        return any(one.get("reason") == "Unschedulable" for one in conditions)

    until("a pod without a node", waiting, 60)


def _engines(job: JobView) -> list[dict[str, Any]]:
    """Return the pods of both engines. Raises LookupError while there are fewer."""
    pods = job.pods("rollout")
    return [pods[0], pods[1]]


def _serves(pod: dict[str, Any]) -> bool:
    return bool(agent(pod)["state"] == "SERVING")


def _has_left(job: JobView, pod: dict[str, Any]) -> bool:
    """Return whether the agent of an engine answers no more, and the controller knows."""
    known = {engine["name"] for engine in report(job)["engines"]}
    return pod["metadata"]["name"] not in known and not agent(pod)


def _evict(job: JobView, pod: str) -> str:
    """Ask for the eviction of a pod; return the answer."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    path = f"/api/v1/namespaces/{job.namespace}/pods/{pod}/eviction"
    command = [str(binary("kubectl")), f"--kubeconfig={KUBECONFIG}", "create", "--raw", path, "-f", "-"]
    text = json.dumps(eviction)
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False).stderr
