"""Bad input: refused at apply, or reported within 5 s; never a pod."""

import json
import time
from typing import Any

import pytest
import yaml

from support.api_server import Api, until
from support.manifests import MANIFESTS, name_of


def _set(manifest: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    target = manifest["spec"]
    for part in parents:
        target = target[part]
    if value is None:
        del target[last]
    else:
        target[last] = value


@pytest.mark.parametrize(
    ("path", "value", "texts"),
    [
        ("trainer.nodes", 3, ["spec.trainer", "multiple of tensor x pipeline x context"]),
        ("trainer.colour", "red", ['unknown field "spec.trainer.colour"']),
        ("trainer.nodes", -2, ["spec.trainer.nodes", "-2", "greater than or equal to 1"]),
        ("trainer.nodes", "2", ["spec.trainer.nodes", "must be of type integer"]),
        ("trainer.optimizer", {"lr": "0.1"}, ["spec.trainer.optimizer.lr", "must be of type number"]),
        ("suspend", "true", ["spec.suspend", "must be of type boolean"]),
        ("suspend", 1, ["spec.suspend", "must be of type boolean"]),
        ("algorithm.stopTokenIds", [1, "2"], ["spec.algorithm.stopTokenIds[1]", "must be of type integer"]),
        ("totalSteps", 0, ["spec.totalSteps", "greater than or equal to 1"]),
        ("model.path", None, ["spec.model.path", "Required value"]),
        ("model.path", "some/where", ["spec.model.path", "some/where", "should match"]),
        ("trainer.miniBatchSize", 5, ["must be a multiple of trainer.miniBatchSize"]),
        ("data.promptLength", 4000, ["must fit in rollout.template.engine.contextLength"]),
        ("rollout.template.minAvailable", 9, ["minAvailable must not exceed replicas"]),
        ("checkpoint.store", {}, ["exactly one of path, pvc and uri"]),
        ("reward", {}, ["set function, builtin, url or model"]),
        ("staleness", {"partialRollouts": True}, ["partialRollouts needs maxVersionLag 1"]),
        ("observability", {"thresholds": [{"metric": "x"}]}, ["set minimum or maximum"]),
        (
            "observability",
            {"trackio": {"space": "me/a", "serverUrl": "http://t"}},
            ["set space or serverUrl"],
        ),
        ("observability", {"profile": {"tool": "nsight", "stepStart": 1, "stepEnd": 2}}, ["use torch where"]),
        (
            "scheduling",
            {"rdma": {"devices": [{"resource": "hca"}]}},
            ["spec.scheduling.rdma.devices[0].resource", "hca", "should match"],
        ),
        ("scheduling", {"rdma": {"hostNetwork": True}}, ["rdma.hostNetwork needs networkPolicy false"]),
        (
            "scheduling",
            {"egress": {"to": [{"cidr": "api.example.com"}]}},
            ["spec.scheduling.egress.to[0].cidr", "api.example.com", "should match"],
        ),
        ("scheduling", {"egress": {"to": [{"ports": [443]}]}}, ["set exactly one of cidr and namespace"]),
        ("scheduling", {"networkPolicy": False, "egress": {}}, ["egress needs networkPolicy true"]),
        ("scheduling", {"rdma": {}}, ["set devices, as in", "or hostNetwork"]),
        ("algorithm.klCtrl.type", "magic", ["spec.algorithm.klCtrl.type", "magic", "fixed"]),
    ],
)
def test_an_invalid_job_is_refused_at_apply(
    api: Api, tiny: dict[str, Any], path: str, value: Any, texts: list[str]
) -> None:
    _set(tiny, path, value)
    done = api.apply(tiny)
    assert done.returncode != 0
    for text in texts:
        assert text in done.stderr, done.stderr
    assert api.get("grpojobs", "-A")["items"] == []


@pytest.mark.parametrize(
    ("path", "value", "texts"),
    [
        ("model.path", "preset:huge-moe", ["spec.model.path", "'preset:huge-moe'", "use preset:tiny-moe"]),
        ("rollout.template.replicas", 400, ["replicas=400: only", "add nodes or lower"]),
        (
            "trainer.megatron",
            {"moe_shared_expert_overlpa": True},
            ["spec.trainer.megatron.moe_shared_expert_overlpa", "did you mean moe_shared_expert_overlap?"],
        ),
    ],
)
def test_an_infeasible_job_is_stalled_and_has_no_pod(
    api: Api, tiny: dict[str, Any], fake_nodes: Any, path: str, value: Any, texts: list[str]
) -> None:
    fake_nodes(1)
    _set(tiny, path, value)
    started = time.monotonic()
    assert api.apply(tiny).returncode == 0

    def stalled() -> Any:
        conditions = api.get("grpojob", "tiny-moe").get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == "Stalled" and c["status"] == "True"), None)

    condition = until("condition Stalled", stalled, 10)
    assert time.monotonic() - started < 5
    for text in texts:
        assert text in condition["message"]
    (event,) = until("an event says so", lambda: _warnings(api, "Invalid"), 10)
    assert event["message"][:100] == condition["message"][:100]
    time.sleep(2)
    assert api.get("pods", "-A")["items"] == [] and api.get("rayclusters", "-A")["items"] == []


def _warnings(api: Api, reason: str) -> list[dict[str, Any]]:
    """Return the warnings with this reason about the job."""
    uid = api.get("grpojob", "tiny-moe")["metadata"]["uid"]  # events of earlier tests' jobs stay
    about = f"--field-selector=type=Warning,reason={reason},involvedObject.uid={uid}"
    return list(api.get("events", "-A", about)["items"])


def test_a_critic_gets_its_own_learning_rate_from_the_api_server(api: Api, tiny: dict[str, Any]) -> None:
    critic = {"optimizer": {"weightDecay": 0.1}}
    tiny["spec"]["algorithm"] |= {"advEstimator": "gae", "critic": critic}
    tiny["spec"]["trainer"]["optimizer"] = {"weightDecay": 0.1}
    manifest = yaml.safe_dump(tiny)
    stored = json.loads(api.ok("apply", "--dry-run=server", "-o", "json", "-f", "-", stdin=manifest))["spec"]
    assert stored["algorithm"]["critic"]["optimizer"]["lr"] == 1e-5
    assert stored["trainer"]["optimizer"]["lr"] == 1e-6


def test_immutable_fields_cannot_be_edited(api: Api, tiny: dict[str, Any]) -> None:
    tiny["spec"]["suspend"] = True
    assert api.apply(tiny).returncode == 0
    tiny["spec"]["trainer"]["nodes"] = 4
    done = api.apply(tiny)
    assert done.returncode != 0 and "trainer is fixed once the job exists" in done.stderr


@pytest.mark.parametrize("path", MANIFESTS, ids=name_of)
def test_every_manifest_is_accepted(api: Api, path: Any) -> None:
    api.ok("apply", "--dry-run=server", "--validate=strict", "-f", str(path))


def test_the_names_that_users_type(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    tiny["spec"]["suspend"] = True
    assert api.apply(tiny).returncode == 0
    header = api.ok("get", "grpo").splitlines()[0].split()
    assert header == [
        "NAME", "PHASE", "REASON", "STEP", "ETA", "WEIGHTS", "REWARD", "TRAIN", "ROLLOUT", "RESTARTS", "AGE"
    ]  # fmt: skip
    until("the pool exists", lambda: "tiny-moe-rollout" in api.ok("get", "rpool"))
    assert "Message" in api.ok("describe", "grpojob", "tiny-moe")
