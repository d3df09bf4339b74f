"""Manifest of a job that starts from another job's checkpoint (pure)."""

import copy
from collections.abc import Iterable
from typing import Any

import yaml

_OF_ONE_JOB = ("suspend", "managedBy")  # fields that a fork does not take over
_KEPT_METADATA = ("namespace", "labels")


def fork(job: dict[str, Any], name: str, step: int | None, changes: Iterable[str]) -> dict[str, Any]:
    """Return the manifest of job ``name``, which starts from a checkpoint of ``job``.

    ``step``: of the checkpoint; None: the newest. ``changes``: ``path=value`` with a path below spec and a
    value in YAML, such as ``trainer.optimizer.lr=5e-7``. Raises ValueError for a change that is not such a
    text, or whose path leads through a value that is no object.
    """
    spec = {key: value for key, value in copy.deepcopy(job["spec"]).items() if key not in _OF_ONE_JOB}
    source: dict[str, Any] = {"job": job["metadata"]["name"]}
    spec.setdefault("checkpoint", {})["resumeFrom"] = source | ({"step": step} if step is not None else {})
    for change in changes:
        _apply(spec, change)
    metadata = {key: job["metadata"][key] for key in _KEPT_METADATA if key in job["metadata"]}
    kind = {"apiVersion": job["apiVersion"], "kind": job["kind"]}
    return kind | {"metadata": metadata | {"name": name}, "spec": spec}


def _apply(spec: dict[str, Any], change: str) -> None:
    path, equals, text = change.partition("=")
    names = path.split(".")
    if not equals or not all(names):
        raise ValueError(f"--set {change}: write PATH=VALUE, such as trainer.optimizer.lr=5e-7")
    inner: Any = spec
    for number, name in enumerate(names[:-1]):
        inner = inner.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ValueError(f"--set {change}: spec.{'.'.join(names[: number + 1])} has no fields below it")
    try:
        inner[names[-1]] = _value(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {change}: {text} is not YAML: {error}") from error


def _value(text: str) -> Any:
    value = yaml.safe_load(text)
    if isinstance(value, str):  # YAML 1.1 takes 5e-7 for a text
        try:
            return float(value)
        except ValueError:
            return value
    return value
