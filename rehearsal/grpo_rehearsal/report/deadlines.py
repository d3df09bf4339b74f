"""Every deadline that a rehearsal met, and how close it came."""

from typing import Any

from grpo_rehearsal.run import Outcome
from grpo_worker.controller.config import pool_timeout
from grpo_worker.weightsync.transport.rendezvous import JOIN_SECONDS

_HANG = "restartPolicy.hangSeconds"
_NO_LIMIT = 7 * 86400.0  # seconds; a longer limit means that progress ends the wait


def deadlines(outcome: Outcome) -> list[dict[str, Any]]:
    """Return (what, limit, seconds, margin, upper_bound) of every deadline, the smallest margin first.

    ``seconds``: the longest wait under the limit. ``margin``: limit / seconds; None without any wait.
    ``upper_bound``: the stand-ins do not know the wait itself, but one that is at least as long.
    """
    found = [
        _entry(f"http {what}", wait.limit, wait.seconds)
        for what, wait in outcome.cluster.network.waits.items()
        if wait.limit < _NO_LIMIT
    ]
    found += [*_of_samples(outcome), *_of_ranks(outcome), *_of_weights(outcome)]
    return sorted(found, key=lambda entry: entry["margin"] or float("inf"))


def _of_samples(outcome: Outcome) -> list[dict[str, Any]]:
    spec, cluster = outcome.job.spec, outcome.cluster
    # An engine that has a request in its queue sends nothing, and the client knows that it waits.
    tokens = f"tokens of a sample ({_HANG})"
    unserved = "an engine serves the samples' version (4 x timeoutSeconds)"
    return [
        _entry("a token (rollout.stallSeconds)", float(spec.stall_seconds), cluster.waits.tokenless),
        _entry(tokens, float(spec.restart_policy.hang_limit), cluster.network.silence),
        _entry(unserved, pool_timeout(spec.weight_sync), cluster.waits.unserved),
    ]


def _of_ranks(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the deadline of each method's progress.

    Upper bounds: times that are assumed as a whole, in which real ranks report more often.
    """
    hang = float(outcome.job.spec.restart_policy.hang_limit)
    return [
        _entry(f"progress in {method} ({_HANG})", hang + gap.allowance, gap.seconds, gap.assumed)
        for method, gap in outcome.cluster.record.gaps.items()
        if gap.seconds
    ]


def _of_weights(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the deadlines of weight updates.

    Upper bound: the seconds in which links open are assumed. The last engine waits for the ranks while they
    open the other links, so all seconds count as if its members gave no sign of life in them.
    """
    spec, cluster = outcome.job.spec, outcome.cluster
    timeout = pool_timeout(spec.weight_sync)
    patience = float(min(spec.weight_sync.patience, spec.restart_policy.hang_limit))
    methods = {method for method, *_ in cluster.record.rounds}
    assembly = cluster.durations.join() if "open_links" in methods else 0.0
    waves = cluster.links.waves if cluster.links else ()
    wave = cluster.durations.waves(waves).longest_wait if "send_weights" in methods else 0.0
    found = [
        _entry("minAvailable engines serve a version (4 x timeoutSeconds)", timeout, cluster.waits.served),
        _entry("wave of a transfer (weightSync.timeoutSeconds)", patience, wave),
        _entry("sign of life of a link's members", JOIN_SECONDS, assembly, True),
    ]
    if spec.shares_gpus:
        turn = "engines hold or release memory (4 x timeoutSeconds)"
        found.append(_entry(turn, timeout, cluster.waits.turned))
    return found


def _entry(what: str, limit: float, seconds: float, upper_bound: bool = False) -> dict[str, Any]:
    margin = limit / seconds if seconds > 0 else None
    return {
        "what": what, "limit": limit, "seconds": seconds, "margin": margin, "upper_bound": upper_bound
    }  # fmt: skip
