"""Parts of the cluster are away when a job needs them: no bit of any step changes.

One job has all faults, one after the other; its steps are compared with those of a calm one.
"""

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_devcluster import addons, processes
from grpo_devcluster.follow import JobView
from grpo_devcluster.install import install_operator
from grpo_devcluster.paths import JOB_DATA
from grpo_devcluster.report import load
from grpo_operator.api.keys import Epochs, token
from grpo_operator.api.names import AGENT_PORT, EPOCH, EPOCH_SECRET, KEY, key_secret
from support.faults import kill_container, kill_rank, report, started, step_of, uids, until, wait_step
from support.images import unavailable
from support.jobs import Start
from support.runs import assert_same_steps, ledger, recoveries
from support.unsteady_store import HANG, UnsteadyStore, mounted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
MANY = 100_000  # steps: the last test ends the runs
EVERY = 5  # steps from checkpoint to checkpoint
NOTICED, RECOVERED = 120.0, 400.0  # seconds until a loss is counted, and from then to two new steps
OVERLAP = 150.0  # seconds of keys.overlapSeconds; 300 by default
AWAY = 20.0  # seconds that a part stays away after the job has needed it


def _begin(start: Start, name: str, store: UnsteadyStore) -> JobView:
    checkpoint = {"store": {"path": str(store.path)}, "everySteps": EVERY, "memory": {"everySteps": 1}}
    job = start(name, steps=MANY, checkpoint=checkpoint, restartPolicy={"backoffSeconds": 1})
    wait_step(job, 3, 900)
    return job


@pytest.fixture(scope="module")
def store(kubeconfig: Path) -> Iterator[UnsteadyStore]:
    """The devcluster's folder of jobs, mounted a second time."""
    with mounted(JOB_DATA, JOB_DATA.with_name("unsteady"), kubeconfig.with_name("store-mode")) as store:
        yield store


@pytest.fixture(scope="module")
def job(kubeconfig: Path, chart_values: dict[str, Any], start: Start, store: UnsteadyStore) -> JobView:
    """A job whose tokens are being replaced, through all of its faults."""
    install_operator(kubeconfig, chart_values | {"keys": {"overlapSeconds": OVERLAP}})
    job = _begin(start, "outages", store)
    job.kubectl("annotate", "secret", EPOCH_SECRET, "rl.grpo.dev/rotate=e2e")
    return job


@pytest.mark.fault(
    row="ray-head",
    point="SIGKILL of the container of Ray's head during a step",
    witness="its container has started again, the restart is counted",
    bound="counted in 120 s, two new steps 400 s later",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, at the end of "
    "the run",
)
def test_ray_head_is_killed(job: JobView) -> None:
    seen = report(job)
    (head,) = job.pods("head")
    kill_container(head, "ray-head")
    _new_steps(job, _counted(job, seen))
    (after,) = job.pods("head")
    assert started(after, "ray-head") != started(head, "ray-head")


@pytest.mark.fault(
    row="coredns",
    point="CoreDNS is killed, then a rank",
    witness="names are not resolved in a pod; the restart is counted",
    bound="counted in 120 s; two new steps 400 s after CoreDNS is back",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, at the end of "
    "the run",
)
def test_a_rank_is_killed_while_dns_is_away(job: JobView) -> None:
    processes.stop("coredns", grace=0)
    try:
        step = step_of(job)
        wait_step(job, step + 2, 120)  # steps need no names
        assert not _resolves(job)
        seen = report(job)
        kill_rank(job)
        finished = _counted(job, seen)
        time.sleep(AWAY)
    finally:
        addons.start_coredns()
    until("names are resolved", lambda: _resolves(job), 30)
    _new_steps(job, finished)


@pytest.mark.fault(
    row="kuberay",
    point="KubeRay's operator is killed, then a training pod's container",
    witness="nobody replaces the pod meanwhile; the restart is counted",
    bound="counted in 120 s; two new steps 400 s after KubeRay is back",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, at the end of "
    "the run",
)
def test_a_training_pod_is_killed_while_kuberay_is_away(job: JobView) -> None:
    seen, before = report(job), uids(job, "trainer")
    processes.stop("kuberay-operator", grace=0)
    try:
        kill_container(job.pods("trainer")[1], "ray-worker")
        finished = _counted(job, seen)
        time.sleep(AWAY)
        assert uids(job, "trainer").items() <= before.items(), "another one has replaced the pod"
    finally:
        addons.start_kuberay()
    _new_steps(job, finished)
    assert len(uids(job, "trainer").items() - before.items()) == 1


@pytest.mark.fault(
    row="image-pull",
    point="SIGKILL of a training pod's container after its image has left node and registry",
    witness="the replacement waits with ErrImagePull or ImagePullBackOff, and the job's status names the pod",
    bound="named in 30 s; two new steps 700 s after the image is back (kubelet's back-off has 300)",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, at the end of "
    "the run",
)
def test_the_image_of_a_replacement_cannot_be_pulled(job: JobView) -> None:
    seen, before = report(job), uids(job, "trainer")
    victim = job.pods("trainer")[0]
    (image,) = {c["image"] for c in victim["spec"]["containers"] if c["name"] == "ray-worker"}
    with unavailable(image):
        kill_container(victim, "ray-worker")
        finished = _counted(job, seen)
        replacement = until("another pod", lambda: _other(job, before), NOTICED)
        until("a failed pull", lambda: "mage" in _waiting(job, replacement), 60)
        until("the status names it", lambda: _named(job, replacement), 30)
    _new_steps(job, finished, 300 + RECOVERED)


@pytest.mark.fault(
    row="nfs-stale",
    point="all calls of the store hang for six steps, from several pods",
    witness="calls that hung are counted; no checkpoint is complete meanwhile",
    bound="six steps in 180 s without the store; a checkpoint 120 s after it is back",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, at the end of "
    "the run",
)
def test_the_store_hangs(job: JobView, store: UnsteadyStore) -> None:
    seen = report(job)
    with store.is_(HANG):
        wait_step(job, seen["step"] + EVERY + 1, 180)
        last = report(job)["lastCheckpoint"]
        assert last <= seen["step"] + 1
    until("a checkpoint", lambda: report(job)["lastCheckpoint"] > last, 120)
    assert all(report(job)[key] == seen[key] for key in ("attempt", "restarts"))


@pytest.mark.fault(
    row="nfs-stale",
    point="all calls of the store answer ESTALE, and a rank is killed meanwhile",
    witness="calls that failed are counted; the restart is counted",
    bound="counted in 120 s; two new steps 400 s after the store is back",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, at the end of "
    "the run",
)
def test_a_rank_is_killed_while_the_store_is_stale(job: JobView, store: UnsteadyStore) -> None:
    seen = report(job)
    with store.is_("ESTALE"):
        kill_rank(job)
        finished = _counted(job, seen)
        time.sleep(AWAY)
    _new_steps(job, finished)


@pytest.mark.fault(
    row="key-rotation",
    point="all tokens are replaced during the updates of all steps, and through all other faults of the job",
    witness="the epoch in the Secret has changed; the old token is answered with 401",
    bound="the old token ends within 360 s (the overlap is 150); no call was refused before",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, at the end of "
    "the run",
    partial="passed in another run than the comparison",
)
def test_all_tokens_were_replaced_meanwhile(job: JobView) -> None:
    until("the old token has ended", lambda: _epochs(job).settled(time.time()), 2 * OVERLAP + 60)
    wait_step(job, step_of(job) + 2, 120)
    epochs = _epochs(job)
    assert epochs.previous is not None
    key = _secret(job, key_secret(job.get()))[KEY]
    url = f"http://{job.pods('trainer')[0]['status']['podIP']}:{AGENT_PORT}/v1/versions"
    answers = [
        httpx.get(url, headers={"authorization": f"Bearer {token(key, epoch)}"}).status_code
        for epoch in (epochs.previous, epochs.newest)
    ]
    assert answers == [401, 200]
    for pod, container in (("controller", "controller"), ("trainer", "agent"), ("rollout", "agent")):
        for found in job.pods(pod):
            assert "401 Unauthorized" not in job.kubectl("logs", found["metadata"]["name"], "-c", container)


def test_the_steps_are_those_of_a_calm_run(job: JobView, start: Start, store: UnsteadyStore) -> None:
    status = job.status()
    assert status["restarts"]["job"] == 0, "an outage was taken for an error of the job"
    assert status["restarts"]["infrastructure"] >= 5
    last = step_of(job) - 1  # the newest may still be written
    mine, samples = _outcome(job, last)
    assert len(recoveries(job.store())) >= 5
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")
    calm = _begin(start, "calm-outages", store)
    wait_step(calm, last + 1, 120 + 10 * last)
    theirs = _outcome(calm, last)
    calm.kubectl("delete", "grpojob", calm.name, "--cascade=foreground")
    assert_same_steps(mine, theirs[0])
    assert samples == theirs[1]


def _epochs(job: JobView) -> Epochs:
    return Epochs.read(_secret(job, EPOCH_SECRET)[EPOCH])


def _secret(job: JobView, name: str) -> dict[str, str]:
    data = json.loads(job.kubectl("get", "secret", name, "-o", "json"))["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def _outcome(job: JobView, last: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return records and ledger of the first ``last`` steps."""
    store = job.store()
    return [record for record in load(store) if record["step"] <= last], ledger(store, last)


def _counted(job: JobView, seen: dict[str, Any]) -> int:
    """Wait until one restart more is counted than in the report ``seen``; return the last finished step."""
    count = seen["restarts"]["infrastructure"]
    until("the restart is counted", lambda: report(job)["restarts"]["infrastructure"] > count, NOTICED)
    return step_of(job)


def _new_steps(job: JobView, finished: int, timeout: float = RECOVERED) -> None:
    """Wait for two steps after the last one that was finished when the restart was counted."""
    wait_step(job, finished + 2, timeout)


def _resolves(job: JobView) -> bool:
    """Return whether a training pod resolves the name of a Service."""
    name = f"{job.name}-head-svc.{job.namespace}.svc.cluster.local"
    code = f"import socket\ntry: print(socket.gethostbyname('{name}'))\nexcept OSError: print('unknown')"
    pod = job.pods("trainer")[0]["metadata"]["name"]
    return "unknown" not in job.exec(pod, "agent", "python3", "-c", code)


def _other(job: JobView, before: dict[str, str]) -> str:
    """Return the name of a training pod that is not in ``before``; empty if there is none."""
    return next(iter(uids(job, "trainer").keys() - before.keys()), "")


def _waiting(job: JobView, name: str) -> str:
    """Return the reasons why the pod's containers wait."""
    pods = [pod["status"] for pod in job.pods("trainer") if pod["metadata"]["name"] == name]
    states = [
        s for p in pods for key in ("initContainerStatuses", "containerStatuses") for s in p.get(key, [])
    ]
    return " ".join(state["state"].get("waiting", {}).get("reason", "") for state in states)


def _named(job: JobView, pod: str) -> bool:
    """Return whether a condition of the job names the pod and the failed pull."""
    messages = [condition["message"] for condition in job.status().get("conditions", [])]
    return any(pod in message and "mage" in message for message in messages)
