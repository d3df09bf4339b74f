"""Ray's head, or a node of ranks, is killed in the middle of a job with real ranks: no bit changes."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.restart_policy import GRACE_SECONDS
from support.job_outcome import outcome
from support.ray_cluster import SLOW_START, RayCluster

# Three jobs with real ranks, and the nodes of Ray, which start one after the other.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
PROGRAM = Path(__file__).parents[1] / "support" / "departing_job.py"
STEPS, AWAY = 24, 6
TAKEN_OVER = 240.0  # seconds on two cores that run everything: notice, start elsewhere, finish the step
CONTROLLER, *NODES = (f"127.0.0.{number}" for number in range(11, 16))
SUCCEEDED = f"Succeeded {STEPS}: {STEPS} steps done"


def _environment(folder: Path) -> dict[str, str]:
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    paths = [str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", ""), *sys.path]
    absolute = [str(Path(path).resolve()) for text in paths for path in text.split(os.pathsep) if path]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(absolute),
        "GRPO_WEIGHTS_DIR": str(folder / "weights"),
        "OMP_NUM_THREADS": "1",
        **SLOW_START,
    }


@contextmanager
def _job(folder: Path, *cluster: str) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, str(PROGRAM), str(folder / "job"), str(STEPS)]
    command += ["--cluster", *cluster] if cluster else []
    with (folder / "job.log").open("w") as log:
        process = subprocess.Popen(
            command, env=_environment(folder), stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _await_update(process: "subprocess.Popen[str]", step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == f"updates {step}":
            return
    raise AssertionError(f"step {step} never came")


def _last_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return [line.strip() for line in process.stdout][-1]


def _steps(folder: Path) -> int:
    return len((folder / "job" / "metrics.jsonl").read_text().splitlines())


def _record(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "job" / "run.json").read_text()))


@contextmanager
def _cluster(folder: Path, *nodes: int) -> Iterator[RayCluster]:
    """Start Ray with a node for the controller, and others. ``nodes``: ranks that fit on each."""
    sizes = {CONTROLLER: 0} | dict(zip(NODES, nodes, strict=False))
    ray = RayCluster(folder, sizes, _environment(folder / "node"))
    try:
        yield ray
    finally:
        ray.end()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the results of a job that nobody disturbs."""
    folder = tmp_path_factory.mktemp("calm")
    with _cluster(folder, 2) as ray, _job(folder, ray.address, CONTROLLER) as process:
        assert _last_line(process) == SUCCEEDED
    return outcome(folder)


@pytest.mark.fault(
    row="ray-head",
    point="SIGKILL of all processes of Ray's head during a step",
    witness="names of the killed processes; the port is closed",
    bound="steps end within 6 s without a head; no attempt ends",
    compared="all steps and the ledger of an undisturbed run, bitwise",
)
def test_ranks_outlive_a_head_whose_state_is_in_redis(tmp_path: Path, calm: Any) -> None:
    with _cluster(tmp_path, 2) as ray, _job(tmp_path, ray.address, CONTROLLER) as process:
        _await_update(process, 8)
        assert {"gcs_server", "raylet"} <= set(ray.kill_head())
        before = _steps(tmp_path)
        time.sleep(AWAY)
        assert _steps(tmp_path) > before, "no step ended while the head was away"
        ray.start_head()
        assert _last_line(process) == SUCCEEDED
    record = _record(tmp_path)
    assert (record["attempt"], record["infrastructure_restarts"]) == (1, 0), "the ranks were restarted"
    assert outcome(tmp_path) == calm


@pytest.mark.fault(
    row="5",
    point="SIGKILL of all processes of a rank's node during an update, twice",
    witness="names of the killed processes; both restarts are counted",
    bound="next step in 240 s",
    compared="all steps and the ledger of an undisturbed run, bitwise",
    partial="connections are closed, as the loss of power does not",
)
def test_a_spare_node_takes_over_from_a_lost_one(tmp_path: Path, calm: Any) -> None:
    """Kill a node of a rank, with a spare one; then the next, without, and start another at once."""
    with _cluster(tmp_path, 1, 1, 1) as ray, _job(tmp_path, ray.address, CONTROLLER) as process:
        seconds = []
        for step, victim, another in ((8, NODES[0], ""), (14, NODES[1], NODES[3])):
            _await_update(process, step)
            assert "raylet" in ray.kill_node(victim)
            started = time.monotonic()
            if another:
                ray.add_node(another, 1)
            _await_update(process, step + 1)
            seconds.append(round(time.monotonic() - started, 1))
        assert _last_line(process) == SUCCEEDED
    assert max(seconds) <= TAKEN_OVER
    record = _record(tmp_path)
    assert (record["attempt"], record["infrastructure_restarts"], record["job_restarts"]) == (3, 2, 0)
    assert outcome(tmp_path) == calm
    print(f"next step after {seconds[0]} s with a spare node, after {seconds[1]} s with a new one")


@pytest.mark.fault(
    row="5",
    point="all processes of a rank's node stop at the same time during an update and never go on",
    witness="state of the processes; the restart is counted",
    bound="next step in 240 s",
    compared="all steps and the ledger of an undisturbed run, bitwise",
)
def test_a_spare_node_takes_over_from_one_without_power(tmp_path: Path, calm: Any) -> None:
    """No connection of the node is closed, and nothing of it answers any more."""
    with _cluster(tmp_path, 1, 1, 1) as ray, _job(tmp_path, ray.address, CONTROLLER) as process:
        _await_update(process, 8)
        assert "raylet" in ray.stop_node(NODES[0])
        started = time.monotonic()
        _await_update(process, 9)
        seconds = time.monotonic() - started
        assert _last_line(process) == SUCCEEDED
    assert seconds <= TAKEN_OVER
    record = _record(tmp_path)
    assert (record["attempt"], record["infrastructure_restarts"], record["job_restarts"]) == (2, 1, 0)
    assert outcome(tmp_path) == calm
    print(f"next step after {seconds:.1f} s")


@pytest.mark.fault(
    row="26",
    point="SIGTERM of a training pod's shell during an update",
    witness="the end of the attempt says that the pod is being deleted and what was saved",
    bound="the pod ends in 60 s, the smallest default of graceSeconds; next step in 240 s",
    compared="all steps and the ledger of an undisturbed run, bitwise",
)
def test_a_training_pod_that_gets_sigterm_leaves_when_its_steps_are_saved(tmp_path: Path, calm: Any) -> None:
    with _cluster(tmp_path) as ray:
        for number, node in enumerate(NODES[:3]):
            weights = tmp_path / f"weights-{number}"
            weights.mkdir()
            ray.add_node(node, 1, weights)
        with _job(tmp_path, ray.address, CONTROLLER) as process:
            _await_update(process, 9)  # a checkpoint was due after step 8, and the next one after step 12
            started = time.monotonic()
            pod = ray.terminate_pod(NODES[0])
            pod.wait(GRACE_SECONDS)
            _await_update(process, 11)
            seconds = time.monotonic() - started
            assert _last_line(process) == SUCCEEDED
    assert seconds <= TAKEN_OVER
    saved = rf"pod \S+ \({NODES[0]}\) is being deleted; the checkpoint of step (9|10) is complete"
    assert re.search(saved, (tmp_path / "job.log").read_text())
    record = _record(tmp_path)
    assert (record["attempt"], record["infrastructure_restarts"], record["job_restarts"]) == (2, 1, 0)
    assert outcome(tmp_path) == calm
    print(f"step 11 after {seconds:.1f} s")
