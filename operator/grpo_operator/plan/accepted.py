"""Parts of a job or pool that no later operator changes, once one has accepted it (pure).

The pods of an accepted job or pool get the images of that time, and its spec may have fields that only the
operator which accepted it knows.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from grpo_operator.api import names
from grpo_operator.api.base import Model
from grpo_operator.api.unknown_fields import unknown_fields
from grpo_operator.api.v1alpha1.status import Phase, SettledImages
from grpo_operator.plan.later_defaults import without_later_defaults
from grpo_operator.plan.status.conditions import Conditions

_MOST_FIELDS = 8  # named in one condition
_WITHOUT_PODS = (Phase.INVALID, Phase.WAITING, Phase.PENDING)
_Spec = TypeVar("_Spec", bound=Model)
ServedSpecs = Mapping[type[Model], dict[str, Any]]  # the API server's schemas of specs


def is_accepted(obj: dict[str, Any]) -> bool:
    """Return whether an operator has accepted the job or pool, so that it has pods or had some."""
    status = obj.get("status") or {}
    settled = status.get("layout") or status.get("images")
    return bool(settled) or status.get("phase") not in (None, *_WITHOUT_PODS)


def spec_of(model: type[_Spec], obj: dict[str, Any], accepted: bool, served: ServedSpecs) -> _Spec:
    """Return the spec of a job or pool. Raises ValidationError.

    Unknown fields are refused until the object is ``accepted``, unless they have the defaults of newer CRDs.
    Afterwards a newer operator has accepted them, and an older one must not stop what runs.
    """
    data = obj["spec"]
    if accepted:
        return model.of_any_release(data)
    try:
        return model.model_validate(data)
    except ValidationError:
        spec = model.of_any_release(data)
        model.model_validate(without_later_defaults(data, spec, served.get(model) or {}))
        return spec


def note_unknown_fields(conditions: Conditions, spec: Model) -> None:
    """Add the condition that names the fields of an accepted spec which this operator does not know."""
    fields = unknown_fields(spec, "spec")
    if not fields:
        return
    more = f" and {len(fields) - _MOST_FIELDS} more" if len(fields) > _MOST_FIELDS else ""
    message = (
        f"this operator ignores fields that only a newer one knows: {', '.join(fields[:_MOST_FIELDS])}"
        f"{more}: upgrade the operator"
    )
    conditions.set("FieldsIgnored", True, "OlderOperator", message)


def settled_images(
    accepted: SettledImages | None, cluster: dict[str, Any] | None, default: SettledImages
) -> SettledImages:
    """Return the images of an object's pods where its spec names none.

    ``accepted``: those in its status. Without them, an older operator has accepted the object, or one was
    stopped before it wrote the status; then the live RayCluster ``cluster`` has them, if there is one.
    ``default``: of a new object.
    """
    if accepted is not None or cluster is None:
        return accepted or default
    spec = cluster["spec"]
    (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    engines = (g for g in spec["workerGroupSpecs"] if g["groupName"].startswith(names.ROLLOUT))
    agents = (_image_of("agent", group["template"]) for group in engines)
    templates = [group["template"] for group in spec["workerGroupSpecs"]]
    scope = "namespace" if any(map(_mounts_master, templates)) else default.key_scope
    return SettledImages(trainer=head["image"], rollout=next(agents, default.rollout), key_scope=scope)


def _mounts_master(template: dict[str, Any]) -> bool:
    volumes = template["spec"].get("volumes", [])
    return any(v.get("secret", {}).get("secretName") == names.MASTER_SECRET for v in volumes)


def _image_of(container: str, template: dict[str, Any]) -> str:
    return next(str(c["image"]) for c in template["spec"]["containers"] if c["name"] == container)
