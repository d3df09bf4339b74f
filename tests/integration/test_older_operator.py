"""The operator of an older release, the present one and the older one again look after the same pods."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_devcluster.results import record_from_test
from support.api_server import POOL, WHOLE, Api, until
from support.older_release import PRESENT, Release, unpack
from support.upgrades import OWNERS, images_of, layout_of, pods_of, start_job_and_pool, written

LATER = "rl.grpo.dev/job=later"
OLD = {"trainer": "localhost/trainer:old", "rollout": "localhost/rollout:old"}
NEW = {"trainer": "localhost/trainer:new", "rollout": "localhost/rollout:new"}
OLDER_CHART: dict[str, Any] = {"images": OLD}
NEWER_CHART: dict[str, Any] = {
    "allNamespaces": True,  # as the older one, which has no such value
    "images": NEW | {"pullPolicy": "Always"},
    "podOverlay": {"env": [{"name": "HTTPS_PROXY", "value": "http://proxy"}]},
}
Pods = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def operator() -> None:
    """The test starts operators of two releases."""


@pytest.fixture
def older(api: Api, tmp_path: Path) -> Iterator[Release]:
    """The older release with its CRDs; those of the present one are back afterwards."""
    release = unpack(tmp_path / "release")
    release.apply_crds(api)
    yield release
    PRESENT.apply_crds(api)


def _all_pods(api: Api, *labels: str) -> Pods:
    return {uid: pod for label in labels for uid, pod in pods_of(api, label).items()}


def _changed(before: Pods, now: Pods) -> list[str]:
    """Return the pods of ``before`` that are gone, or are not what they were."""

    def what(pod: dict[str, Any]) -> Any:
        return pod["spec"], pod["metadata"]["labels"], pod["metadata"].get("deletionTimestamp")

    return [
        pod["metadata"]["name"]
        for uid, pod in before.items()
        if uid not in now or what(now[uid]) != what(pod)
    ]


def _template(pod: dict[str, Any]) -> dict[str, Any]:
    """Return what a pod has of the operator's template that releases and charts change."""
    containers = {
        container["name"]: (
            container["image"],
            container["imagePullPolicy"],
            container.get("securityContext"),
            sorted(variable["name"] for variable in container["env"]),
        )
        for container in pod["spec"]["containers"]
    }
    return {"pod": pod["spec"]["securityContext"], **containers}


def _engines(api: Api, label: str) -> Pods:
    return pods_of(api, f"{label},{POOL}=rollout")


def _one_more_engine(api: Api, pool: str, label: str) -> None:
    """Scale a pool by one engine, which must be like the others."""
    before = _engines(api, label)
    api.ok("scale", "rpool", pool, f"--replicas={len(before) + 1}")
    until(f"another engine of {pool}", lambda: len(_engines(api, label)) == len(before) + 1, 60)
    (other, *_), (new,) = before.values(), _engines(api, label).keys() - before
    assert _template(_engines(api, label)[new]) == _template(other)


def _refused_for_newer_fields(api: Api, name: str) -> bool:
    """Return whether a job is refused because of fields of the newer release, which its status names."""
    status = api.get("grpojob", name).get("status", {})
    texts = [str(condition.get("message")) for condition in status.get("conditions", [])]
    return status.get("phase") != "Starting" and any("spec.trainer.spareNodes" in text for text in texts)


def _check_status(api: Api, name: str, engines: int, ignores: bool = False) -> None:
    """Wait until the status of a job says what there is. ``ignores``: it has fields of a newer release."""

    def told() -> bool:
        status = api.get("grpojob", name)["status"]
        return bool(status["rollout"]["total"] == engines and status["train"] == {"ready": 2, "total": 2})

    until(f"the status of {name} is true", told, 60)
    job = api.get("grpojob", name)
    status = job["status"]
    conditions = {c["type"]: c for c in status["conditions"] if c["status"] == "True"}
    assert status["phase"] == "Starting", "no controller answers on nodes of KWOK"
    assert status["observedGeneration"] == job["metadata"]["generation"]
    assert not {"Stalled", "Degraded", "Failed"} & conditions.keys(), conditions
    assert ("FieldsIgnored" in conditions) == ignores, conditions


def test_an_upgrade_and_a_downgrade_leave_running_pods_alone(
    api: Api, older: Release, tiny: dict[str, Any], fake_nodes: Any, tmp_path: Path
) -> None:
    fake_nodes(3)
    with older.operator(tmp_path / "first", OLDER_CHART):
        start_job_and_pool(api, older.manifest("tiny-moe"))
        _check_status(api, "tiny-moe", 2)
    began, settled, manifests = _all_pods(api, *OWNERS.values()), layout_of(api), written(api)
    assert images_of(began) <= set(OLD.values()) and "keyScope" not in settled["images"], "the older one runs"

    PRESENT.apply_crds(api)
    with PRESENT.operator(tmp_path / "second", NEWER_CHART):
        assert api.apply(tiny | {"metadata": {"name": "later"}}).returncode == 0
        until("a job of the new operator", lambda: len(pods_of(api, LATER)) == WHOLE.total(), 90)
        assert layout_of(api, "later")["images"] == NEW | {"keyScope": "owner"}, "the present one runs"
        assert written(api) == manifests, "what runs is not even written"
        _one_more_engine(api, "tiny-moe-rollout", OWNERS["job"])
        for name, engines in (("tiny-moe", 3), ("later", 2)):
            _check_status(api, name, engines)
    there, accepted = _all_pods(api, *OWNERS.values(), LATER), layout_of(api, "later")
    upgraded = _changed(began, there)

    # The newer CRDs stay, as docs/guides/upgrades.md says.
    with older.operator(tmp_path / "third", OLDER_CHART):
        assert api.apply(older.manifest("tiny-moe") | {"metadata": {"name": "last"}}).returncode == 0
        # The newer CRDs set fields of every new job that the older operator does not know.
        until("the older one runs, and refuses", lambda: _refused_for_newer_fields(api, "last"), 60)
        _one_more_engine(api, "tiny-moe-rollout", OWNERS["job"])
        _one_more_engine(api, "later-rollout", LATER)
        for name, engines in (("tiny-moe", 4), ("later", 3)):
            _check_status(api, name, engines, ignores=True)
    downgraded = _changed(there, _all_pods(api, *OWNERS.values(), LATER))
    assert layout_of(api) | {"images": settled["images"]} == settled
    assert layout_of(api, "later") == accepted
    record_from_test("reliability", {"upgrade_pods_changed": len({*upgraded, *downgraded})})
    assert upgraded == downgraded == []
