"""GRPOJobs and RolloutPools of a YAML file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_operator.api import manifest_yaml
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutTemplate
from grpo_operator.plan.planner.pool_checks import check_reference
from grpo_operator.plan.planner.resolve import RefusedError


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a file. ``objects``: the GRPOJobs. ``pools``: specs of RolloutPools by name."""

    objects: list[dict[str, Any]]
    pools: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read a file. Raises OSError, or ValueError for a file that is no YAML or has no GRPOJob."""
        try:
            documents = [document for document in manifest_yaml.load_all(path.read_text()) if document]
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {error}") from error
        objects = _of_kind(documents, "GRPOJob")
        if not objects:
            raise ValueError(f"{path} contains no object of kind GRPOJob")
        return cls(objects, dict(map(_named, _of_kind(documents, "RolloutPool"))))

    @property
    def jobs(self) -> list[tuple[str, dict[str, Any]]]:
        """Return name and spec of each GRPOJob."""
        return [_named(job) for job in self.objects]

    def pool_of(self, spec: GRPOJobSpec) -> RolloutTemplate:
        """Return the job's own pool, or the pool of its poolRef from the same file.

        Raises RefusedError if the file has no such pool, or one that does not fit the job.
        """
        if spec.rollout.template is not None:
            return spec.rollout.template
        assert spec.rollout.pool_ref is not None
        name = spec.rollout.pool_ref.name
        if name not in self.pools:
            raise RefusedError(
                f"spec.rollout.poolRef.name={name}: the manifest contains no such RolloutPool: add it to the "
                "file"
            )
        pool = RolloutPoolSpec.model_validate(self.pools[name])
        check_reference(spec, pool)
        return pool


def _of_kind(documents: list[Any], kind: str) -> list[dict[str, Any]]:
    return [d for d in documents if isinstance(d, dict) and d.get("kind") == kind]


def _named(found: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return str((found.get("metadata") or {}).get("name", "?")), found.get("spec") or {}
