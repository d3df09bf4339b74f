"""``serve`` of a RolloutPool: what the API server and the Python models accept."""

from typing import Any

import pytest
from pydantic import ValidationError

from grpo_operator.api.crd import structural
from grpo_operator.api.rules import UpdateRule
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.api.v1alpha1.serve import SERVE_RULES, SERVE_UPDATE_RULES
from support.cel import cel_holds, defaulted

SCHEMA = structural(RolloutPoolSpec)
MODEL = {"path": "/models/a", "volume": {"mountPath": "/models", "pvc": "models"}}
PRESET = {"path": "preset:tiny-moe"}
EXPERTS, BUFFER = {"returnRoutedExperts": True}, {"doubleBuffer": True}


def _pool(serve: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {"model": MODEL} | spec | ({} if serve is None else {"serve": serve})


def _key(*arguments: str) -> dict[str, Any]:
    return {"engine": {"extraArgs": list(arguments)}}


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (_pool(), ""),
        (_pool(model=PRESET), ""),
        (_pool(engine=EXPERTS | BUFFER), ""),
        (_pool(**_key("--api-key=x")), ""),
        (_pool({}), ""),
        (_pool({"modelName": "org/policy-1.5_b", "secretName": "key"}), ""),
        (_pool({}, **_key("--tool-call-parser=qwen25", "--api-keys")), ""),
        (_pool({}, model=PRESET), "serve needs weights"),
        (_pool({}, engine=EXPERTS), "serve excludes engine.returnRoutedExperts"),
        (_pool({}, engine=BUFFER), "serve excludes engine.returnRoutedExperts and engine.doubleBuffer"),
        (_pool({}, **_key("--api-key=x")), "serve excludes api-key"),
        (_pool({}, **_key("--tool-call-parser", "qwen25", "--served-model-name")), "serve.modelName instead"),
    ],
)
def test_both_sides_agree_on_what_can_be_served(spec: dict[str, Any], error: str) -> None:
    node = defaulted(spec, SCHEMA)
    refused = [rule.message for rule in SERVE_RULES if not cel_holds(rule, node)]
    if not error:
        assert refused == [] and RolloutPoolSpec.model_validate(spec).wire()
        return
    with pytest.raises(ValidationError, match=error):
        RolloutPoolSpec.model_validate(spec)
    (message,) = refused
    assert error in message


@pytest.mark.parametrize("serve", [{"modelName": "two words"}, {"secretName": "Not_A_Name"}, {"key": "x"}])
def test_names_and_unknown_fields_are_checked(serve: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="serve"):
        RolloutPoolSpec.model_validate(_pool(serve))


def _refused(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    def holds(rule: UpdateRule) -> bool:
        return cel_holds(rule, defaulted(new, SCHEMA), defaulted(old, SCHEMA))

    return [rule.message.partition(" is ")[0] for rule in SERVE_UPDATE_RULES if not holds(rule)]


def test_what_a_pool_serves_is_fixed_and_its_size_is_not() -> None:
    other = MODEL | {"path": "/models/b"}
    assert _refused(_pool({}, replicas=4, minAvailable=2), _pool({})) == []
    assert _refused(_pool(model=other), _pool()) == [], "a pool for jobs is as before"
    assert _refused(_pool({}), _pool()) == _refused(_pool(), _pool({})) == ["serve"]
    assert _refused(_pool({"modelName": "x"}), _pool({})) == ["serve"]
    assert _refused(_pool({}, model=other), _pool({})) == ["model"]
