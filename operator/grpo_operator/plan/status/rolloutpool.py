"""Computes the status of a RolloutPool (pure)."""

from typing import Any

from grpo_operator.api import names
from grpo_operator.api.names import Owner
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutPoolStatus
from grpo_operator.api.v1alpha1.status import EngineState, EngineStatus, Phase, SettledImages
from grpo_operator.plan.accepted import note_unknown_fields
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.serving import serve_status
from grpo_operator.plan.status.conditions import NO_PROBLEM, Conditions, Problem

_MAX_MESSAGES = 4  # engine messages quoted in one condition
_NO_WEIGHTS = "the engines wait for weights: name this pool in a GRPOJob's spec.rollout.poolRef"


def pool_status(
    pool: dict[str, Any],
    spec: RolloutPoolSpec,
    owner: Owner,
    observed: Observed,
    writer: str | None,
    now: str,
    blocked: Problem = NO_PROBLEM,
    images: SettledImages | None = None,
) -> RolloutPoolStatus:
    """Return the status of a pool.

    ``owner``: owner of the RayCluster that runs the engines. ``writer``: the job that is bound to the pool.
    ``blocked``: why the pool's children cannot be applied. ``images``: None for the pool of a job.
    """
    engines = observed.engines()
    serving = [e for e in engines if e.state == EngineState.SERVING]
    version = max((e.weight_version or 0 for e in serving), default=None)
    conditions = _conditions(pool, now)
    # A colocated engine that waits while the trainers use its GPUs counts as available.
    available = len(serving) + sum(bool(e.waits) for e in engines)
    enough, whole = available >= spec.min_available, available >= spec.replicas
    idle = writer is None and not available and spec.serve is None
    refusal = observed.ray_cluster.refusal if observed.ray_cluster else ""
    text = "; ".join(
        [
            f"{available} of {spec.replicas} engines serve" + (f" {spec.model.path}" if spec.serve else ""),
            *_messages(engines),
            *filter(None, [observed.node_problem, refusal]),
        ]
    )
    conditions.set(
        "Ready", enough, "EnginesServing" if enough else "TooFewEngines", _NO_WEIGHTS if idle else text
    )
    conditions.set(
        "Degraded", not whole, "EnginesMissing" if not whole else "PoolWhole", "" if whole else text
    )
    conditions.set("Reconciling", not whole, "EnginesStarting" if not whole else "PoolWhole")
    conditions.set("Stalled", bool(blocked.reason), blocked.reason or "Reconciled", blocked.message)
    note_unknown_fields(conditions, spec)
    selector = ",".join(f"{k}={v}" for k, v in sorted(owner.labels(names.ROLLOUT).items()))
    return _updated(
        pool,
        conditions,
        phase="Serving" if whole else ("Degraded" if enough else "Starting"),
        replicas=len(engines),
        ready_replicas=available,
        weight_version=None if spec.serve else version,
        bound_to=writer,
        selector=selector,
        engines=engines,
        images=images,
        serve=serve_status(pool, spec),
    )


def _messages(engines: list[EngineStatus]) -> list[str]:
    """Return why engines do not serve, each reason once."""
    return list(dict.fromkeys(e.message for e in engines if e.message and not e.waits))[:_MAX_MESSAGES]


def settled_pool_images(pool: dict[str, Any]) -> SettledImages | None:
    """Return the images from the pool's status, or None."""
    seen = (pool.get("status") or {}).get("images")
    return SettledImages.of_any_release(seen) if seen else None


def refused_pool(
    pool: dict[str, Any], reason: str, message: str, now: str, waits: bool = False
) -> RolloutPoolStatus:
    """Return the status of a pool that gets no engines: invalid, infeasible, or (``waits``) has to wait."""
    conditions = _conditions(pool, now)
    conditions.set("Ready", False, reason, message)
    conditions.set("Degraded", False, reason)
    conditions.set("Reconciling", waits, reason, message if waits else "")
    conditions.set("Stalled", not waits, reason, "" if waits else message)
    return _updated(
        pool,
        conditions,
        phase=Phase.WAITING if waits else Phase.INVALID,
        replicas=None,
        ready_replicas=None,
        weight_version=None,
        bound_to=None,
        selector=None,
        engines=[],
        serve=None,
    )


def _updated(pool: dict[str, Any], conditions: Conditions, **values: Any) -> RolloutPoolStatus:
    """Return the pool's status with new values. Fields that only a newer operator knows are kept."""
    before = {k: v for k, v in (pool.get("status") or {}).items() if k not in ("engines", "conditions")}
    values |= {"observed_generation": pool["metadata"]["generation"], "conditions": conditions.result()}
    return RolloutPoolStatus.of_any_release(before).model_copy(update=values)


def _conditions(pool: dict[str, Any], now: str) -> Conditions:
    old = (pool.get("status") or {}).get("conditions") or []
    return Conditions(old, pool["metadata"]["generation"], now)
