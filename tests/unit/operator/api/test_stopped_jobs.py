"""Fields of the trainer that can change while the job has no pods, and all others, which never can."""

import copy
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from support.cel import SCHEMA, Changes, cel_holds, changed, defaulted

# Fields that change only the pods, and other values of them.
OF_PODS: Changes = {
    "resources": {"memory": "9Gi"},
    "agentResources": {"cpu": "2"},
    "podTemplate": {"spec": {"priorityClassName": "high"}},
    "nodeSelector": {"pool": "b"},
    "evictionSeconds": 7,
}
(OF_PODS_RULE,) = GRPOJobSpec.object_rules
(TRAINER_RULE,) = (rule for rule in GRPOJobSpec.update_rules if rule.message.startswith("trainer is"))


def job_of(spec: dict[str, Any], phase: str | None, suspend: bool = False) -> dict[str, Any]:
    """Return a whole job as the API server holds it. ``phase``: None before the operator has seen it."""
    made = {"spec": defaulted(spec | {"suspend": suspend}, SCHEMA)}
    return made if phase is None else made | {"status": {"phase": phase}}


@pytest.mark.parametrize("name", OF_PODS)
def test_what_changes_only_the_trainers_pods_can_change_while_there_are_none(name: str) -> None:
    field = f"trainer.{name}"
    first, second = changed(), changed({field: OF_PODS[name]})
    for before, after in ((first, second), (second, first)):
        assert cel_holds(TRAINER_RULE, defaulted(after, SCHEMA), defaulted(before, SCHEMA))
        for stopped in ("Suspended", "Failed", "Succeeded", "Invalid"):
            suspend = stopped == "Suspended"
            old = job_of(before, stopped, suspend)
            assert cel_holds(OF_PODS_RULE, job_of(after, stopped, suspend), old)
            assert cel_holds(OF_PODS_RULE, job_of(after, stopped), old), "resumed by the same change"
        for phase in (None, "Starting", "Training", "Recovering", "Suspending", "Pending", "Waiting"):
            for suspend in (False, True):
                old = job_of(before, phase, suspend)
                assert not cel_holds(OF_PODS_RULE, job_of(after, phase, suspend), old)
                assert cel_holds(OF_PODS_RULE, job_of(before, phase, not suspend), old)
        resumed = job_of(before, "Suspended", suspend=False)  # the operator has not begun yet
        assert not cel_holds(OF_PODS_RULE, job_of(after, "Suspended"), resumed)


@pytest.mark.parametrize(
    "name", sorted(SCHEMA["properties"]["trainer"]["properties"].keys() - OF_PODS.keys())
)
def test_all_other_fields_of_the_trainer_stay_fixed(name: str) -> None:
    old = defaulted(changed(), SCHEMA)
    new = copy.deepcopy(old)
    value = old["trainer"].get(name)
    new["trainer"][name] = _another(value)
    for before, after in ((old, new), (new, old)):
        assert not cel_holds(TRAINER_RULE, after, before)
        assert cel_holds(TRAINER_RULE, before, before)


def _another(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, dict):
        return value | {"another": 1}
    if isinstance(value, bool):
        return not value
    return "another" if value is None else value + type(value)(1)
