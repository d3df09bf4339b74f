"""Every deadline that a rehearsal met, and how close it came."""

from inspect import signature
from typing import Any

from grpo_rehearsal.run import Outcome
from grpo_worker.rollout.client import RolloutClient

_NO_LIMIT = 7 * 86400.0  # seconds; a longer limit means that progress ends the wait
_CLIENT_LIMIT = float(signature(RolloutClient).parameters["hang_seconds"].default)


def deadlines(outcome: Outcome) -> list[dict[str, Any]]:
    """Return (what, limit, seconds, margin) of every deadline, the smallest margin first.

    ``seconds``: the longest wait under the limit. ``margin``: limit / seconds; None without any wait.
    """
    found = [
        _entry(f"http {what}", wait.limit, wait.seconds)
        for what, wait in outcome.cluster.network.waits.items()
        if wait.limit < _NO_LIMIT
    ]
    # An engine that has a request in its queue sends nothing, and the client knows that it waits.
    found.append(_entry("tokens of a sample (client)", _CLIENT_LIMIT, outcome.cluster.network.silence))
    limit = float(outcome.job.spec.restart_policy.hang_seconds)
    longest = max(outcome.cluster.record.gaps, default=0.0)
    found.append(_entry("progress of the ranks (restartPolicy.hangSeconds)", limit, longest))
    return sorted(found, key=lambda entry: entry["margin"] or float("inf"))


def _entry(what: str, limit: float, seconds: float) -> dict[str, Any]:
    margin = limit / seconds if seconds > 0 else None
    return {"what": what, "limit": limit, "seconds": seconds, "margin": margin}
