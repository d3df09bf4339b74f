"""API models: accepted and refused values, and the generated CRDs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from grpo_operator.api.crd import grpojob_crd, rolloutpool_crd
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec

ROOT = Path(__file__).parents[4]


def tiny() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "manifests" / "tiny-moe.yaml").read_text())["spec"])


def test_the_manifest_is_valid_and_survives_the_wire() -> None:
    spec = GRPOJobSpec.model_validate(tiny())
    assert GRPOJobSpec.model_validate(spec.wire()) == spec


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("trainer", "nodes"), 3, "multiple of tensor x pipeline x context"),
        (("trainer", "nodes"), -1, "greater than or equal to 1"),
        (("trainer", "frobnicate"), 1, "Extra inputs are not permitted"),
        (("trainer", "moe"), {"biasUpdateRate": -0.001}, "greater than or equal to 0"),
        (("trainer", "moe"), {"auxLossCoefficient": 2}, "less than or equal to 1"),
        (("trainer", "miniBatchSize"), 3, "must be a multiple of"),
        (("model", "path"), "relative/path", "should match pattern"),
        (("data", "promptLength"), 1000, "must fit in rollout.template.engine.contextLength"),
        (("checkpoint", "store"), {}, "exactly one of path, pvc and uri"),
        (("rollout", "template", "minAvailable"), 3, "minAvailable must not exceed replicas"),
        (("reward",), {}, "set function, builtin, url or model"),
        (("reward",), {"function": "m:f", "url": "http://v"}, "at most one of function, builtin and url"),
        (("reward",), {"model": {"path": "judge"}}, "should match pattern"),
        (("reward",), {"builtin": "code", "sandbox": "none"}, "'required' or 'bestEffort'"),
        (("staleness",), {"partialRollouts": True}, "partialRollouts needs maxVersionLag 1"),
        (("observability",), {"thresholds": [{"metric": "x"}]}, "set minimum or maximum"),
        (("observability",), {"trackio": {"space": "me/a", "serverUrl": "http://t"}}, "space or serverUrl"),
        (("observability",), {"trackio": {"serverUrl": "http://t?write_token=x"}}, "should match pattern"),
        (("observability",), {"trackers": {"sampleRows": 8192}}, "less than or equal to 256"),
    ],
)
def test_bad_values_are_refused_with_a_reason(path: tuple[str, ...], value: Any, text: str) -> None:
    spec = tiny()
    target = spec
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    with pytest.raises(ValidationError, match=text):
        GRPOJobSpec.model_validate(spec)


def test_a_missing_model_path_is_named() -> None:
    spec = tiny() | {"model": {}}
    with pytest.raises(ValidationError, match=r"model\.path\n  Field required"):
        GRPOJobSpec.model_validate(spec)


@pytest.mark.parametrize("given", [{}, {"optimizer": {}}, {"optimizer": {"weightDecay": 0.1}}])
def test_the_critic_keeps_its_own_learning_rate(given: dict[str, Any]) -> None:
    algorithm = tiny()["algorithm"] | {"advEstimator": "gae", "critic": given}
    spec = GRPOJobSpec.model_validate(tiny() | {"algorithm": algorithm})
    assert spec.algorithm.critic is not None and spec.algorithm.critic.optimizer.lr == 1e-5


def test_missing_tokens_are_reported_after_the_engines_had_time_to_change() -> None:
    spec = GRPOJobSpec.model_validate(tiny() | {"restartPolicy": {"hangSeconds": 500}})
    assert spec.stall_seconds == 560
    data, rollout = spec.data.model_copy(update={"response_length": 10**6}), spec.rollout
    assert spec.model_copy(update={"data": data}).stall_seconds == 560, "tokens, not answers, are awaited"
    asked = spec.model_copy(update={"rollout": rollout.model_copy(update={"stall_seconds": 7})})
    assert asked.stall_seconds == 7


def _walk(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    nodes = [(path, schema)]
    for name, child in schema.get("properties", {}).items():
        nodes += _walk(child, f"{path}.{name}")
    if "items" in schema:
        nodes += _walk(schema["items"], f"{path}[]")
    return nodes


@pytest.mark.parametrize("crd", [grpojob_crd(), rolloutpool_crd()], ids=["grpojob", "rolloutpool"])
def test_every_string_and_list_of_the_spec_is_bounded(crd: dict[str, Any]) -> None:
    """The API server refuses CEL rules over unbounded values, because it estimates their cost as too high."""
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for path, schema in _walk(spec):
        if schema.get("type") == "string":
            assert "maxLength" in schema or "enum" in schema, path
        if schema.get("type") == "array":
            assert "maxItems" in schema, path


def test_no_field_has_a_name_that_yaml_reads_as_a_boolean() -> None:
    spec = grpojob_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    names = {path.rsplit(".", 1)[-1] for path, _ in _walk(spec)}
    assert not names & {"n", "y", "on", "off", "yes", "no"}


@pytest.mark.parametrize("crd", [grpojob_crd(), rolloutpool_crd()], ids=["GRPOJob", "RolloutPool"])
def test_every_field_is_described_and_bounded(crd: dict[str, Any]) -> None:
    root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    assert [*_loose(root["spec"], "spec", True), *_loose(root["status"], "status", False)] == []


def _loose(schema: dict[str, Any], path: str, given: bool) -> Iterator[str]:
    """Yield fields without a description, and fields of the spec without a bound."""
    for name, field in (schema.get("properties") or {}).items():
        here, kind = f"{path}.{name}", field.get("type")
        if not field.get("description"):
            yield f"{here}: no description"
        if kind == "string" and not {"maxLength", "enum"} & field.keys():
            yield f"{here}: no maxLength"
        if kind == "array" and "maxItems" not in field:
            yield f"{here}: no maxItems"
        if given and kind in ("integer", "number") and "maximum" not in field:
            yield f"{here}: no maximum"
        # The API server reads bounds as 64-bit integers; larger ones overflow to the smallest integer.
        if any(abs(field.get(bound, 0)) >= 2**63 for bound in ("minimum", "maximum")):
            yield f"{here}: a bound that does not fit in 64 bits"
        yield from _loose(field, here, given)
    if "items" in schema:
        yield from _loose(schema["items"], f"{path}[]", given)
