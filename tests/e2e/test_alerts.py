"""The alerts of the chart see, in a real Prometheus, what happens to a real job."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.follow import JobView
from grpo_devcluster.install import CHART
from grpo_devcluster.paths import JOB_DATA
from support.faults import cut_off, scale_operator, step_of, until, wait_step
from support.jobs import Start
from support.prometheus import Prometheus, scraped
from support.unsteady_store import HANG, UnsteadyStore, mounted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
WAITS = 5  # metrics.phaseSeconds.Waiting
EVERY = 2  # steps from checkpoint to checkpoint
# Seconds until Prometheus has seen it: a scrape takes place every 15 s, a rule is evaluated every 5 s.
SEEN, GONE = 120.0, 180.0
# Series of GPUs, and of what a job does only when it fails.
ABSENT = ("grpo_gpu_", "DCGM_", "grpo_job_restarts_total")


@pytest.fixture(scope="module")
def store(kubeconfig: Path) -> Iterator[UnsteadyStore]:
    """The devcluster's folder of jobs, mounted a second time."""
    with mounted(JOB_DATA, JOB_DATA.with_name("hanging"), kubeconfig.with_name("hanging-mode")) as store:
        yield store


@pytest.fixture(scope="module")
def server(
    kubeconfig: Path, chart_values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    with scraped(chart_values, folder, phaseSeconds={"Waiting": WAITS}) as server:
        yield server


@pytest.fixture(scope="module")
def job(server: Prometheus, start: Start, store: UnsteadyStore) -> JobView:
    checkpoint = {"store": {"path": str(store.path)}, "everySteps": EVERY, "memory": {"everySteps": 1}}
    job = start(
        "watched", steps=100_000, checkpoint=checkpoint, weightSync={"timeoutSeconds": 5},
        restartPolicy={"backoffSeconds": 1},
        observability={"thresholds": [{"metric": "actor/grad_norm", "minimum": 0.0, "maximum": 1e9}]},
    )  # fmt: skip
    wait_step(job, 2 * EVERY, 900)
    return job


def test_each_rule_finds_the_series_that_it_is_about(server: Prometheus, job: JobView) -> None:
    rules = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())["groups"]
    expressions = {rule["alert"]: rule["expr"] for group in rules for rule in group["rules"]}
    wanted = {name for text in expressions.values() for name in _metrics(text)}
    here = {name for name in wanted if not name.startswith(ABSENT)}
    assert len(here) > 15
    until("all series", lambda: not [name for name in here if not server.query(name)], SEEN)
    assert {rule["health"] for rule in server.alerts().values()} == {"ok"}
    assert not [name for name in expressions if _raised(server, name)]


def test_a_store_that_hangs_leaves_checkpoints_behind(
    server: Prometheus, job: JobView, store: UnsteadyStore
) -> None:
    with store.is_(HANG):
        step = step_of(job)
        (alert,) = until("the alert waits", lambda: _raised(server, "GRPOCheckpointsBehind"), 300)
        assert alert["labels"]["name"] == job.name
        assert step_of(job) > step + EVERY, "the steps go on meanwhile"
    until("a checkpoint ends the alert", lambda: not _raised(server, "GRPOCheckpointsBehind"), GONE)


def test_updates_that_fail_for_an_engine_are_seen(server: Prometheus, job: JobView) -> None:
    pod = job.pods("rollout")[1]
    with cut_off(pod, job.pods("trainer")):
        until("the links' alert", lambda: _raised(server, "GRPOLinksFail"), 600)
        (alert,) = until("the updates' alert", lambda: _raised(server, "GRPOWeightUpdatesFail"), 600)
    assert alert["labels"]["pod"] == pod["metadata"]["name"]


def test_a_job_that_waits_for_too_long_is_named(server: Prometheus, job: JobView, start: Start) -> None:
    waits = start("without-pool", rollout={"poolRef": {"name": "nowhere"}})
    (alert,) = until("the alert fires", lambda: _raised(server, "GRPOJobPhaseTooLong"), SEEN)
    assert (alert["labels"]["name"], alert["labels"]["phase"]) == (waits.name, "Waiting")
    assert alert["state"] == "firing"
    waits.kubectl("delete", "grpojob", waits.name)
    until("the alert ends with the job", lambda: not _raised(server, "GRPOJobPhaseTooLong"), GONE)


def test_an_operator_that_is_away_is_missed(server: Prometheus, job: JobView) -> None:
    scale_operator(job, 0)
    try:
        until("the alert waits", lambda: _raised(server, "GRPOOperatorAway"), SEEN)
    finally:
        scale_operator(job, 1)
    until("the operator is seen", lambda: not _raised(server, "GRPOOperatorAway"), GONE)
    wait_step(job, step_of(job) + 2, 240)


def _metrics(expression: str) -> set[str]:
    """Return the names of the project's series in an expression."""
    parts = expression.replace("(", " ").replace("{", " ").replace("[", " ").replace(")", " ").split()
    return {part for part in parts if part.startswith(("grpo_", "DCGM_"))}


def _raised(server: Prometheus, name: str) -> list[dict[str, Any]]:
    """Return what an alert is about now: firing, or waiting until its ``for`` is over."""
    return list(server.alerts()[name]["alerts"])
