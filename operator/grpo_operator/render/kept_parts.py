"""Parts of an accepted job or pool that stay as the operator which accepted it has made them (pure).

Another release or other settings may render the same spec in another way, which the images of a running job
may not know. So the RayCluster carries its parts and what they were made of. An operator replaces a part only
if it would itself make a different one of what the part was made of and of what it is to be made of now. Then
the spec or the nodes have changed, not the operator.
"""

import base64
import json
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import ValidationError

from grpo_operator.api import names
from grpo_operator.kuberay_client.models import HeadGroup, RayCluster, WorkerGroup

Parts = dict[str, Any]
_LONGEST = 2**17  # characters of a record; the API server allows 2**18 in all annotations of an object
_GROUP = "group "


class Record(NamedTuple):
    """``made_of``: JSON-compatible data. ``text``: the record as an annotation."""

    made_of: Parts
    parts: Parts
    text: str

    @classmethod
    def of(cls, made_of: Parts, parts: Parts) -> "Record":
        """Return a new record."""
        data = json.dumps([made_of, parts], sort_keys=True, separators=(",", ":")).encode()
        return cls(made_of, parts, base64.b64encode(zlib.compress(data, 9)).decode())

    @classmethod
    def read(cls, text: str | None) -> "Record | None":
        """Return the record in an annotation; None if there is none, or a user has changed it."""
        try:
            made_of, parts = json.loads(zlib.decompress(base64.b64decode(text or "", validate=True)))
            return cls(dict(made_of), dict(parts), text or "")
        except (ValueError, TypeError, zlib.error):
            return None


def kept_record(made_of: Parts, parts: Parts, seen: str | None, render: Callable[[Parts], Parts]) -> Record:
    """Return the record to apply. ``parts``: as rendered now, of ``made_of``. ``seen``: the live annotation.

    ``render``: renders the parts of other data. It may raise ValidationError for what this release refuses.
    """
    before = Record.read(seen)
    if before is None:
        return Record.of(made_of, parts)
    same = parts if before.made_of == made_of else _rendered(render, before.made_of)
    kept = {name for name in parts if name in before.parts and same.get(name) == parts[name]}
    if kept == parts.keys():
        return before
    return Record.of(made_of, {name: (before.parts if name in kept else parts)[name] for name in parts})


def _rendered(render: Callable[[Parts], Parts], made_of: Parts) -> Parts:
    try:
        return render(made_of)
    except (ValidationError, KeyError, TypeError):
        return {}


def parts_of(cluster: RayCluster) -> Parts:
    """Return the parts of a RayCluster that decide what its pods run."""
    spec = cluster.spec
    head = {
        "rayStartParams": spec.head_group_spec.ray_start_params,
        "template": spec.head_group_spec.template,
    }
    groups = {_GROUP + group.group_name: _part(group) for group in spec.worker_group_specs}
    return {"rayVersion": spec.ray_version, "head": head} | groups


def _part(group: HeadGroup | WorkerGroup) -> Parts:
    return {"rayStartParams": group.ray_start_params, "template": group.template}


def with_parts(cluster: RayCluster, record: Record) -> RayCluster:
    """Return the RayCluster with the parts of a record, and with the record if it is short enough."""
    parts, spec = record.parts, cluster.spec
    groups = [
        group.model_copy(update=_fields(parts[_GROUP + group.group_name]))
        for group in spec.worker_group_specs
    ]
    changed = {
        "ray_version": parts["rayVersion"],
        "head_group_spec": spec.head_group_spec.model_copy(update=_fields(parts["head"])),
        "worker_group_specs": groups,
    }
    annotations = {names.PARTS_ANNOTATION: record.text} if len(record.text) <= _LONGEST else {}
    metadata = cluster.metadata | {"annotations": cluster.metadata["annotations"] | annotations}
    return cluster.model_copy(update={"metadata": metadata, "spec": spec.model_copy(update=changed)})


def _fields(part: Parts) -> Parts:
    return {"ray_start_params": part["rayStartParams"], "template": part["template"]}
