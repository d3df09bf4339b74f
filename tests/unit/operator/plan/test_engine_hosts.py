"""Status of an engine of several pods: leader, workers, and errors of any of its pods."""

from typing import Any

from grpo_operator.api import names
from grpo_operator.api.messages import AgentStatus, EngineHost
from grpo_operator.api.v1alpha1.status import EngineState, HostState
from grpo_operator.plan.observed import Observed
from support.objects import pod


def host(engine: str, index: int, failing: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    made = pod(names.ROLLOUT)
    made["metadata"]["name"] = f"{engine}-{index}"
    made["metadata"]["labels"] |= {names.REPLICA_NAME: engine, names.HOST_INDEX: str(index)}
    if failing:
        made["status"]["failing"] = failing
    return made


def report(**fields: Any) -> AgentStatus:
    hosts = [
        EngineHost(host=0, pod="a-0", state=HostState.RUNNING),
        EngineHost(host=1, pod="a-1", state=HostState.LOST),
    ]
    return AgentStatus(name="a-0", state=EngineState.RESTARTING, hosts=hosts, **fields)


def test_an_engine_counts_once_and_shows_its_hosts_with_their_roles() -> None:
    pods = (host("a", 1), host("a", 0), host("b", 0), host("b", 1))
    first, second = Observed(pods=pods, agents={"a-0": report(reason="a-1: no report for 60 s")}).engines()
    assert [h.wire() for h in first.hosts or []] == [
        {"pod": "a-0", "role": "leader", "host": 0, "state": "Running"},
        {"pod": "a-1", "role": "worker", "host": 1, "state": "Lost"},
    ]
    assert first.message == "a-1: no report for 60 s"
    assert (second.name, second.state, second.hosts) == ("b-0", EngineState.RESTARTING, None)


def test_a_failing_container_of_a_further_host_is_named_and_belongs_to_its_engine() -> None:
    failure = {"name": "agent", "restarts": 3, "reason": "OOMKilled", "error": "out of memory"}
    pods = (host("a", 0), host("a", 1, [failure]), host("b", 0))
    first, second = Observed(pods=pods, agents={"a-0": report(reason="waits")}).engines()
    assert first.message == "a-1, container agent: OOMKilled after 3 restarts: out of memory"
    assert second.message is None
