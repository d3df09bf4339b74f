"""Tells when a job's engines will never start (pure)."""

from typing import Any

from grpo_operator.api.errors import cause_of
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.status.container_failures import container_failures


def engine_start_failure(spec: GRPOJobSpec, observed: Observed, old: dict[str, Any]) -> str:
    """Return why no engine of the job's own pool will ever serve, or "".

    The engines are given up when every engine that has a node failed at least
    ``restartPolicy.maxSameFailures`` times, all failed last with the same kind of error, and none has ever
    served. Then the cause is in the job, not in a node.
    """
    if spec.rollout.template is None or old.get("weightVersion") is not None:
        return ""
    placed = [pod for pod in observed.engine_pods() if pod.get("spec", {}).get("nodeName")]
    least = spec.restart_policy.max_same_failures
    failures = [failure for failure in container_failures(placed) if failure.restarts >= least]
    kinds = {cause_of(failure.error).split(":")[0] for failure in failures}
    if not placed or len({failure.pod for failure in failures}) < len(placed) or len(kinds) > 1:
        return ""
    return f"no engine has started: {failures[0].text}"
