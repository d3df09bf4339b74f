"""Failures of ranks by node: who is blamed, how many nodes are avoided, and when they are forgotten."""

from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.restart_policy import AvoidNodesPolicy
from grpo_worker.controller.live_fields import LiveFields
from grpo_worker.controller.recovery.failures import FailureHandler
from grpo_worker.controller.recovery.node_failures import NodeLog, noted, report
from grpo_worker.controller.recovery.run_record import RunRecord
from grpo_worker.controller.training.gang_nodes import PoolNode, choose
from grpo_worker.controller.training.worker_group import GangError, WorkerGroup
from support.clocks import FakeClock
from support.stand_in_ranks import Methods, StandInProcesses

POLICY, HOUR = AvoidNodesPolicy(), 3600.0


def _avoided(log: NodeLog, nodes: int, now: float = 0.0, **policy: int) -> list[str]:
    rules = POLICY.model_copy(update=policy)
    return [one.node for one in report(log, now, nodes, rules) if one.avoided]


def _log(**times: int) -> NodeLog:
    log: NodeLog = {}
    for node, count in times.items():
        for number in range(count):
            log = noted(log, node, float(number), f"rank {number} died", POLICY)
    return log


def test_a_node_is_avoided_after_two_failures() -> None:
    found = report(_log(a=1, b=2), 0.0, 32, POLICY)
    assert [(one.node, one.failures, one.reason, one.avoided) for one in found] == [
        ("b", 2, "rank 1 died", True),
        ("a", 1, "rank 0 died", False),
    ]


def test_errors_of_the_jobs_own_code_do_not_exclude_the_cluster() -> None:
    everywhere = _log(**{f"n{number}": 5 for number in range(32)})
    assert len(_avoided(everywhere, nodes=32)) == 3
    assert len(_avoided(everywhere, nodes=2)) == 1, "at least one"
    assert _avoided(everywhere, nodes=32, max_nodes_percent=0) == []


def test_failures_are_forgotten_after_the_window() -> None:
    log = _log(a=2)
    assert _avoided(log, 32, now=23 * HOUR) == ["a"] and _avoided(log, 32, now=25 * HOUR) == []
    assert "a" not in noted(log, "b", 25 * HOUR, "late", POLICY)


def _handler(folder: Path) -> FailureHandler:
    record = RunRecord.load(folder / "run.json")
    return FailureHandler(record, LiveFields(1), nodes=32, wall=lambda: 0.0)


def test_failures_outlive_the_controller_until_a_user_has_them_forgotten(tmp_path: Path) -> None:
    first = _handler(tmp_path)
    for _ in range(2):
        first.count("rank 3 died", "infrastructure", node="n7")
    first.count("no node alone", "infrastructure")
    second = _handler(tmp_path)
    assert second.avoided_nodes == {"n7"}
    second.forget_nodes("replaced")
    assert second.avoided_nodes == frozenset() and second.counts()["node_failures"] == []
    second.count("rank 3 died", "infrastructure", node="n7")
    second.forget_nodes("replaced")  # the operator sends the value of the annotation to each controller
    assert [one.failures for one in second.counts()["node_failures"]] == [1]


def test_a_resumed_job_may_use_all_nodes_again(tmp_path: Path) -> None:
    first = _handler(tmp_path)
    for _ in range(2):
        first.count("rank 3 died", "infrastructure", node="n7")
    first.resume(1)
    assert _handler(tmp_path).avoided_nodes == frozenset()


def _blamed(**script: Any) -> str:
    """Return the pod that a gang of 256 ranks in 32 pods blames for a failed call, or ""."""
    dead = script.pop("dead", ())
    processes = StandInProcesses(FakeClock(), 256, **script)
    gang = WorkerGroup(Methods, processes, 240.0, clock=processes.clock)
    processes.die(*dead)
    with pytest.raises(GangError) as caught:
        gang.call("work")
    return caught.value.host.pod if caught.value.host else ""


def test_the_node_of_ranks_that_died_alone_is_blamed() -> None:
    hours = {"seconds": lambda _index, method: 3600.0 if method == "work" else 0.0}
    assert _blamed(dead=(17, 18), **hours) == "trainer-2"
    assert _blamed(dead=(17, 30), **hours) == "", "two nodes"


def test_the_node_of_a_rank_that_raised_alone_is_blamed() -> None:
    wrong = RuntimeError("CUDA error: an illegal memory access was encountered")

    def seconds(index: int, method: str) -> float:
        return 10.0 if method == "work" and index == 17 else 3600.0 if method == "work" else 0.0

    assert _blamed(errors={17: wrong}, seconds=seconds) == "trainer-2"
    assert _blamed(errors=dict.fromkeys(range(256), wrong)) == "", "an error of the job's own code"


def test_a_silent_process_is_blamed() -> None:
    processes = StandInProcesses(FakeClock(), 256, lambda _index, method: 36000.0 * (method == "work"))
    gang = WorkerGroup(Methods, processes, 240.0, clock=processes.clock)
    processes.frozen.add(40)
    with pytest.raises(GangError) as caught:
        gang.call("work")
    assert caught.value.host is not None and caught.value.host.pod == "trainer-5"


def test_a_gang_takes_a_spare_in_the_place_of_a_node_that_fails() -> None:
    a, b, c = (PoolNode(name, f"10.0.0.{number}", 1) for number, name in enumerate("abc"))
    assert choose([a, b, c], 2, {"a", "b"}, failing={a.address}) == [b, c]
    assert choose([a, b], 2, {"a", "b"}, failing={a.address}) == [b, a], "there are no others"
