"""Events from status differences, pods on unhealthy nodes, and the cache behind both."""

from typing import Any

from grpo_operator.api.names import Owner
from grpo_operator.observe.cache import Cache
from grpo_operator.plan.status.events import job_event, pool_event
from support.objects import pod


def _status(phase: str, *true: tuple[str, str, str], **more: Any) -> dict[str, Any]:
    conditions = [{"type": t, "status": "True", "reason": r, "message": m} for t, r, m in true]
    return {"phase": phase, "conditions": conditions, **more}


def test_a_new_phase_is_one_event() -> None:
    before, after = _status("Starting"), _status("Training", ("Ready", "Training", ""))
    event = job_event(before, after)
    assert event is not None and (event.reason, event.warning) == ("Training", False)
    assert job_event(after, after) is None


def test_a_restart_event_starts_with_its_cause() -> None:
    before = _status("Training", restarts={"job": 0, "infrastructure": 0})
    message = ("Progressing", "Recovering", "rank 3 died")
    after = _status("Recovering", message, restarts={"job": 0, "infrastructure": 1})
    event = job_event(before, after)
    assert event is not None and event.reason == "TrainingRestarted" and event.warning
    assert event.message == "restart 1 caused by the infrastructure: rank 3 died"


def test_a_rollback_has_an_event_of_its_own() -> None:
    message = ("Progressing", "Recovering", "back to step 4")
    for before in ({"job": 0, "infrastructure": 0}, {"job": 0, "infrastructure": 0, "rollback": 1}):
        count = before.get("rollback", 0) + 1
        after = _status("Recovering", message, restarts=before | {"rollback": count})
        event = job_event(_status("Training", restarts=before), after)
        assert event is not None and event.reason == "TrainingRolledBack" and event.warning
        assert event.message == f"rollback {count}: back to step 4"


def test_a_refusal_is_a_warning_with_its_remedy() -> None:
    after = _status("Pending", ("Stalled", "Infeasible", "spec.trainer.nodes=64: add nodes"))
    event = job_event({}, after)
    assert event is not None and event.warning and event.message == "spec.trainer.nodes=64: add nodes"
    changed = _status("Pending", ("Stalled", "Infeasible", "spec.trainer.nodes=32: add nodes"))
    event = job_event(after, changed)
    assert event is not None and event.reason == "Infeasible"


def test_flapping_engines_are_one_degraded_event() -> None:
    whole = _status("Training")
    one = _status("Training", ("Degraded", "PoolsIncomplete", "engines 7/8"))
    two = _status("Training", ("Degraded", "PoolsIncomplete", "engines 6/8"))
    event = job_event(whole, one)
    assert event is not None and event.reason == "PoolsIncomplete"
    assert job_event(one, two) is None


def test_a_lack_of_rdma_is_an_event_also_of_a_job_whose_engines_start() -> None:
    whole = _status("Starting")
    starting = _status("Starting", ("Degraded", "PoolsIncomplete", "engines 0/8"))
    slow = _status("Starting", ("Degraded", "NoRdma", "NCCL uses sockets in trainer-0; engines 0/8"))
    for before in (whole, starting):
        event = job_event(before, slow)
        assert event is not None and (event.reason, event.warning) == ("NoRdma", True)
    later = _status("Starting", ("Degraded", "NoRdma", "NCCL uses sockets in trainer-0; engines 8/8"))
    assert job_event(slow, later) is None, "it is told once"


def test_a_pool_event_names_the_writer() -> None:
    bound = pool_event({}, {"boundTo": "a"})
    released = pool_event({"boundTo": "a"}, {})
    assert bound is not None and bound.reason == "Bound" and "GRPOJob a" in bound.message
    assert released is not None and released.reason == "Released"


def test_the_cache_keeps_needed_fields_and_drops_whole_owners() -> None:
    cache, owner = Cache(), Owner("GRPOJob", "default", "tiny-moe")
    made = pod("trainer")
    made["metadata"] |= {"namespace": "default", "managedFields": [{"manager": "x"}]}
    limits = {"limits": {"nvidia.com/gpu": "8", "cpu": "1"}}
    made["spec"] = {"nodeName": "n1", "containers": [{"name": "a"}, {"name": "b", "resources": limits}]}
    cache.store("pods", {"type": "ADDED", "object": made})
    (kept,) = cache.pods_of(owner)
    assert kept["spec"] == {"nodeName": "n1", "gpus": 8} and "managedFields" not in kept["metadata"]
    assert cache.nodes_of_others({owner}) == set() and cache.nodes_of_others(set()) == {"n1"}
    assert cache.gpus_of_others({owner}) == {} and cache.gpus_of_others(set()) == {"n1": 8}
    assert cache.keys("pods") == {("default", "tiny-moe-trainer-0")}
    cache.store("pods", {"type": "DELETED", "object": made})
    assert cache.pods_of(owner) == () and cache.keys("pods") == set()


def test_a_cached_ray_cluster_is_restored_whole() -> None:
    cache = Cache()
    made: dict[str, Any] = {
        "metadata": {"name": "a", "namespace": "default", "managedFields": [{}], "annotations": {"x": "1"}},
        "spec": {"suspend": True, "workerGroupSpecs": [{"groupName": "trainer"}]},
        "status": {"state": "ready"},
    }
    cache.store("rayclusters", {"type": "ADDED", "object": made})
    kept = cache.ray_clusters[("default", "a")]
    assert kept["spec"] == {"suspend": True} and kept["status"] == {"state": "ready"}
    live = cache.live("rayclusters", ("default", "a"))
    assert live is not None and live["spec"] == made["spec"] and "managedFields" not in live["metadata"]
    assert cache.live("rayclusters", ("default", "b")) is None


def _named(uid: str, created: str) -> dict[str, Any]:
    metadata = {"name": "a", "namespace": "default", "uid": uid, "creationTimestamp": created}
    return {"metadata": metadata, "spec": {"rollout": {}}}


def test_late_events_of_a_deleted_job_do_not_change_its_successor() -> None:
    cache = Cache()
    old, new = _named("1", "2026-01-01T00:00:00Z"), _named("2", "2026-01-01T00:00:05Z")
    cache.store("grpojobs", {"type": "ADDED", "object": old})
    cache.store("grpojobs", {"type": "ADDED", "object": new})
    for late in ("MODIFIED", "DELETED"):
        cache.store("grpojobs", {"type": late, "object": old})
        assert cache.jobs[("default", "a")]["metadata"]["uid"] == "2"
    cache.store("grpojobs", {"type": "DELETED", "object": new})
    assert not cache.jobs
