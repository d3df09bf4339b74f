"""Resources that the plan derives where a spec sets none, and those that it keeps."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.api.v1alpha1.status import LayoutStatus
from grpo_operator.plan.capacity.feasibility import PodRequest, quantity
from grpo_operator.plan.capacity.pod_requests import job_requests, pool_requests
from grpo_operator.plan.planner import resources
from grpo_operator.plan.planner.pool_checks import check_pool
from grpo_operator.plan.planner.resolve import RefusedError, resolve
from grpo_operator.plan.planner.resources import completed_pool
from grpo_operator.plan.planner.settled import with_layout, with_resources
from grpo_operator.plan.status.grpojob import layout_status
from grpo_operator.render.ray_cluster import job_cluster, pool_cluster
from grpo_operator.settings import OperatorSettings
from support.objects import job, pool_of, spec_of

MANIFESTS = Path(__file__).parents[4] / "manifests"
SETTINGS = OperatorSettings("t:1", "r:1")
GIB = 2**30
NODE_CPUS, NODE_MEMORY = 2.0, 22 * GIB  # of the devcluster on the smallest machine


def _large(**changes: Any) -> GRPOJobSpec:
    body = yaml.safe_load((MANIFESTS / "deepseek-v3-512xh100.yaml").read_text())["spec"]
    return GRPOJobSpec.model_validate(body | changes)


def _accepted(spec: GRPOJobSpec) -> LayoutStatus:
    return layout_status(resolve(spec, pool_of(spec)))


def _requests(spec: GRPOJobSpec) -> dict[str, PodRequest]:
    layout = _accepted(spec)
    own = with_resources(pool_of(spec), layout)
    return {request.pool: request for request in job_requests(with_layout(spec, layout), own)}


def _rendered(spec: GRPOJobSpec, layout: LayoutStatus) -> dict[str, dict[str, Any]]:
    """Return the main container of each pool's pods."""
    own = with_resources(pool_of(spec), layout)
    cluster = job_cluster(job(), with_layout(spec, layout), own, SETTINGS, False).wire()
    groups = cluster["spec"]["workerGroupSpecs"]
    return {group["groupName"]: group["template"]["spec"]["containers"][0] for group in groups}


def test_a_large_job_gets_what_its_plan_needs() -> None:
    spec = _large()
    plan = resolve(spec, pool_of(spec))
    assert plan.host is not None
    containers = _rendered(spec, layout_status(plan))
    limit = {name: quantity(c["resources"]["limits"]["memory"]) for name, c in containers.items()}
    assert plan.host.trainer + plan.host.shared < limit["trainer"] < 1.1 * plan.host.trainer
    assert plan.host.controller < limit["controller"] < 2 * plan.host.controller
    assert plan.host.engine < limit["rollout"]
    assert all("cpu" not in c["resources"]["limits"] for c in containers.values())
    requests = _requests(spec)
    assert 64 > requests["trainer"].cpu > 6 * 8 and requests["controller"].cpu == 2 + 8192 / 1024


def test_requests_of_cpu_follow_the_gpus_of_a_pod_and_shared_gpus_share_the_cores() -> None:
    eight = yaml.safe_load((MANIFESTS / "qwen3-8b-8gpu.yaml").read_text())["spec"]
    two = yaml.safe_load((MANIFESTS / "qwen3-8b-2gpu.yaml").read_text())["spec"]
    big, small = (_requests(GRPOJobSpec.model_validate(body)) for body in (eight, two))
    agent = 0.05
    for pool in ("trainer", "rollout"):
        assert big[pool].cpu == pytest.approx(24 + agent)
        assert small[pool].cpu == pytest.approx(6 + agent)


def test_what_is_kept_in_host_memory_raises_the_limit_of_the_training_pods() -> None:
    plain, tiered = _large(), _large(checkpoint={"store": {"path": "/s"}, "memory": {"replicas": 2}})
    host = resolve(tiered, pool_of(tiered)).host
    assert host is not None and host.copies > 100 * GIB
    more = _requests(tiered)["trainer"].memory - _requests(plain)["trainer"].memory
    assert more == pytest.approx(host.copies + host.trainer_agent, abs=2 * GIB)


def _agent_limits(spec: GRPOJobSpec, layout: LayoutStatus) -> dict[str, float]:
    """Return the memory of the agent in each pool's pods."""
    own = with_resources(pool_of(spec), layout)
    cluster = job_cluster(job(), with_layout(spec, layout), own, SETTINGS, False).wire()
    result = {}
    for group in cluster["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            if container["name"] == "agent":
                result[group["groupName"]] = quantity(container["resources"]["limits"]["memory"])
    return result


def test_agents_have_room_for_what_they_keep() -> None:
    plain = _large()
    assert _agent_limits(plain, _accepted(plain)) == {"trainer": GIB / 2, "rollout": GIB / 2}
    kept = _large(
        weightSync={"mode": "delta"}, checkpoint={"store": {"path": "/s"}, "memory": {"replicas": 1}}
    )
    plan = resolve(kept, pool_of(kept))
    assert plan.host is not None and plan.host.agent > 600 * GIB < plan.host.trainer_agent
    limits = _agent_limits(kept, layout_status(plan))
    assert limits == pytest.approx({"trainer": plan.host.trainer_agent, "rollout": plan.host.agent}, abs=GIB)
    more = _requests(kept)["rollout"].memory - _requests(plain)["rollout"].memory
    assert more == limits["rollout"] - GIB / 2, "the feasibility check counts it too"


def test_an_agents_memory_of_the_spec_is_used() -> None:
    body = _large(weightSync={"mode": "delta"}).wire()
    body["rollout"]["template"]["agentResources"] = {"memory": "700Gi"}
    body["trainer"]["agentResources"] = {"memory": "1Gi"}
    spec = GRPOJobSpec.model_validate(body)
    assert _agent_limits(spec, _accepted(spec)) == {"trainer": GIB, "rollout": 700 * GIB}


@pytest.mark.parametrize("sync", [{"mode": "delta"}, {"transport": "nixl"}])
def test_agents_of_a_pool_without_a_job_have_room_for_a_version(sync: dict[str, str]) -> None:
    spec = _large()
    body = pool_of(spec).wire() | {"model": spec.model.wire()}
    sizes = []
    for changes in ({}, {"weightSync": sync}):
        pool = completed_pool(RolloutPoolSpec.model_validate(body | changes))
        sizes.append(quantity(pool.agent_resources.memory or ""))
    assert sizes[0] == GIB / 2 and sizes[1] > 600 * GIB


def test_a_pool_whose_agents_have_no_room_for_a_version_is_refused() -> None:
    spec = _large()
    body = pool_of(spec).wire() | {"model": spec.model.wire() | {"volume": None}}
    body |= {"weightSync": {"mode": "delta"}, "agentResources": {"memory": "628Gi"}}
    check_pool(RolloutPoolSpec.model_validate(body))
    short = RolloutPoolSpec.model_validate(body | {"agentResources": {"memory": "600Gi"}})
    with pytest.raises(RefusedError, match=r"^spec\.agentResources\.memory=600Gi: .* set it to 628Gi$"):
        check_pool(short)


def test_an_agent_with_a_model_that_only_the_pods_can_read_has_room_for_what_fits_on_the_gpus() -> None:
    body = _large(
        weightSync={"mode": "delta"}, checkpoint={"store": {"path": "/s"}, "memory": {"replicas": 1}}
    ).wire()
    del body["model"]["architecture"]
    spec = GRPOJobSpec.model_validate(body)
    limits = _agent_limits(spec, _accepted(spec))
    gpus = pool_of(spec).engine.tensor_parallel
    assert 0.5 * gpus * 80e9 < limits["rollout"] < gpus * 86e9
    assert limits["trainer"] > 3 * 8 * 80e9


def test_what_the_user_sets_is_kept_and_the_rest_is_planned() -> None:
    spec = _large(
        controller={"resources": {"cpu": "3"}}, scheduling={"sharedMemory": "40Gi"},
    )  # fmt: skip
    planned = _accepted(spec).resources
    assert planned is not None
    completed = with_layout(spec, _accepted(spec))
    assert completed.controller.resources.requests() == {"cpu": "3", "memory": planned.controller.memory}
    assert completed.scheduling.shared_memory == "40Gi" != planned.shared_memory


def test_routed_experts_get_room_for_a_step_and_their_pod_has_that_memory() -> None:
    body = yaml.safe_load((MANIFESTS / "deepseek-v3-512xh100.yaml").read_text())["spec"]
    body["rollout"]["template"]["engine"]["returnRoutedExperts"] = True
    with_experts = GRPOJobSpec.model_validate(body)
    planned = _accepted(with_experts).resources
    assert planned is not None
    step = 512 * 16 * 16384 * 58 * 8  # prompts x samples x tokens x expert layers x experts of a token
    assert step / 8 < planned.routed_experts_gibibytes * GIB < 1.5 * step / 8
    more = _requests(with_experts)["rollout"].memory - _requests(_large())["rollout"].memory
    assert more == planned.routed_experts_gibibytes * GIB


def test_a_model_that_only_the_pods_can_read_gets_memory_by_its_gpus() -> None:
    body = yaml.safe_load((MANIFESTS / "deepseek-v3-512xh100.yaml").read_text())["spec"]
    del body["model"]["architecture"]
    memory = _requests(GRPOJobSpec.model_validate(body))["trainer"].memory
    assert 8 * 80e9 < memory < 900 * GIB


@pytest.mark.parametrize(
    "changes",
    [{}, {"engine": {"tensorParallel": 2, "nodesPerEngine": 2}, "replicas": 1}, {"path": "/store/model"}],
    ids=["tiny-moe", "engine of two pods", "model of the pods"],
)
def test_a_small_job_fits_on_a_node_of_two_cores(changes: dict[str, Any]) -> None:
    body = job()["spec"]
    template = body["rollout"]["template"]
    template["engine"] |= changes.get("engine", {})
    template["replicas"] = changes.get("replicas", 2)
    if "path" in changes:
        body["model"] = {"path": changes["path"]}
    spec = GRPOJobSpec.model_validate(body)
    requests = _requests(spec).values()
    assert sum(request.count * request.cpu for request in requests) <= NODE_CPUS
    assert sum(request.count * request.memory for request in requests) <= NODE_MEMORY
    assert all(request.memory >= 2 * GIB for request in requests)


def test_a_pool_without_a_job_has_the_engines_of_a_job() -> None:
    spec = spec_of(job())
    body = pool_of(spec).wire() | {"model": spec.model.wire()}
    pool = completed_pool(RolloutPoolSpec.model_validate(body))
    (request,) = [r for r in pool_requests(pool) if r.pool == "rollout"]
    assert (request.cpu, request.memory) == (
        _requests(spec)["rollout"].cpu,
        _requests(spec)["rollout"].memory,
    )
    owner = {"apiVersion": "v", "kind": "RolloutPool", "metadata": job()["metadata"]}
    (group,) = pool_cluster(owner, pool, SETTINGS).wire()["spec"]["workerGroupSpecs"]
    server = group["template"]["spec"]["containers"][0]
    assert server["resources"]["limits"]["memory"] == pool.resources.memory is not None


def test_an_accepted_job_keeps_its_resources_when_another_operator_plans_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = _large()
    accepted = _accepted(spec)
    before = _rendered(spec, accepted)
    monkeypatch.setattr(resources, "_MARGIN", 3.0)
    assert _accepted(spec) != accepted
    assert _rendered(spec, LayoutStatus.model_validate(accepted.wire())) == before


def test_a_job_that_was_accepted_before_resources_were_planned_keeps_the_old_defaults() -> None:
    spec = spec_of(job())
    assert _agent_limits(spec, _accepted(spec)) == {"trainer": GIB / 2, "rollout": GIB / 2}
    older = LayoutStatus.model_validate(
        {key: value for key, value in _accepted(spec).wire().items() if key != "resources"}
    )
    containers = _rendered(spec, older)
    assert {name: c["resources"]["requests"] for name, c in containers.items()} == {
        "controller": {"cpu": "1", "memory": "2Gi"},
        "trainer": {"cpu": "1", "memory": "4Gi"},
        "rollout": {"cpu": "1", "memory": "4Gi"},
    }
