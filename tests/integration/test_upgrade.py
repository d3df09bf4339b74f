"""Another operator takes over running jobs and pools: with other settings, or beside older or newer CRDs.

test_older_operator.py runs the code of another release.
"""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest

from support.api_server import POOL, WHOLE, Api, Operator, until
from support.releases import ADDED
from support.upgrades import (
    OWNERS,
    images_of,
    layout_of,
    pods_of,
    replaced,
    start_job_and_pool,
    written,
)

OLD = {"localhost/trainer:test", "localhost/rollout:test"}
IMAGES = {"trainer": "localhost/trainer:new", "rollout": "localhost/rollout:new"}
NEW = set(IMAGES.values())
CHART: dict[str, object] = {
    "images": IMAGES | {"pullPolicy": "Always"},
    "podOverlay": {"env": [{"name": "HTTPS_PROXY", "value": "http://proxy"}]},
}
CRD = "grpojobs.rl.grpo.dev"
BETA = "grpojobs.v1beta1.rl.grpo.dev"
SCHEMA = "/spec/versions/0/schema/openAPIV3Schema/properties"
DEFAULTED = f"{SCHEMA}/spec/properties/trainer/properties/{ADDED}"
NEWER = (f"{SCHEMA}/spec/properties/{ADDED}", f"{SCHEMA}/status/properties/layout/properties/{ADDED}")


@pytest.mark.slow
def test_other_settings_and_a_rollback_leave_pods_and_manifests_alone(
    api: Api, operator: Operator, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(3)
    uids = start_job_and_pool(api, tiny)
    before = written(api)
    operator.restart(**CHART)
    assert api.apply(tiny | {"metadata": {"name": "later"}}).returncode == 0
    later = "rl.grpo.dev/job=later"
    until("a new job", lambda: len(pods_of(api, later)) == WHOLE.total(), 90)
    assert images_of(pods_of(api, later)) == NEW, "new jobs get the images of the new chart"
    changed = {kind: uids[kind] ^ set(pods_of(api, label)) for kind, label in OWNERS.items()}
    assert not any(changed.values())
    assert written(api) == before, "what runs is not even written"
    for kind, pool in (("job", "trainer"), ("job", "rollout"), ("pool", "rollout")):
        (pod,) = replaced(api, f"{OWNERS[kind]},{POOL}={pool}", uids[kind]).values()
        assert images_of({"": pod}) <= OLD
        container = pod["spec"]["containers"][0]
        assert container["imagePullPolicy"] == "IfNotPresent"
        assert "HTTPS_PROXY" not in {variable["name"] for variable in container["env"]}
    operator.restart()
    assert api.apply(tiny | {"metadata": {"name": "last"}}).returncode == 0
    until("layout", lambda: layout_of(api, "last").get("images", {}).get("trainer") in OLD, 60)
    assert written(api) == before and images_of(pods_of(api, later)) == NEW


def test_a_job_of_an_operator_that_kept_no_images_keeps_those_of_its_ray_cluster(
    api: Api, operator: Operator, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(3)
    uids = start_job_and_pool(api, tiny)
    operator.process.terminate()
    operator.process.wait(20)
    generation = api.get("raycluster", "tiny-moe")["metadata"]["generation"]
    without = json.dumps([{"op": "remove", "path": "/status/layout/images"}])
    api.ok("patch", "grpojob", "tiny-moe", "--subresource=status", "--type=json", "-p", without)
    api.ok("annotate", "raycluster", "tiny-moe", "rl.grpo.dev/parts-", "rl.grpo.dev/applied-")
    operator.restart(images=IMAGES)
    until("images", lambda: layout_of(api).get("images"), 60)
    kept = layout_of(api)["images"]
    assert {kept["trainer"], kept["rollout"]} == OLD
    (pod,) = replaced(api, f"{OWNERS['job']},{POOL}=trainer", uids["job"]).values()
    assert images_of({"": pod}) <= OLD
    assert api.get("raycluster", "tiny-moe")["metadata"]["generation"] == generation
    operator.restart()


@pytest.fixture
def newer_crds(api: Api) -> Iterator[None]:
    """Install a CRD with fields that this operator does not know, one of them with a default."""
    schemas: dict[str, dict[str, Any]] = {path: {"type": "string"} for path in NEWER}
    schemas[DEFAULTED] = {
        "type": "object", "default": {}, "properties": {"size": {"type": "integer", "default": 3}}
    }  # fmt: skip
    add = [{"op": "add", "path": path, "value": schema} for path, schema in schemas.items()]
    api.ok("patch", "crd", CRD, "--type=json", "-p", json.dumps(add))
    yield
    remove = [{"op": "remove", "path": path} for path in schemas]
    api.ok("patch", "crd", CRD, "--type=json", "-p", json.dumps(remove))


def _refusal(api: Api, name: str) -> str:
    """Return why a job's spec is refused, or ""."""
    status = api.get("grpojob", name).get("status") or {}
    texts = [c["message"] for c in status.get("conditions", []) if c["reason"] == "InvalidSpec"]
    return str(texts[0]) if texts else ""


def _ignored(api: Api) -> str:
    conditions = api.get("grpojob", "tiny-moe")["status"]["conditions"]
    return next((str(c["message"]) for c in conditions if c["type"] == "FieldsIgnored"), "")


def test_a_running_job_goes_on_with_fields_of_a_newer_operator(
    api: Api, newer_crds: None, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(3)
    uids = start_job_and_pool(api, tiny)
    newer = json.dumps({"status": {"layout": {ADDED: "settled"}}})
    until(
        "the CRD is served",
        lambda: (
            api.run("patch", "grpojob", "tiny-moe", "--subresource=status", "--type=merge", "-p", newer)
            and layout_of(api).get(ADDED) == "settled"
        ),
    )
    api.ok("patch", "grpojob", "tiny-moe", "--type=merge", "-p", json.dumps({"spec": {ADDED: "x"}}))
    until("the field is named", lambda: f" spec.{ADDED}" in _ignored(api), 30)
    assert "upgrade the operator" in _ignored(api)
    status = api.get("grpojob", "tiny-moe")["status"]
    assert status["phase"] == "Starting" and status["layout"][ADDED] == "settled"
    assert set(pods_of(api, OWNERS["job"])) == uids["job"]
    config = json.loads(api.get("cm", "tiny-moe-job")["data"]["job.json"])
    assert config["spec"][ADDED] == "x", "the job's image may know it"
    refused = tiny | {"metadata": {"name": "strict"}, "spec": tiny["spec"] | {ADDED: "x"}}
    assert api.apply(refused).returncode == 0
    until("InvalidSpec", lambda: "InvalidSpec" in api.ok("get", "grpojob", "strict", "-o", "json"), 30)


def test_defaults_of_newer_crds_do_not_keep_new_jobs_out(
    api: Api, newer_crds: None, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(3)
    assert api.apply(tiny).returncode == 0
    assert api.get("grpojob", "tiny-moe")["spec"]["trainer"][ADDED] == {"size": 3}, "set by the API server"
    until("pods", lambda: len(pods_of(api, OWNERS["job"])) == WHOLE.total(), 120)
    assert f"spec.trainer.{ADDED}: upgrade the operator" in until("FieldsIgnored", lambda: _ignored(api), 30)
    other = tiny | {"metadata": {"name": "other"}, "spec": deepcopy(tiny["spec"])}
    other["spec"]["trainer"][ADDED] = {"size": 4}
    assert api.apply(other).returncode == 0
    status = until("InvalidSpec", lambda: _refusal(api, "other"), 30)
    assert f"spec.trainer.{ADDED}" in status, "its user wants what this operator cannot do"


@pytest.fixture
def older_crds(api: Api) -> Iterator[Callable[[], None]]:
    """Take fields of this operator from the CRD when the test asks for it."""
    path = f"{SCHEMA}/status/properties/layout/properties/images"
    schema = api.get("crd", CRD)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    images = schema["status"]["properties"]["layout"]["properties"]["images"]

    def patch(**change: Any) -> None:
        api.ok("patch", "crd", CRD, "--type=json", "-p", json.dumps([change | {"path": path}]))

    yield lambda: patch(op="remove")
    patch(op="add", value=images)


def _patch_crd(api: Api, changes: list[dict[str, Any]], *arguments: str) -> None:
    # As an argument, a version with its schema would be longer than the kernel permits.
    read = ("--patch-file", "/dev/stdin")
    api.ok("patch", "crd", CRD, "--type=json", *read, *arguments, stdin=json.dumps(changes))


def _store_in(api: Api, index: int) -> None:
    path = "/spec/versions/{}/storage"
    changes = [{"op": "replace", "path": path.format(i), "value": i == index} for i in range(2)]
    _patch_crd(api, changes)


@pytest.fixture
def next_version(api: Api) -> Iterator[None]:
    """Let the CRD serve v1beta1 too, with the same schema, as the first release of that version will."""
    version = api.get("crd", CRD)["spec"]["versions"][0] | {"name": "v1beta1", "storage": False}
    _patch_crd(api, [{"op": "add", "path": "/spec/versions/-", "value": version}])
    until("it is served", lambda: api.run("get", BETA).returncode == 0, 60)
    yield
    _store_in(api, 0)
    stored = [{"op": "replace", "path": "/status/storedVersions", "value": ["v1alpha1"]}]
    _patch_crd(api, stored, "--subresource=status")
    _patch_crd(api, [{"op": "remove", "path": "/spec/versions/1"}])
    # kubectl keeps on its disk which versions there are.
    fresh = ("api-resources", "--cached=false", "--api-group=rl.grpo.dev")
    until("it is served no longer", lambda: "v1beta1" not in api.ok(*fresh), 60)


def test_a_second_version_of_the_api_leaves_jobs_and_manifests_alone(
    api: Api, next_version: None, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(3)
    uids = start_job_and_pool(api, tiny)
    _store_in(api, 1)
    until("it is stored", lambda: "v1beta1" in api.get("crd", CRD)["status"]["storedVersions"])
    beta = tiny | {"apiVersion": "rl.grpo.dev/v1beta1"}
    generation = api.get("grpojob", "tiny-moe")["metadata"]["generation"]
    assert api.apply(beta).returncode == 0
    assert api.get("grpojob", "tiny-moe")["metadata"]["generation"] == generation
    api.ok("scale", "rpool", "tiny-moe-rollout", "--replicas=3")
    until("a third engine, by the operator of v1alpha1", lambda: _more(api, uids["job"]), 60)
    assert set(pods_of(api, OWNERS["job"])) >= uids["job"]
    assert api.apply(beta | {"metadata": {"name": "beta"}}).returncode == 0
    until("a layout", lambda: layout_of(api, "beta"), 60)
    old, new = (api.get(kind, "tiny-moe") for kind in ("grpojob", BETA))
    assert old["spec"] == new["spec"] and old["metadata"]["uid"] == new["metadata"]["uid"]


def test_running_jobs_are_looked_after_while_the_crds_are_older(
    api: Api, older_crds: Callable[[], None], operator: Operator, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(3)
    uids = start_job_and_pool(api, tiny)
    older_crds()
    until("the older CRD is served", lambda: "images" not in layout_of(api))
    operator.restart(images=IMAGES)
    until("the scale is applied", lambda: _scaled(api) == 3, 60)
    engines = until("engines", lambda: _more(api, uids["job"]), 60)
    assert images_of(engines) <= OLD
    assert set(pods_of(api, OWNERS["job"])) >= uids["job"]
    operator.restart()


def _scaled(api: Api) -> int:
    """Scale the engines and return their number in the job's status."""
    api.ok("scale", "rpool", "tiny-moe-rollout", "--replicas=3")
    return int(api.get("grpojob", "tiny-moe")["status"]["rollout"]["total"])


def _more(api: Api, before: set[str]) -> dict[str, dict[str, Any]]:
    return {uid: pod for uid, pod in pods_of(api, OWNERS["job"]).items() if uid not in before}
