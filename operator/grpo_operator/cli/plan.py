"""``grpo-plan MANIFEST``: prints the operator's plan for a GRPOJob, without a cluster."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from grpo_operator.api.errors import describe
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutTemplate
from grpo_operator.cli.report import as_data, as_table
from grpo_operator.plan.planner.resolve import RefusedError, check_reference, resolve

_Named = tuple[str, dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    """Print the plan of each GRPOJob in a manifest; return 1 when one is refused, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="grpo-plan", description=__doc__)
    parser.add_argument("manifest", type=Path, help="YAML file with one or more GRPOJobs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--store-gigabytes-per-second", type=float, default=5.0, metavar="GB/S",
        help="write speed of one node to the checkpoint store (default 5)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        jobs, pools = _read(options.manifest)
    except (OSError, ValueError) as error:
        print(f"grpo-plan: {error}", file=sys.stderr)
        return 2
    plans: list[dict[str, Any]] = []
    refused = False
    for name, body in jobs:
        try:
            plans.append({"name": name, **_plan(body, pools, options.store_gigabytes_per_second * 1e9)})
        except (RefusedError, ValidationError) as error:
            text = describe(error) if isinstance(error, ValidationError) else str(error)
            plans.append({"name": name, "refused": text})
            refused = True
    print(json.dumps(plans, indent=2) if options.json else "\n\n".join(map(_text, plans)))
    return int(refused)


def _read(path: Path) -> tuple[list[_Named], dict[str, dict[str, Any]]]:
    """Return (name, spec) of each GRPOJob, and the specs of the RolloutPools by name."""
    try:
        documents = [d for d in yaml.safe_load_all(path.read_text()) if d]
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    jobs = _of_kind(documents, "GRPOJob")
    if not jobs:
        raise ValueError(f"{path} contains no object of kind GRPOJob")
    return jobs, dict(_of_kind(documents, "RolloutPool"))


def _of_kind(documents: list[Any], kind: str) -> list[_Named]:
    objects = [d for d in documents if isinstance(d, dict) and d.get("kind") == kind]
    return [(str((d.get("metadata") or {}).get("name", "?")), d.get("spec") or {}) for d in objects]


def _pool(spec: GRPOJobSpec, pools: dict[str, dict[str, Any]]) -> RolloutTemplate:
    """Return the job's own pool, or the pool of its poolRef from the same file."""
    if spec.rollout.template is not None:
        return spec.rollout.template
    assert spec.rollout.pool_ref is not None
    name = spec.rollout.pool_ref.name
    if name not in pools:
        raise RefusedError(
            f"spec.rollout.poolRef.name={name}: the manifest contains no such RolloutPool: add it to the file"
        )
    pool = RolloutPoolSpec.model_validate(pools[name])
    check_reference(spec, pool)
    return pool


def _plan(body: dict[str, Any], pools: dict[str, dict[str, Any]], store_speed: float) -> dict[str, Any]:
    spec = GRPOJobSpec.model_validate(body)
    pool = _pool(spec, pools)
    return as_data(spec, pool, resolve(spec, pool), store_speed)


def _text(plan: dict[str, Any]) -> str:
    title = f"GRPOJob {plan['name']}"
    if "refused" in plan:
        return f"{title}\nrefused: {plan['refused']}"
    return f"{title}\n{as_table(plan)}"


if __name__ == "__main__":
    sys.exit(main())
