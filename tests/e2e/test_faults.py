"""One run with every fault must end with the same weights as an undisturbed run."""

import asyncio
import json
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_devcluster.follow import JobView
from grpo_devcluster.paths import KUBECONFIG
from grpo_devcluster.report import load
from grpo_devcluster.results import record_from_test
from grpo_operator.client import AsyncGRPOClient
from grpo_worker.megatron.conversion.readers import SafetensorsWeights
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.samples.reader import samples as samples_of
from grpo_worker.weightsync.transport.rendezvous import JOIN_SECONDS
from support.faults import (
    agent,
    cut_off,
    kill_container,
    kill_during_sync,
    kill_rank,
    main_process,
    report,
    scale_operator,
    slowed,
    step_of,
    uids,
    until,
    wait_step,
)  # fmt: skip
from support.grpo_command import grpo, page_of
from support.jobs import ENDED, Start
from support.runs import Outcome, Undisturbed, recoveries
from support.soak import GPUS, KINDS, RECOVERED, SHARE, Soak, gpu_seconds
from support.stored_samples import assert_ids_are_texts

DEADLINE = 20  # seconds of weightSync.timeoutSeconds
MANY, FEWER = 2000, 1000  # steps that the job is to train, until tests lower their number
REST = 3  # steps after the last fault
SOAK_MINUTES, SEED = 6, 1
POOL_TIMEOUT = 4 * DEADLINE  # seconds that a step waits for engines before the trainers are parked


@pytest.fixture(scope="module")
def job(start: Start) -> JobView:
    # The store's checkpoints are rare, so lost steps are restored from the pods' memory.
    store = {"path": "/var/lib/grpo-devcluster/data"}
    memory = {"store": store, "everySteps": 20, "memory": {"everySteps": 1}}
    weights = {"timeoutSeconds": DEADLINE}
    return start("disturbed", steps=MANY, checkpoint=memory, weightSync=weights)


def _restarted(job: JobView, count: int) -> None:
    """Wait until the gang was restarted from the pods' memory and has finished a step."""
    until("restart is counted", lambda: report(job)["restarts"]["infrastructure"] >= count, 120)
    step = report(job)["step"]
    wait_step(job, step + 1, 240)
    restored = report(job)["restored"]
    assert restored["source"] == "memory" and restored["step"] % 20 != 0, restored


@pytest.mark.fault(
    row="1",
    point="SIGKILL of a training pod's container during a step",
    witness="pod replaced, restart counted, state restored from memory",
    bound="restart counted in 120 s, next step 240 s later",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, "
    "at the end of the run",
)
def test_a_killed_training_pod_restarts_the_gang_and_only_that_pod_is_replaced(job: JobView) -> None:
    wait_step(job, 7)
    assert report(job)["restored"] == {"step": 0, "source": "store"}
    before, cluster = uids(job), job.kubectl("get", "raycluster", job.name, "-o", "jsonpath={.metadata.uid}")
    victim = job.pods("trainer")[1]
    started = time.monotonic()
    kill_container(victim, "ray-worker")
    _restarted(job, 1)
    record_from_test("demo", {"recovery_seconds_trainer": round(time.monotonic() - started, 1)})
    after = uids(job)
    assert victim["metadata"]["name"] not in after
    assert {n: u for n, u in before.items() if n != victim["metadata"]["name"]}.items() <= after.items()
    assert job.kubectl("get", "raycluster", job.name, "-o", "jsonpath={.metadata.uid}") == cluster


def test_users_read_metrics_status_logs_and_the_page_of_the_job(job: JobView, tmp_path: Path) -> None:
    wait_step(job, 9)
    client = AsyncGRPOClient("default", kubeconfig=str(KUBECONFIG))
    frame = asyncio.run(client.metrics_frame(job.name))
    written = load(job.store())
    assert list(frame.index[:8]) == list(range(1, 9))
    assert list(frame["actor/loss"][:8]) == [record["actor/loss"] for record in written[:8]]
    line = r"controller attempt=2 step=8: step 8: reward -?\d\.\d+ with weights v7, .* tokens/s"
    assert re.search(line, grpo("logs", job.name, "--tail=-1"))
    stored = grpo("logs", job.name, "--stored", "--part=trainer", "--rank=1", "--tail=-1")
    assert " trainer rank=1 attempt=1" in stored, "the pod of these lines is gone"
    assert " trainer rank=1 attempt=2" in stored
    assert grpo("metrics", job.name, "actor/loss", "--last", "2").split()[:2] == ["step", "actor/loss"]
    shown = grpo("samples", job.name, "--step=8", "--order=-score", "--limit=1000", "-o", "json")
    samples = [sample for sample in json.loads(shown)["items"] if not sample["dropped"]]
    assert sorted(sample["uid"] for sample in samples) == sorted(_consumed(job, 8))
    frame = asyncio.run(client.samples_frame(job.name, step=8))
    assert sorted(frame["uid"][~frame["dropped"].astype(bool)]) == sorted(_consumed(job, 8))
    assert samples[0]["score"] == max(sample["score"] for sample in samples) and samples[0]["answer"]
    shown = grpo("samples", job.name, "--step=8", "--limit=8", "--tokens", "-o", "json")
    assert_ids_are_texts([row for row in json.loads(shown)["items"] if not row["dropped"]])
    grpo("ui", job.name, "-o", str(tmp_path / "run.html"))
    assert '"name":"actor/loss"' in (tmp_path / "run.html").read_text()
    with page_of(job.name) as url:
        page = httpx.get(url, timeout=120)
        assert page.status_code == 200 and '"live":true' in page.text
        steps = f"{url.removesuffix('page')}v1/page/steps?after=0&time=0"
        assert httpx.get(steps, timeout=120).json()["new"]["last"]["step"] >= 8
    shown = grpo("status", job.name)
    assert "Training" in shown and "eta" in shown and "1 by the infrastructure" in shown
    restarts = job.kubectl("get", "grpojob", job.name, "--no-headers").split()[-2]
    assert restarts == "1", "the column RESTARTS of kubectl get"


def test_steps_and_limits_change_while_the_job_runs(job: JobView) -> None:
    before, restarts = uids(job), report(job)["restarts"]
    assert job.status()["totalSteps"] == MANY
    _lower(job, FEWER, restartPolicy={"maxRestarts": 7})
    assert job.status()["progress"].endswith(f"/{FEWER}")
    (controller,) = job.pods("controller")
    log = job.kubectl("logs", controller["metadata"]["name"], "-c", "controller")
    assert "spec.restartPolicy.maxRestarts is now 7 (before: 10)" in log
    events = job.kubectl("get", "events", f"--field-selector=involvedObject.name={job.name}")
    assert "TotalStepsChanged" in events
    assert uids(job) == before and report(job)["restarts"] == restarts


def _lower(job: JobView, steps: int, **spec: Any) -> None:
    """Lower the number of steps, and change the spec, while the job runs."""
    change = json.dumps({"spec": {"totalSteps": steps, **spec}})
    job.kubectl("patch", "grpojob", job.name, "--type=merge", "-p", change)
    until("the controller follows", lambda: job.status()["totalSteps"] == steps, 120)


def _consumed(job: JobView, step: int) -> list[str]:
    """Return the samples that a step was trained on, as the ledger has them."""
    lines = [json.loads(line) for line in (job.store() / "ledger.jsonl").read_text().splitlines()]
    return [line["uid"] for line in lines if line["step"] == step and not line.get("leftOut")]


@pytest.mark.fault(
    row="1",
    point="SIGKILL of a rank's process during a step",
    witness="restart counted, state restored from memory",
    bound="restart counted in 120 s, next step 240 s later",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, "
    "at the end of the run",
)
@pytest.mark.slow  # as with the pod, but faster; random faults kill one too
def test_a_killed_actor_process_replaces_no_pod(job: JobView) -> None:
    wait_step(job, 13)
    before = uids(job)
    kill_rank(job)
    _restarted(job, 2)
    assert uids(job) == before


@pytest.mark.fault(
    row="18",
    point="SIGKILL of the controller while an engine loads weights, then its pod is deleted",
    witness="restart counted, the failure says so",
    bound="next attempt in 180 s, next step 300 s later",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, "
    "at the end of the run",
)
def test_a_controller_that_dies_during_a_sync_and_is_deleted_resumes_by_itself(job: JobView) -> None:
    wait_step(job, 19)
    before, seen = uids(job, "trainer", "rollout", "head"), report(job)
    kill_during_sync(job.pods("rollout")[0], main_process(job.pods("controller")[0], "controller"))
    job.kubectl("delete", "pod", "-l", f"rl.grpo.dev/job={job.name},rl.grpo.dev/pool=controller", "--wait")
    until("a controller answers", lambda: step_of(job) >= 0, 180)
    until("a new attempt", lambda: report(job)["attempt"] > seen["attempt"], 180)
    wait_step(job, 21, 300)
    assert report(job)["restored"]["step"] >= 17, "the new controller found the pods' snapshots"
    # The container may have begun again before its pod was deleted.
    deaths = report(job)["restarts"]["infrastructure"] - seen["restarts"]["infrastructure"]
    assert deaths in (1, 2) and "the controller ended unexpectedly" in job.status()["lastFailure"]
    assert uids(job, "trainer", "rollout", "head") == before


def test_users_take_a_checkpoint_home_while_the_job_runs(job: JobView) -> None:
    until("a checkpoint", lambda: job.status().get("lastCheckpoint"), 120)
    before, step = uids(job, "trainer", "rollout", "controller"), step_of(job)
    place = Path(grpo("export", job.name, "--wait=300").splitlines()[-1])
    folder = job.store() / "export" / place.name
    hf, files = json.loads((folder / "config.json").read_text()), SafetensorsWeights(folder)
    assert all(files.shape(name) == shape for name, shape in family_of(hf).shapes(hf).items())
    assert (folder / "tokenizer.json").is_file()
    wait_step(job, step + 1)
    assert uids(job, "trainer", "rollout", "controller") == before, "training goes on"
    until("its pod is gone", lambda: not job.pods("export"), 60)


@pytest.mark.fault(
    row="10",
    point="SIGKILL of an engine's container",
    witness="the agent reports RESTARTING and one restart more",
    bound="serves again in 240 s, steps go on meanwhile",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, "
    "at the end of the run",
)
@pytest.mark.slow  # the engine killed during a sync comes back too
def test_a_killed_engine_comes_back_through_stale_while_training_goes_on(
    job: JobView,
) -> None:
    wait_step(job, 24)
    before, step = uids(job), step_of(job)
    pod, started = job.pods("rollout")[0], time.monotonic()
    restarts = agent(pod)["restarts"]
    kill_container(pod, "engine")
    states = _states_until_serving(pod, restarts)
    seconds = time.monotonic() - started
    record_from_test("demo", {"recovery_seconds_engine": round(seconds, 1)})
    assert states[0] == "RESTARTING" and states[-2:] == ["STALE", "SERVING"]
    # A tenth of the speed before: one version may wait for its deadline, and the start of the engine takes a
    # core. A run that waits for the engine makes one step at most.
    usual = statistics.median(
        record["timing_s/step"] for record in load(job.store()) if record["step"] <= step
    )
    least = max(2, seconds / (10 * usual))
    assert step_of(job) - step > least, f"training waited for the dead engine ({seconds:.0f} s)"
    assert uids(job) == before, "an engine is repaired in its pod"


@pytest.mark.fault(
    row="17",
    point="SIGKILL of a training pod's agent",
    witness="the process is gone",
    bound="two steps in 120 s",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, "
    "at the end of the run",
)
@pytest.mark.slow
def test_a_killed_agent_of_the_trainers_comes_back_and_costs_nothing_else(job: JobView) -> None:
    before, restarts = uids(job), report(job)["restarts"]
    pod = job.pods("trainer")[0]
    kill_container(pod, "agent")
    step = step_of(job)
    wait_step(job, step + 2, 120)  # without both agents no engine gets the weights of a step
    assert uids(job) == before and report(job)["restarts"] == restarts


@pytest.mark.fault(
    row="17",
    point="SIGKILL of an engine's agent",
    witness="another instance of the agent answers",
    bound="serves again in 120 s, two steps in 120 s",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, "
    "at the end of the run",
)
@pytest.mark.slow
def test_a_killed_agent_of_an_engine_comes_back_and_costs_nothing_else(job: JobView) -> None:
    until("both engines serve", lambda: _serving(job) == 2, 120)
    before, restarts = uids(job), report(job)["restarts"]
    pod, step = job.pods("rollout")[0], step_of(job)
    instance = agent(pod)["instance"]
    kill_container(pod, "agent")
    until("another agent answers", lambda: agent(pod)["instance"] != instance, 60)
    until("its engine serves again", lambda: agent(pod)["state"] == "SERVING", 60)
    wait_step(job, step + 2, 120)
    assert uids(job) == before and report(job)["restarts"] == restarts


@pytest.mark.fault(
    row="8,27",
    point="all packets between an engine and the trainers are dropped",
    witness="packets counted by iptables, an aborted version in the agent's log",
    bound="a weight update takes 3 deadlines at most; three steps in 240 s",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, "
    "at the end of the run",
    partial="one engine only; no flapping, no share of the packets",
)
@pytest.mark.slow
def test_an_engine_cut_off_from_the_trainers_holds_them_up_no_longer_than_the_deadline(job: JobView) -> None:
    until("both engines serve", lambda: _serving(job) == 2, 120)
    before, restarts = uids(job), report(job)["restarts"]
    pod, step = job.pods("rollout")[1], step_of(job)
    with cut_off(pod, job.pods("trainer")):
        wait_step(job, step + 3, 240)
        # A version may first wait for the transfer group to form, then for the transfer and for the engines.
        links = [r["timing_s/update_weights_link"] for r in load(job.store()) if r["step"] > step]
        assert max(links, default=0) < JOIN_SECONDS + 3 * DEADLINE, links
        log = job.kubectl("logs", pod["metadata"]["name"], "-c", "agent", "--tail=200")
        assert "aborted version" in log, "the trainers were still reached"
        # The other engine may have given it a version that it could not get from the trainers.
        assert _behind(job, pod) or "from one of http" in log
    until("both engines serve", lambda: _serving(job) == 2, 120)
    wait_step(job, step_of(job) + 2, 120)
    assert uids(job) == before and report(job)["restarts"] == restarts


@pytest.mark.fault(
    row="8",
    point="a training pod sends at most 40 Mbit/s",
    witness="packets that tc held back",
    bound="two steps in 120 s",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, "
    "at the end of the run",
    partial="only a low rate",
)
@pytest.mark.slow
def test_a_slow_line_costs_time_and_nothing_else(job: JobView) -> None:
    before, restarts = uids(job), report(job)["restarts"]
    with slowed(job.pods("trainer")[0], "40mbit"):
        wait_step(job, step_of(job) + 2, 120)
        until("both engines serve", lambda: _serving(job) == 2, 20)
    assert uids(job) == before and report(job)["restarts"] == restarts


@pytest.mark.fault(
    row="13",
    point="SIGKILL of an engine's process after it has prepared an update",
    witness="an aborted version in the agent's log",
    bound="loss noticed in 60 s, two steps in 120 s",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, "
    "at the end of the run",
)
@pytest.mark.slow
def test_an_engine_killed_during_a_sync_is_left_out_and_comes_back(job: JobView) -> None:
    # On a busy machine the signal may come when the update has ended.
    assert any(_aborts(job) for _ in range(3)), "the engine did not die inside an update"


def _aborts(job: JobView) -> bool:
    """Kill an engine in an update; return whether the update was under way."""
    until("both engines serve", lambda: _serving(job) == 2, 240)
    pod = job.pods("rollout")[1]
    restarts, step = agent(pod)["restarts"], step_of(job)
    kill_during_sync(pod, main_process(pod, "engine"))
    until("the loss is noticed", lambda: agent(pod).get("restarts", 0) > restarts, 60, every=0.02)
    log = job.kubectl("logs", pod["metadata"]["name"], "-c", "agent", "--tail=20")
    wait_step(job, step + 2, 120)
    return "aborted version" in log


@pytest.mark.fault(
    row="10,27",
    point="SIGKILL of all engines, and their packets to the controller are dropped",
    witness="packets counted by iptables, reason Parked",
    bound="parked within 220 s, three steps in 300 s after it",
    partial="the comparison is part of another target's run",
)
@pytest.mark.slow  # three minutes; its parts are tested with the controller's loop
def test_trainers_wait_alive_while_all_engines_are_away(job: JobView) -> None:
    """Kill all engines, and hide them from the controller for longer than it waits for them in a step."""
    until("both engines serve", lambda: _serving(job) == 2, 120)
    before, seen, step = uids(job), report(job), step_of(job)
    engines, controllers = job.pods("rollout"), job.pods("controller")
    for pod in engines:
        kill_container(pod, "engine")
    with cut_off(engines[0], controllers), cut_off(engines[1], controllers):
        until("the trainers are parked", lambda: report(job)["waiting"], 2 * POOL_TIMEOUT + 60)
        until("the job's status says so", lambda: "Parked" in _reasons(job, "Ready"), 60)
        parked = report(job)
        assert parked["phase"] == "Recovering" and parked["message"].startswith("waiting since ")
        time.sleep(DEADLINE)
        assert report(job)["trainers"] == seen["trainers"], "the processes of the ranks were replaced"
    wait_step(job, step + 3, 300)
    after = report(job)
    assert {key: after[key] for key in ("trainers", "attempt", "restarts", "restored")} == {
        key: seen[key] for key in ("trainers", "attempt", "restarts", "restored")
    }
    assert (after["timesParked"], after["waiting"]) == (seen["timesParked"] + 1, "")
    assert uids(job) == before


@pytest.mark.fault(
    row="19",
    point="the operator's deployment is scaled to 0 during steps",
    witness="its pod is gone",
    bound="five steps in 180 s, status current 60 s after its return",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, "
    "at the end of the run; the pods are the same",
)
def test_the_operator_may_be_away(job: JobView) -> None:
    """Stop the operator; meanwhile an engine that a test before has killed recovers."""
    before, step = uids(job), step_of(job)
    scale_operator(job, 0)
    try:
        until("both engines serve", lambda: _serving(job) == 2, 240)
        wait_step(job, step + 5, 180)
        assert uids(job) == before
        seen = step_of(job)
    finally:
        scale_operator(job, 1)
    until("status catches up", lambda: (job.status().get("step") or 0) >= seen, 60)


@pytest.mark.fault(
    row="30",
    point="SIGKILL of a pod, rank, engine, agent, controller or the operator, at random in a tenth of the "
    "steps, for six minutes",
    witness="each victim is seen to be gone or replaced, and is printed with its step",
    bound="a step that was never finished before, 900 s after the last fault",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, "
    "at the end of the run",
)
def test_random_faults_for_minutes_end_no_job(job: JobView) -> None:
    # Without Redis the loss of Ray's head takes the pods along, which test_ray_head.py tests.
    soak = Soak(job, SEED, tuple(kind for kind in KINDS if kind != "ray head"))
    first, began, before = step_of(job), time.monotonic(), sum(gpu_seconds(job).values())
    soak.run(SOAK_MINUTES * 60)
    last = soak.wait_for_new_step()
    print(soak.counts(), soak.missed, last - first, flush=True)
    share = (sum(gpu_seconds(job).values()) - before) / (GPUS * (time.monotonic() - began))
    assert abs(share - 1) < 0.05, "the account of GPU time has a gap"
    assert soak.faults, "no fault was drawn"
    assert len(soak.faults) + len(soak.missed) >= SHARE * (last - first) / 2, "fewer faults than drawn"
    assert report(job)["restarts"]["job"] == 0, "a fault was taken for an error of the job"


def test_the_end_is_the_same_bit_for_bit(job: JobView, undisturbed: Undisturbed) -> None:
    steps = step_of(job) + REST
    _lower(job, steps)
    status = job.wait(ENDED, 900)
    assert status["phase"] == "Succeeded" and status["restarts"]["job"] == 0
    assert status["restarts"]["infrastructure"] >= 2, "of the gang and of the controller"
    calm = undisturbed.first(steps)
    Outcome.of(job.store(), steps).assert_same(calm)
    for step in range(1, steps + 1):
        stored = samples_of(job.store(), step)
        assert sorted(s["uid"] for s in stored if not s["dropped"]) == sorted(_consumed(job, step))
    found = recoveries(job.store())
    assert {"infrastructure", "controller"} <= {r["cause"] for r in found} and job.status()["lastRecovery"]
    assert all(0 < r["seconds"] < RECOVERED for r in found), found
    assert calm.records[-1]["weight_sync/link_failures"] == 0


def test_every_sample_was_consumed_exactly_once(job: JobView) -> None:
    lines = (job.store() / "ledger.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert max(Counter(e["uid"] for e in entries).values()) == 1
    assert sorted({e["uid"] for e in entries}) == sorted(
        f"{prompt}.{number}" for prompt in range(8 * job.status()["totalSteps"]) for number in range(16)
    )
    assert all(e["version"] == e["step"] - 1 for e in entries), "sampled with another policy"


def _behind(job: JobView, pod: dict[str, Any]) -> bool:
    """Return whether an engine does not serve, or serves an older version that it reports."""
    status = agent(pod)
    return bool(status["state"] != "SERVING" or status["weightVersion"] < step_of(job) - 1)


def _reasons(job: JobView, kind: str) -> list[str]:
    return [str(c["reason"]) for c in job.status().get("conditions", []) if c["type"] == kind]


def _serving(job: JobView) -> int:
    return sum(agent(pod).get("state") == "SERVING" for pod in job.pods("rollout"))


def _states_until_serving(pod: dict[str, Any], restarts: int, timeout: float = 240) -> list[str]:
    """Return the agent's states after ``restarts`` losses, from the last loss to SERVING."""

    def back() -> list[str] | None:
        seen = agent(pod)
        if seen.get("restarts", 0) <= restarts or seen["state"] != "SERVING":
            return None
        states: list[str] = seen["history"]
        return states[len(states) - 1 - states[::-1].index("RESTARTING") :]

    return list(until("engine is back", back, timeout, every=0.1))
