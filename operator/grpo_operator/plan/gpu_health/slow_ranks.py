"""Evidence against nodes from the stragglers of jobs that want their pods replaced (pure)."""

from collections.abc import Iterable
from typing import Any

from grpo_operator.plan.gpu_health.strikes import Evidence, Records, fresh
from grpo_operator.plan.times import seconds_of

REASON = "Straggler"


def slow_nodes(
    job: dict[str, Any] | None, pods: Iterable[dict[str, Any]], records: Records
) -> dict[str, Evidence]:
    """Return the evidence against nodes on which a job's status names stragglers.

    A pod that started before the last strike of its node is leaving and does not count again.
    """
    policy = ((job or {}).get("spec", {}).get("restartPolicy") or {}).get("stragglers") or {}
    named = {one["pod"]: one for one in ((job or {}).get("status") or {}).get("stragglers") or []}
    if not policy.get("replace") or not named:
        return {}
    found: dict[str, Evidence] = {}
    for pod in pods:
        one, node = named.get(pod["metadata"]["name"]), pod["spec"].get("nodeName")
        if one is None or not node or not fresh(pod, records.get(node)):
            continue
        text = f"rank {one['rank']} computes {one['ratio']} times as long as its peers' median"
        found[node] = Evidence(REASON, text, seconds_of(pod["metadata"]["creationTimestamp"]))
    return found
