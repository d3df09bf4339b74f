"""A whole run: it learns, its trainer and engines agree, and without a learning rate it does not."""

from typing import Any

import httpx
from conftest import ENDED, STEPS, Start, store_of
from faults import until, wait_step

from grpo_devcluster.report import GAP, load, summarise

GAP_BOUND = 1e-4  # fp32 on both sides; measured 3e-7


def test_the_reward_rises(undisturbed: list[dict[str, Any]]) -> None:
    figures = summarise(undisturbed)
    assert figures["steps"] == STEPS
    assert figures["p_value"] < 0.01, figures
    assert figures["reward_last_quarter"] > figures["reward_first_quarter"]


def test_trainer_and_engines_agree_through_every_sync(undisturbed: list[dict[str, Any]]) -> None:
    gaps = [r[GAP] for r in undisturbed]
    assert max(gaps) < GAP_BOUND
    half = len(gaps) // 2  # flat: no drift from sync to sync
    assert max(gaps[half:]) < 10 * max(gaps[:half])


def test_without_learning_rate_no_rise_and_suspend_and_delete(start: Start) -> None:
    """One job, three behaviours, in the order of its life."""
    job = start("frozen", steps=60, lr=0.0)
    wait_step(job, 7)
    _suspend_and_resume(job)
    status = job.wait(ENDED, 900)
    assert status["phase"] == "Succeeded"
    records = load(store_of(job))
    assert [r["step"] for r in records] == list(range(1, 61))
    assert len({tuple(r["weights"]) for r in records}) == 60  # the expert bias still moves
    assert summarise(records)["p_value"] > 0.01
    _delete_leaves_nothing(job)


def _suspend_and_resume(job: Any) -> None:
    job.kubectl("patch", "grpojob", job.name, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    status = job.wait(frozenset({"Suspended"}), 180)
    saved = status["lastCheckpoint"]
    assert job.pods() == [] and saved["complete"] and saved["step"] == status["step"]
    job.kubectl("patch", "grpojob", job.name, "--type=merge", "-p", '{"spec":{"suspend":false}}')
    status = job.wait(frozenset({"Training", *ENDED}), 300)
    assert status["step"] >= saved["step"]


def _delete_leaves_nothing(job: Any) -> None:
    kinds = "grpojobs,rolloutpools,rayclusters,configmaps,services,pods"
    selector = f"rl.grpo.dev/job={job.name}"
    job.kubectl("delete", "grpojob", job.name)
    until("everything is gone", lambda: not job.kubectl("get", kinds, "-l", selector, "-o", "name"), 60)


def test_versions_agree_after_every_sync(start: Start) -> None:
    """While a job trains, an engine that serves does so at the controller's version."""
    job = start("versions", steps=12)
    seen: set[int] = set()
    while (phase := job.status().get("phase")) not in ENDED:
        assert phase != "Failed"
        for engine in job.pool().get("engines", []):
            if engine["state"] == "SERVING":
                seen.add(engine["weightVersion"])
        _ask_engines(job)
    assert len(seen) >= 3 and max(seen) <= 12
    final = job.status()
    assert final["weightVersion"] == 12 and final["weights"] == "v12"
    job.kubectl("delete", "grpojob", job.name)


def _ask_engines(job: Any) -> None:
    """What an engine reports itself is never newer or older than what its agent says it serves."""
    for pod in job.pods("rollout"):
        address = pod["status"].get("podIP")
        try:
            before = httpx.get(f"http://{address}:9000/v1/status", timeout=2).json()
            engine = httpx.get(f"http://{address}:30000/model_info", timeout=2).json()
            after = httpx.get(f"http://{address}:9000/v1/status", timeout=2).json()
        except (httpx.HTTPError, ValueError):
            continue
        if (
            before["state"] == after["state"] == "SERVING"
            and before["weightVersion"] == after["weightVersion"]
        ):
            assert engine["weight_version"] == str(before["weightVersion"])
