"""Generator of the CRDs from the pydantic models: ``python -m grpo_operator.api.crd DIRECTORY``.

Kubernetes requires structural schemas: references are inlined, ``anyOf [X, null]`` becomes X,
and the CEL side of each model's rules becomes ``x-kubernetes-validations``.
"""

import re
import sys
from pathlib import Path
from typing import Any, get_args

import yaml

from grpo_operator.api.base import GROUP, LONGEST_NAME, VERSION, Model
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutPoolStatus
from grpo_operator.api.v1alpha1.status import Condition, GRPOJobStatus

_LINE_BREAK = re.compile(r"(?<!\n)\n(?!\n)")
_DROP = {"title", "const", "additionalProperties", "$defs", "discriminator"}


def grpojob_crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition of GRPOJob."""
    columns = [
        ("Phase", "string", ".status.phase"),
        ("Reason", "string", ".status.reason"),
        ("Step", "string", ".status.progress"),
        ("ETA", "string", ".status.eta"),
        ("Weights", "string", ".status.weights"),
        ("Reward", "string", ".status.rewardMean"),
        ("Train", "string", ".status.trainReady"),
        ("Rollout", "string", ".status.rolloutReady"),
        ("Restarts", "integer", ".status.restartCount"),
    ]
    return _crd("GRPOJob", "grpojobs", ["grpo"], (GRPOJobSpec, GRPOJobStatus), columns, {}, LONGEST_NAME)


def rolloutpool_crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition of RolloutPool, with the scale subresource."""
    columns = [
        ("Phase", "string", ".status.phase"),
        ("Ready", "integer", ".status.readyReplicas"),
        ("Replicas", "integer", ".spec.replicas"),
        ("Weights", "integer", ".status.weightVersion"),
        ("Job", "string", ".status.boundTo"),
        ("Model", "string", ".spec.model.path"),
    ]
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    models = (RolloutPoolSpec, RolloutPoolStatus)
    # The pool that belongs to a job is named JOB-rollout.
    longest = LONGEST_NAME + len("-rollout")
    return _crd("RolloutPool", "rolloutpools", ["rpool"], models, columns, {"scale": scale}, longest)


def _crd(
    kind: str,
    plural: str,
    short: list[str],
    models: tuple[type[Model], type[Model]],
    columns: list[tuple[str, str, str]],
    subresources: dict[str, Any],
    longest_name: int,
) -> dict[str, Any]:
    spec, status = (structural(model) for model in models)
    printer = [{"name": n, "type": t, "jsonPath": p} for n, t, p in columns]
    printer.append({"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"})
    name_rule = {
        "rule": f"size(self.metadata.name) <= {longest_name}",
        "message": f"metadata.name must have at most {longest_name} characters: names of pods and services "
        "derive from it",
    }
    object_rules = [rule.validation() for rule in models[0].object_rules]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}, **subresources},
        "additionalPrinterColumns": printer,
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "required": ["spec"],
                "properties": {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": {"type": "object"},
                    "spec": spec,
                    "status": status,
                },
                "x-kubernetes-validations": [name_rule, *object_rules],
            }
        },
    }
    names = {
        "kind": kind,
        "listKind": f"{kind}List",
        "plural": plural,
        "singular": kind.lower(),
        "shortNames": short,
        "categories": ["grpo-all"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


def structural(model: type[Model]) -> dict[str, Any]:
    """Return the structural OpenAPI schema of a model."""
    schema = model.model_json_schema(by_alias=True)
    result: dict[str, Any] = _inline(schema, schema.get("$defs", {}))
    _add_rules(result, model)
    return result


def _inline(node: Any, defs: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline(item, defs) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        rest = {k: v for k, v in node.items() if k != "$ref"}
        return _inline({**defs[node["$ref"].rsplit("/", 1)[1]], **rest}, defs)
    if "anyOf" in node:
        (option,) = [o for o in node["anyOf"] if o.get("type") != "null"]
        rest = {k: v for k, v in node.items() if k not in ("anyOf", "default")}
        return _inline({**option, **rest}, defs)
    out = {k: _inline(v, defs) for k, v in node.items() if k not in _DROP}
    if isinstance(node.get("additionalProperties"), dict):
        values = _inline(node["additionalProperties"], defs)
        out["additionalProperties"] = {"maxLength": 256, **values}
        out["maxProperties"] = out.pop("maxLength", out.get("maxProperties", 64))
    if "properties" in node:
        out["properties"] = {k: _inline(v, defs) for k, v in node["properties"].items()}
    if isinstance(out.get("description"), str):  # join the lines of each paragraph of a docstring
        out["description"] = _LINE_BREAK.sub(" ", out["description"]).replace("``", "")
    if "const" in node:
        out["enum"] = [node["const"]]
    for bound, flag in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if bound in out:  # structural schemas use the boolean form
            out[flag], out[bound] = out[bound], True
    return out


def _add_rules(schema: dict[str, Any], model: type[Model]) -> None:
    rules = [{"rule": rule.cel, "message": rule.message} for rule in model.rules]
    rules += [rule.validation() for rule in model.update_rules]
    if rules:
        schema["x-kubernetes-validations"] = rules
    for name, field in model.model_fields.items():
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, Model):
                target = schema["properties"][field.alias or name]
                if field.default_factory is not None and "items" not in target:
                    # CEL rules read nested fields, so the API server must set their defaults first.
                    target["default"] = field.get_default(call_default_factory=True).wire()
                _add_rules(target.get("items", target), inner)
    if any(inner is Condition for f in model.model_fields.values() for inner in get_args(f.annotation)):
        schema["properties"]["conditions"] |= {
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        }


def main() -> None:
    """Write both CRDs to the directory given as the first argument."""
    directory = Path(sys.argv[1])
    for crd in (grpojob_crd(), rolloutpool_crd()):
        text = "# Generated by `make crds` from operator/grpo_operator/api: do not edit.\n"
        text += yaml.safe_dump(crd, sort_keys=False, width=110)
        (directory / f"{crd['metadata']['name']}.yaml").write_text(text)


if __name__ == "__main__":
    main()
