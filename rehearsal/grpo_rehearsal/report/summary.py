"""Figures of a rehearsal as JSON-compatible data."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from grpo_operator.api.names import CONTROLLER, ROLLOUT, TRAINER
from grpo_rehearsal.cluster import HEAD_LOST
from grpo_rehearsal.report.agent_memory import AGENT_RSS_OF, agent_rss
from grpo_rehearsal.report.deadlines import deadlines
from grpo_rehearsal.report.intervals import Interval, idle_share, integral, sampled, total_of
from grpo_rehearsal.report.recovery import checkpoints, hang_named_seconds, recovery_seconds
from grpo_rehearsal.run import Outcome

_POINTS = 240
_PHASE = "timing_s/"


def summary(outcome: Outcome) -> dict[str, Any]:
    """Return everything that is known of a rehearsal, apart from the picture."""
    window = window_of(outcome)
    return {
        "job": outcome.job.name,
        "scenario": asdict(outcome.scenario),
        "layout": str(outcome.job.plan.layout),
        "phase": str(outcome.board.get().phase),
        "message": outcome.board.get().message,
        "seconds": {"until_training": window[0], "until_end": outcome.seconds},
        "steps": [_phases(metrics) for metrics in outcome.metrics],
        "generation": generation(outcome, window),
        "idle_share": _idle(outcome, window),
        "links": links(outcome),
        "joins": _joins(outcome),
        "memory": _memory(outcome),
        "controller_cpu": _cpu(outcome),
        "batch_bytes": _batch_bytes(outcome),
        "egress_ratio": egress(outcome) / max(_batch_bytes(outcome), 1.0),
        "routed_experts_bytes": outcome.cluster.record.routed_experts,
        "routed_experts_kept_bytes": sum(e.record.routed_experts for e in outcome.cluster.engines),
        "routed_experts_reference_bytes": sum(e.record.references for e in outcome.cluster.engines),
        "hang_named_seconds": hang_named_seconds(outcome),
        "lost_node_recovery_seconds": recovery_seconds(outcome, "training pod"),
        "lost_head_recovery_seconds": recovery_seconds(outcome, HEAD_LOST),
        "checkpoints": checkpoints(outcome),
        "deadlines": deadlines(outcome),
        "events": [[when, what] for when, what in outcome.cluster.events],
        "status": [[when, name, str(value)] for when, name, value in outcome.board.history],
        "calls": _calls(outcome),
        "ledger": _ledger(outcome),
    }


def window_of(outcome: Outcome) -> Interval:
    """Return begin and end of the steps, without the start of the job."""
    begin = outcome.board.training_since
    ends = [when for when, name, _ in outcome.board.history if name == "step"]
    begin = 0.0 if begin is None else begin
    return begin, max([end for end in ends if end > begin], default=outcome.seconds)


def generation(outcome: Outcome, window: Interval) -> dict[str, Any]:
    """Return how full the engines were, and what they made."""
    engines = outcome.cluster.engines
    running = total_of([[(t, r) for t, r, _ in engine.record.load] for engine in engines])
    waiting = total_of([[(t, w) for t, _, w in engine.record.load] for engine in engines])
    capacity = sum(replica.capacity.running for engine in engines for replica in engine.batch.replicas)
    lengths = [tokens for engine in engines for _, tokens in engine.record.ends]
    return {
        "capacity": capacity,
        "most_running": max((count for _, count in running), default=0),
        "in_flight_share": in_flight_share(outcome, capacity, running),
        "responses": len(lengths),
        "response_mean": sum(lengths) / max(len(lengths), 1),
        "response_longest": max(lengths, default=0),
        "tokens": sum(engine.record.tokens for engine in engines),
        "retractions": sum(replica.retractions for engine in engines for replica in engine.batch.replicas),
        "running": sampled(running, window, _POINTS),
        "waiting": sampled(waiting, window, _POINTS),
    }


def in_flight_share(outcome: Outcome, capacity: int, running: list[tuple[float, int]]) -> float | None:
    """Return the share of the engines' places that are taken while more samples remain than places.

    Returns None for a step that has a place for each of its samples: no sample ever waits for one.
    """
    samples = outcome.job.spec.data.train_batch_size * outcome.job.spec.algorithm.samples_per_prompt
    ends = sorted(when for engine in outcome.cluster.engines for when, _ in engine.record.ends)
    if samples <= capacity:
        return None
    begin = outcome.board.training_since or 0.0
    step_ends = [when for when in ends if when >= begin][: samples - capacity]
    window = (begin, step_ends[-1] if step_ends else begin)
    places = capacity * (window[1] - window[0])
    return integral(running, window) / places if places else 0.0


def links(outcome: Outcome) -> dict[str, int]:
    """Return the bytes over each link."""
    found: Counter[str] = Counter(outcome.cluster.network.bytes_by_link)
    found.update(outcome.cluster.record.nbytes)
    found["trainer>engine"] += sum(sum(agent.received.values()) for agent in outcome.cluster.agents)
    return dict(sorted(found.items()))


def _joins(outcome: Outcome) -> dict[str, Any]:
    """Return what the links of the newest gang needed beside weights; an entry for each kind of engine."""
    gang = outcome.cluster.links
    if gang is None:
        return {"layout_bytes": 0, "kept_bytes": 0, "engines": []}
    engines = [asdict(join) for join in gang.joins]
    return {"layout_bytes": gang.layout_bytes, "kept_bytes": gang.kept_bytes, "engines": engines}


def egress(outcome: Outcome) -> int:
    """Return the bytes that leave the controller's pod: to training pods, engines and their agents."""
    return sum(nbytes for link, nbytes in links(outcome).items() if link.startswith("controller>"))


def _phases(metrics: dict[str, Any]) -> dict[str, float]:
    return {name.removeprefix(_PHASE): value for name, value in metrics.items() if name.startswith(_PHASE)}


def _idle(outcome: Outcome, window: Interval) -> dict[str, float]:
    engines = outcome.cluster.engines
    shares = [idle_share(engine.record.busy, window) for engine in engines]
    rounds = [(begin, end) for _, begin, end in outcome.cluster.record.rounds]
    return {"rollout": sum(shares) / len(shares), "trainer": idle_share(rounds, window)}


def _memory(outcome: Outcome) -> dict[str, Any]:
    job, version = outcome.job, outcome.cluster.durations.version_bytes
    limits = {
        name: job.memory_of(group, container)
        for name, group, container in (
            ("controller", CONTROLLER, "controller"),
            ("trainer", TRAINER, "ray-worker"),
            ("trainer_agent", TRAINER, "agent"),
            ("engine", ROLLOUT, "engine"),
            ("engine_agent", ROLLOUT, "agent"),
        )
    }
    return {
        "controller_peak_rss": outcome.cost.rss,
        "limits": limits,
        "engine_agent": {
            "planned": job.plan.host.agent if job.plan.host else None,
            "measured_rss": agent_rss(),
            "measured_with": AGENT_RSS_OF,
        },
        "staged_version_per_trainer_host": version // job.spec.trainer.nodes,
    }


def _cpu(outcome: Outcome) -> dict[str, Any]:
    """Return CPU seconds of the controller. ``serial``: of the thread for which GPUs wait between phases."""
    cost, steps = outcome.cost, max(len(outcome.metrics), 1)
    during = {name: seconds - outcome.cluster.cpu_before.get(name, 0.0) for name, seconds in cost.cpu.items()}
    return {
        "serial_per_step": during.get("controller", 0.0) / steps,
        "client_per_step": during.get("generate", 0.0) / steps,
        "by_thread": during,
        "stand_ins": cost.stand_ins,
        "real_seconds": cost.real_seconds,
    }


def _batch_bytes(outcome: Outcome) -> float:
    """Return the bytes of the batches' columns, each counted once, as the job measured them."""
    return float(sum(metrics.get("data/put_bytes", 0.0) for metrics in outcome.metrics))


def _calls(outcome: Outcome) -> list[list[Any]]:
    return [[method, begin, end] for method, begin, end in outcome.cluster.record.rounds if end > begin]


def _ledger(outcome: Outcome) -> dict[str, int]:
    """Return how many samples were consumed, how many of them more than once, and how many are missing."""
    uids = Counter(line["uid"] for line in outcome.ledger if "uid" in line)
    spec, steps = outcome.job.spec, len(outcome.metrics)
    wanted = steps * spec.data.train_batch_size * spec.algorithm.samples_per_prompt
    return {
        "samples": sum(uids.values()),
        "consumed_twice": sum(count > 1 for count in uids.values()),
        "missing": wanted - len(uids),
    }
