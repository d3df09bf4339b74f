"""Figures of checkpoints, and of what the job did after faults of its ranks."""

from typing import Any

from grpo_operator.api.v1alpha1.status import Phase
from grpo_rehearsal.run import Outcome
from grpo_rehearsal.standins.state_bytes import STATE


def checkpoints(outcome: Outcome) -> dict[str, Any]:
    """Return the saves and loads of checkpoints in the store.

    Seconds of a save, from its begin: ``waited``: for the copy, by the step; ``written``: until all bytes are
    in the store; ``complete``: until it counts, None if it never did. ``node_bytes``: of the fullest node.
    """
    record, durations = outcome.cluster.record, outcome.cluster.durations
    read = durations.state.read(STATE)
    return {
        "saves": [
            {
                "step": save.step,
                "bytes": save.nbytes,
                "node_bytes": durations.checkpoint.node,
                "waited": save.copied - save.begin,
                "written": save.written - save.begin,
                "complete": None if save.committed is None else save.committed - save.begin,
            }
            for save in record.saves
        ],
        "loads": [
            {"seconds": end - begin, "bytes": read.total, "node_bytes": read.node}
            for method, begin, end in record.rounds
            if method == "load_checkpoint"
        ],
    }


def hang_named_seconds(outcome: Outcome) -> float | None:
    """Return the seconds from the limit of a hang to the message that names the rank; None without a hang."""
    hung, since = outcome.scenario.hung_rank, outcome.cluster.record.stuck_since
    if hung is None or since is None:
        return None
    limit = outcome.job.spec.restart_policy.hang_limit
    times = [
        t for t, name, value in outcome.board.history if name == "message" and f"rank {hung[0]} " in value
    ]
    return times[0] - since - limit if times else None


def recovery_seconds(outcome: Outcome, lost_part: str) -> float | None:
    """Return the seconds from the first loss until the job trains again; None without a loss.

    ``lost_part``: begin of the names of the losses that count.
    """
    lost = [when for when, what in outcome.cluster.events if what.startswith(lost_part)]
    if not lost:
        return None
    history = outcome.board.history
    again = [t for t, name, value in history if name == "phase" and value is Phase.TRAINING and t > lost[0]]
    return again[0] - lost[0] if again else None
