"""Agents of real pods read that a GPU is sick, twice: the pods leave, and the job goes on bit for bit.

The agents read a shim of NVML, and the node only claims to have GPUs. It is the only one: after the first
strike the pods come back to it, and in quarantine the job waits until somebody has repaired the node.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_devcluster.addons import kubectl
from grpo_devcluster.follow import JobView
from grpo_devcluster.install import NAMESPACE, install_operator
from grpo_devcluster.settings import NODE
from grpo_operator.apply.gpu_ledger import NAME as LEDGER
from grpo_operator.plan.capacity.feasibility import GPU
from grpo_operator.plan.gpu_health.node_state import CONDITION, TAINT
from support.faults import report, uids, until, wait_step
from support.jobs import CALM, ENDED, Start
from support.nvml_shim import NvmlShim
from support.runs import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # a job and the calm one: half an hour
STEPS = CALM  # of which two dozen pass at each strike until the pods leave
OFFERED = 8  # GPUs: more than the pods ask for, so that none waits for its predecessor's
HEALTHY = ("gpus 1", "0 uuid GPU-ill", "0 temperature 40")
FALLEN = (*HEALTHY, "xid 0 79")
UNREMAPPED = (*HEALTHY, "0 remapped_rows 1", "0 remap_pending 0", "0 remap_failed 1")
NOTICED = 60.0  # seconds: the agents look every ten seconds, and so does the operator
LEFT = 90.0  # the operator's next round, and the smallest default of graceSeconds
RECOVERED = 600.0  # seconds to two new steps: all engines and ranks start again


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> NvmlShim:
    made = NvmlShim(tmp_path_factory.mktemp("nvml"))
    made.set(*HEALTHY)
    return made


@pytest.fixture(scope="module")
def operator(kubeconfig: Path, chart_values: dict[str, Any], calm: Outcome) -> Iterator[None]:
    """An operator that may write nodes, and a node that offers GPUs. The calm run has ended."""
    _offer(OFFERED)
    install_operator(kubeconfig, chart_values | {"gpuHealth": {"nodeConditions": True, "taints": True}})
    yield
    if _tainted():  # a test has failed
        _lift_quarantine()
    kubectl("-n", NAMESPACE, "delete", "configmap", LEDGER, "--ignore-not-found")
    install_operator(kubeconfig, chart_values)
    _offer(None)


@pytest.fixture(scope="module")
def job(start: Start, operator: None, gpu: NvmlShim) -> JobView:
    """A job whose training pods ask for GPUs. Checkpoints are due after its end."""
    limits = {"name": "ray-worker", "resources": {"limits": {GPU: "1"}}}

    def change(spec: dict[str, Any]) -> None:
        spec["checkpoint"]["everySteps"] = 10 * STEPS
        spec["trainer"]["podTemplate"] = {"spec": gpu.pod_spec("initContainers") | {"containers": [limits]}}

    job = start("sick-gpu", steps=STEPS, change=change)
    wait_step(job, 2, 900)
    return job


@pytest.mark.fault(
    row="7",
    point="NVML, a shim for the agents of both training pods, reports XID 79",
    witness="the node's condition names XID and GPU; event GpuSick; all pods of ranks and engines are others",
    bound="condition in 60 s; the pods leave in 90 s, two new steps in 600 s",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, at the end of "
    "the run",
    partial="NVML is a shim; the only node, to which the pods return",
)
def test_the_first_strike_replaces_the_pods(job: JobView, gpu: NvmlShim) -> None:
    pods, others = uids(job, "trainer", "rollout"), uids(job, "controller", "head")
    assert len(pods) == 4 and not _ill("Xid79")
    gpu.set(*FALLEN)
    condition = until("the node's condition", lambda: _ill("Xid79"), NOTICED)
    gpu.set(*HEALTHY)  # or it would be news for the next agents, too
    assert "GPU-ill" in condition["message"]
    (event,) = until("an event", lambda: _events(job), 10)
    assert event.startswith(f"node {NODE}: XID 79") and "strike 1 of 2, its GPU pods are replaced" in event
    step = report(job)["step"]
    until("the pods have left", lambda: not pods.items() & uids(job, "trainer", "rollout").items(), LEFT)
    until("two new steps", lambda: _went_on(job, step), RECOVERED)
    assert not _tainted() and uids(job, "controller", "head") == others
    until("a good condition", lambda: _condition()["status"] == "True", NOTICED)
    assert len(_events(job)) == 1


@pytest.mark.fault(
    row="7",
    point="NVML, a shim for the agents of the training pods that have come back, reports a row of memory "
    "that could not be remapped",
    witness="taint and condition of the node; event GpuSick; the job is Unschedulable and names the node",
    bound="quarantine in 60 s; the pods leave in 90 s, two new steps 600 s after it is lifted",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, at the end of "
    "the run",
    partial="NVML is a shim; there is no other node, so the job waits",
)
def test_in_quarantine_the_job_waits_for_the_node(job: JobView, gpu: NvmlShim) -> None:
    pods, others = uids(job, "trainer", "rollout"), uids(job, "controller", "head")
    gpu.set(*UNREMAPPED)
    until("the quarantine", _tainted, NOTICED)
    step = report(job)["step"]
    until("the pods have left", lambda: not pods.items() & uids(job, "trainer", "rollout").items(), LEFT)
    until("the job says why it waits", lambda: _waits(job), NOTICED)
    (sick,) = job.status()["sickNodes"]
    assert sick.startswith(f"node {NODE}: a row of memory could not be remapped (GPU-ill")
    assert sick.endswith("in quarantine") and _ill("RemapFailed")
    assert "strike 2 of 2, the node is in quarantine" in _events(job)[-1]
    successors = job.pods("trainer") + job.pods("rollout")
    assert successors and not [pod for pod in successors if "nodeName" in pod["spec"]]
    gpu.set(*HEALTHY)
    until("the operator knows its taint", lambda: _strikes()[NODE]["tainted"], NOTICED)
    _lift_quarantine()
    until("two new steps", lambda: _went_on(job, step), RECOVERED)
    until("nothing is remembered", lambda: not _strikes(), NOTICED)
    until("a good condition", lambda: _condition()["status"] == "True", NOTICED)
    until("the job forgets it, too", lambda: not job.status().get("sickNodes"), NOTICED)
    assert not _tainted() and uids(job, "controller", "head") == others


def test_the_steps_are_those_of_a_calm_run(job: JobView, calm: Outcome) -> None:
    status = job.wait(ENDED, 900)
    assert status["phase"] == "Succeeded" and status["restarts"]["job"] == 0
    assert status["restarts"]["infrastructure"] >= 2
    outcome = Outcome.of(job.store(), STEPS)
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")
    outcome.assert_same(calm.first(STEPS))


def _offer(gpus: int | None) -> None:
    """Let the node offer GPUs, which kubelet then keeps as an extended resource. None: no longer."""
    amount = {GPU: None if gpus is None else str(gpus)}
    patch = json.dumps({"status": {"capacity": amount, "allocatable": amount}})
    kubectl("patch", "node", NODE, "--subresource=status", "--type=merge", "-p", patch)


def _lift_quarantine() -> None:
    kubectl("taint", "node", NODE, f"{TAINT}-")


def _node() -> dict[str, Any]:
    return dict(json.loads(kubectl("get", "node", NODE, "-o", "json")))


def _tainted() -> bool:
    return any(taint["key"] == TAINT for taint in _node()["spec"].get("taints") or [])


def _condition() -> dict[str, Any]:
    return next((c for c in _node()["status"]["conditions"] if c["type"] == CONDITION), {})


def _ill(reason: str) -> dict[str, Any] | None:
    """Return the condition of the node if it says for this reason that a GPU is sick."""
    condition = _condition()
    return condition if (condition.get("status"), condition.get("reason")) == ("False", reason) else None


def _strikes() -> dict[str, Any]:
    """Return what the operator remembers of nodes."""
    text = kubectl("-n", NAMESPACE, "get", "configmap", LEDGER, "-o", "json")
    return {node: json.loads(record) for node, record in (json.loads(text).get("data") or {}).items()}


def _events(job: JobView) -> list[str]:
    """Return the messages of the job's events about sick GPUs, the oldest first."""
    chosen = f"--field-selector=reason=GpuSick,involvedObject.uid={job.get()['metadata']['uid']}"
    found = json.loads(job.kubectl("get", "events", chosen, "-o", "json"))["items"]
    return [event["message"] for event in sorted(found, key=lambda event: str(event["lastTimestamp"]))]


def _waits(job: JobView) -> bool:
    """Return whether the job says that no node takes its pods because of a taint."""
    status = job.status()
    text = " ".join(condition.get("message", "") for condition in status["conditions"])
    return status.get("reason") == "Unschedulable" and "untolerated taint" in text


def _went_on(job: JobView, step: int) -> bool:
    """Return whether the job has finished two new steps after one that was saved when its pods left.

    ``step``: finished before.
    """
    seen = report(job)
    restored = seen["restored"] or {"step": -1, "source": ""}
    return bool(restored["source"] == "store" and step <= restored["step"] <= seen["step"] - 2)
