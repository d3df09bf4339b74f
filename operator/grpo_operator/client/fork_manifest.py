"""Manifest of a job that starts from another job's checkpoint (pure)."""

import copy
from collections.abc import Mapping
from typing import Any

import yaml

from grpo_operator.api import manifest_yaml

_OF_ONE_JOB = ("suspend", "managedBy")  # fields that a fork does not take over
_KEPT_METADATA = ("namespace", "labels")


def fork(job: dict[str, Any], name: str, step: int | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of job ``name``, which starts from a checkpoint of ``job``.

    ``step``: of the checkpoint; None: the newest. ``changes``: values by their paths below spec, such as
    ``trainer.optimizer.lr``. Raises ValueError for a path that leads through a value that is no object.
    """
    spec = {key: value for key, value in copy.deepcopy(job["spec"]).items() if key not in _OF_ONE_JOB}
    source: dict[str, Any] = {"job": job["metadata"]["name"]}
    spec.setdefault("checkpoint", {})["resumeFrom"] = source | ({"step": step} if step is not None else {})
    for path, value in changes.items():
        _set(spec, path, value)
    metadata = {key: job["metadata"][key] for key in _KEPT_METADATA if key in job["metadata"]}
    kind = {"apiVersion": job["apiVersion"], "kind": job["kind"]}
    return kind | {"metadata": metadata | {"name": name}, "spec": spec}


def parsed(change: str) -> tuple[str, Any]:
    """Return path and value of a text such as ``trainer.optimizer.lr=5e-7``, whose value is YAML.

    Raises ValueError for other texts.
    """
    path, equals, text = change.partition("=")
    if not equals or not all(path.split(".")):
        raise ValueError(f"{change}: write PATH=VALUE, such as trainer.optimizer.lr=5e-7")
    try:
        return path, manifest_yaml.load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{change}: {text} is not YAML: {error}") from error


def _set(spec: dict[str, Any], path: str, value: Any) -> None:
    names = path.split(".")
    inner: Any = spec
    for number, name in enumerate(names[:-1]):
        inner = inner.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{path}: spec.{'.'.join(names[: number + 1])} has no fields below it")
    inner[names[-1]] = value
