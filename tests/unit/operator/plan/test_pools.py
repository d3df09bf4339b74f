"""RolloutPools without a job: manifests, binding to jobs, status."""

from typing import Any

import pytest

from grpo_operator.api.messages import AgentStatus
from grpo_operator.api.names import Owner, owner_in_labels
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.api.v1alpha1.status import EngineState
from grpo_operator.plan.capacity.admission import PoolCandidate, bind
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.pool_checks import check_pool, check_reference
from grpo_operator.plan.planner.resolve import RefusedError
from grpo_operator.plan.status.rolloutpool import pool_status
from grpo_operator.render.policies import ANY_JOB, network_policy
from grpo_operator.render.ray_cluster import job_cluster, pool_cluster
from grpo_operator.render.services import rollout_service
from grpo_operator.settings import OperatorSettings
from support.objects import NOW, job, pool_of, spec_of

SETTINGS = OperatorSettings("trainer:1", "rollout:1")
OWNER = Owner("RolloutPool", "default", "shared")


def pool(**spec: Any) -> dict[str, Any]:
    """Return a RolloutPool as the API server returns it, with the tiny job's engines."""
    template = pool_of(spec_of(job())).wire()
    return {
        "apiVersion": "rl.grpo.dev/v1alpha1",
        "kind": "RolloutPool",
        "metadata": {"name": "shared", "namespace": "default", "uid": "99999999-bbbb", "generation": 1},
        "spec": template | {"model": {"path": "preset:tiny-moe"}} | spec,
    }


def pool_spec(**spec: Any) -> RolloutPoolSpec:
    return RolloutPoolSpec.model_validate(pool(**spec)["spec"])


def referring(**spec: Any) -> dict[str, Any]:
    return job(rollout={"poolRef": {"name": "shared"}}, **spec)


def test_agents_of_a_pools_own_ray_cluster_wait_for_a_writer() -> None:
    made = pool_cluster(pool(), pool_spec(), SETTINGS).wire()
    (group,) = made["spec"]["workerGroupSpecs"]
    assert made["metadata"]["ownerReferences"][0]["kind"] == "RolloutPool"
    labels = group["template"]["metadata"]["labels"]
    assert owner_in_labels({"metadata": {"labels": labels, "namespace": "default"}}) == OWNER
    agent = group["template"]["spec"]["containers"][1]
    assert "--writer " not in agent["args"][0]
    service = rollout_service(pool(), pool_spec())
    assert service["metadata"]["name"] == "shared"
    assert service["spec"]["selector"].items() <= labels.items()


def test_a_job_with_a_pool_reference_has_no_engines_of_its_own() -> None:
    manifest = referring()
    made = job_cluster(manifest, spec_of(manifest), None, SETTINGS, False).wire()
    assert [g["groupName"] for g in made["spec"]["workerGroupSpecs"]] == ["controller", "trainer"]


def test_engines_of_a_job_accept_weights_only_from_it() -> None:
    made = job_cluster(job(), spec_of(job()), pool_of(spec_of(job())), SETTINGS, False).wire()
    agent = made["spec"]["workerGroupSpecs"][2]["template"]["spec"]["containers"][1]
    assert "--writer tiny-moe-12345678" in agent["args"][0]


def test_ray_clusters_for_kai_have_no_owner() -> None:
    manifest = job(scheduling={"gangScheduler": "kai", "gangQueue": "rl"})
    spec = spec_of(manifest)
    made = job_cluster(manifest, spec, pool_of(spec), SETTINGS, False).wire()["metadata"]
    assert "ownerReferences" not in made and made["labels"]["kai.scheduler/queue"] == "rl"
    assert made["annotations"]["rl.grpo.dev/owner-uid"] == manifest["metadata"]["uid"]


def test_jobs_of_a_pool_may_connect_to_it() -> None:
    peers = network_policy(pool(), SETTINGS, allowed=ANY_JOB)["spec"]["ingress"][0]["from"]
    assert peers == [
        {"podSelector": {"matchLabels": {"rl.grpo.dev/rolloutpool": "shared"}}},
        {"podSelector": {"matchExpressions": [{"key": "rl.grpo.dev/job", "operator": "Exists"}]}},
    ]


def _candidate(name: str, since: str, holds: bool = False, pool: str = "shared") -> PoolCandidate:
    return PoolCandidate(Owner("GRPOJob", "default", name), pool, since, holds)


def test_one_job_writes_to_a_pool_until_it_releases_it() -> None:
    old, new = _candidate("old", "2026-01-01"), _candidate("new", "2026-02-01")
    assert bind([new, old]) == {OWNER: old.job}
    assert bind([_candidate("new", "2026-02-01", holds=True), old]) == {OWNER: new.job}
    assert bind([new]) == {OWNER: new.job} and bind([]) == {}
    other = _candidate("b", "2026-03-01", pool="other")
    assert len(bind([old, other])) == 2


def test_the_pool_status_names_its_writer_or_why_it_waits() -> None:
    seen = Observed()
    idle = pool_status(pool(), pool_spec(), OWNER, seen, None, NOW)
    assert idle.bound_to is None and "poolRef" in idle.conditions[0].message
    assert idle.selector == "rl.grpo.dev/pool=rollout,rl.grpo.dev/rolloutpool=shared"
    assert pool_status(pool(), pool_spec(), OWNER, seen, "tiny-moe", NOW).bound_to == "tiny-moe"


@pytest.mark.parametrize(
    ("spec", "texts"),
    [
        ({"model": {"path": "/models/other"}}, ["serves /models/other", "preset:tiny-moe", "the same model"]),
        ({"engine": {"contextLength": 64, "device": "cpu"}}, ["contextLength of RolloutPool shared (64)"]),
    ],
)
def test_a_job_must_fit_the_pool(spec: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(RefusedError) as refused:
        check_reference(spec_of(referring()), pool_spec(**spec))
    assert refused.value.reason == "PoolMismatch"
    for text in texts:
        assert text in str(refused.value)


def test_a_pool_whose_engines_cannot_hold_the_model_is_refused() -> None:
    engine = {"tensorParallel": 8, "gpusPerNode": 8, "expertParallel": 8, "gpuType": "h100-80gb"}
    model = {"path": "/models/DeepSeek-V3", "architecture": "deepseek-v3"}
    with pytest.raises(RefusedError, match=r"spec\.engine\.tensorParallel=8: weights take"):
        check_pool(pool_spec(engine=engine, model=model))


def test_stop_strings_need_a_pool_with_a_tokenizer() -> None:
    spec = spec_of(referring(algorithm={"stop": ["####"]}))
    plain = pool_spec()
    with pytest.raises(
        RefusedError, match=r"algorithm\.stop: .* set engine.tokenizer: true in RolloutPool shared"
    ):
        check_reference(spec, plain)
    able = plain.engine.model_copy(update={"tokenizer": True})
    check_reference(spec, plain.model_copy(update={"engine": able}))


@pytest.mark.parametrize("rollout", [{}, {"poolRef": {"name": "a"}, "template": {}}])
def test_exactly_one_of_template_and_pool_ref_is_required(rollout: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="exactly one of template and poolRef"):
        GRPOJobSpec.model_validate(job(rollout=rollout)["spec"])


EXPORT = {"path": "/models/export", "volume": {"mountPath": "/models", "pvc": "runs"}}


def test_no_job_can_use_a_pool_that_serves_a_model() -> None:
    served = pool_spec(model=EXPORT, serve={})
    with pytest.raises(RefusedError, match=r"serves /models/export .* name another RolloutPool") as refused:
        check_reference(spec_of(referring(model=EXPORT)), served)
    assert refused.value.reason == "PoolServes"
    check_pool(served)


def test_the_status_of_a_pool_that_serves_a_model_says_how_to_reach_it() -> None:
    manifest, spec = pool(model=EXPORT, serve={"modelName": "policy"}), pool_spec(model=EXPORT, serve={})
    named = RolloutPoolSpec.model_validate(manifest["spec"])
    idle = pool_status(manifest, spec, OWNER, Observed(), None, NOW)
    assert (idle.phase, idle.bound_to) == ("Starting", None)
    assert idle.conditions[0].message == "0 of 2 engines serve /models/export"
    names_ = [f"shared-{number}" for number in range(2)]
    labels = {"rl.grpo.dev/rolloutpool": "shared", "rl.grpo.dev/pool": "rollout"}
    pods: list[dict[str, Any]] = [
        {"metadata": {"name": name, "labels": labels}, "status": {"podIP": "10.0.0.9"}} for name in names_
    ]
    agents = {name: AgentStatus(name=name, state=EngineState.SERVING, weight_version=0) for name in names_}
    serving = pool_status(manifest, named, OWNER, Observed(pods=tuple(pods), agents=agents), None, NOW)
    assert (serving.phase, serving.ready_replicas, serving.weight_version) == ("Serving", 2, None)
    assert serving.serve is not None and serving.serve.wire() == {
        "url": "http://shared-serve.default.svc", "modelName": "policy", "secretName": "shared-99999999-api",
    }  # fmt: skip
    assert pool_status(pool(), pool_spec(), OWNER, Observed(), None, NOW).serve is None
