"""Metadata of every child of a job (pure)."""

from typing import Any

from grpo_operator.plan import names


def metadata(job: dict[str, Any], name: str, labels: dict[str, str] | None = None) -> dict[str, Any]:
    """Name, namespace, labels, and the job as owner."""
    meta = job["metadata"]
    return {
        "name": name,
        "namespace": meta["namespace"],
        "labels": {names.JOB_LABEL: meta["name"]} | (labels or {}),
        "ownerReferences": [names.owner_reference(job)],
    }
