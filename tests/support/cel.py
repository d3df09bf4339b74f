"""Specs of GRPOJobs as the API server holds them, and CEL rules as it evaluates them."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import celpy
import yaml
from celpy.adapter import json_to_cel

from grpo_operator.api.crd import structural
from grpo_operator.api.rules import Rule, UpdateRule
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec

MANIFEST = Path(__file__).parents[2] / "manifests" / "tiny-moe.yaml"
SCHEMA = structural(GRPOJobSpec)

Changes = dict[str, Any]


def changed(*changes: Changes) -> dict[str, Any]:
    """Return the manifest's spec with some fields set; missing objects on the way are created."""
    spec: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())["spec"]
    for path, value in (item for change in changes for item in change.items()):
        *parents, last = path.split(".")
        target: Any = spec
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = copy.deepcopy(value)
    return spec


def defaulted(node: Any, schema: dict[str, Any]) -> Any:
    """Add the schema's defaults, as the API server does before it evaluates CEL."""
    if isinstance(node, list):
        return [defaulted(item, schema["items"]) for item in node]
    if not isinstance(node, dict):
        return node
    properties = schema.get("properties", {})
    missing = {
        name: copy.deepcopy(child["default"])
        for name, child in properties.items()
        if name not in node and "default" in child
    }
    return {name: defaulted(value, properties.get(name, {})) for name, value in (node | missing).items()}


@cache
def program(cel: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(cel))


def cel_holds(rule: Rule[Any] | UpdateRule, node: Any, old: Any = None) -> bool:
    activation = {"self": json_to_cel(node)} | ({"oldSelf": json_to_cel(old)} if old else {})
    return bool(program(rule.cel).evaluate(activation))
