"""Status of a RolloutPool from what is observed (pure)."""

from typing import Any

from grpo_operator.api.rolloutpool import RolloutPoolSpec, RolloutPoolStatus
from grpo_operator.api.status import EngineState
from grpo_operator.plan import names
from grpo_operator.plan.conditions import Conditions
from grpo_operator.plan.observed import Observed


def pool_status(
    pool: dict[str, Any], spec: RolloutPoolSpec, job: str, observed: Observed, now: str
) -> RolloutPoolStatus:
    """Status of a pool whose engines run in the RayCluster of ``job``."""
    engines = observed.engines()
    serving = [e for e in engines if e.state == EngineState.SERVING]
    version = max((e.weight_version or 0 for e in serving), default=None)
    generation = pool["metadata"]["generation"]
    old = (pool.get("status") or {}).get("conditions") or []
    conditions = Conditions(old, generation, now)
    enough, whole = len(serving) >= spec.min_available, len(serving) >= spec.replicas
    text = f"{len(serving)} of {spec.replicas} engines serve"
    conditions.set("Ready", enough, "EnginesServing" if enough else "TooFewEngines", text)
    conditions.set(
        "Degraded", not whole, "EnginesMissing" if not whole else "PoolWhole", "" if whole else text
    )
    conditions.set("Reconciling", not whole, "EnginesStarting" if not whole else "PoolWhole")
    conditions.set("Stalled", False, "Reconciled")
    selector = ",".join(f"{k}={v}" for k, v in sorted(names.labels(job, names.ROLLOUT).items()))
    return RolloutPoolStatus(
        observed_generation=generation,
        phase="Serving" if whole else ("Degraded" if enough else "Starting"),
        replicas=len(engines),
        ready_replicas=len(serving),
        weight_version=version,
        selector=selector,
        engines=engines,
        conditions=conditions.result(),
    )


def unowned_status(pool: dict[str, Any], now: str) -> RolloutPoolStatus:
    """Status of a pool that no job created: it gets no engine, and says so."""
    generation = pool["metadata"]["generation"]
    old = (pool.get("status") or {}).get("conditions") or []
    conditions = Conditions(old, generation, now)
    message = (
        "this pool belongs to no GRPOJob and gets no engines: describe the pool in the job's "
        "spec.rollout.template instead"
    )
    conditions.set("Ready", False, "NoOwner", message)
    conditions.set("Stalled", True, "NoOwner", message)
    return RolloutPoolStatus(observed_generation=generation, phase="Stalled", conditions=conditions.result())
