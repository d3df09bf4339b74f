"""Figures of rollout_speed.py from its rounds (pure)."""

import statistics
from typing import Any

Rounds = list[dict[str, float]]


def rates(rounds: Rounds) -> list[float]:
    """Return the output tokens per second of each round."""
    return [one["tokens"] / one["seconds"] for one in rounds]


def case_figures(rounds: dict[str, Rounds]) -> dict[str, float]:
    """Return the speed of ours, and its ratio to each variant of bench_serving.

    ``ratio_worst``: our slowest round by the median of bench_serving, as its users run it. ``cpu_ratio``: CPU
    seconds of the engine with bench_serving, by those of engine and controller with ours.
    """
    speeds = {name: statistics.median(rates(some)) for name, some in rounds.items() if some}
    found = {f"tokens_per_second {name}": speed for name, speed in speeds.items()}
    found |= {f"ratio {name}": speeds["ours"] / speed for name, speed in speeds.items() if name != "ours"}
    found["ratio_worst"] = min(rates(rounds["ours"])) / speeds["plain"]
    cpu = sum(one["controller_cpu_seconds"] for one in rounds["ours"])
    costs = {name: statistics.median(map(_cpu_seconds, some)) for name, some in rounds.items() if some}
    found |= {f"cpu_ratio {name}": cost / costs["ours"] for name, cost in costs.items() if name != "ours"}
    found["controller_cpu_share"] = cpu / sum(one["seconds"] for one in rounds["ours"])
    return found


def _cpu_seconds(one: dict[str, float]) -> float:
    return one["engine_cpu_seconds"] + one.get("controller_cpu_seconds", 0.0)


def figures(cases: dict[str, Any]) -> dict[str, float]:
    """Return the lowest ratio of any case: of medians, of the worst round, and to whole answers."""
    every = [case["figures"] for case in cases.values()]
    return {
        "rollout_ratio_vs_bench_serving": min(case["ratio plain"] for case in every),
        "rollout_ratio_vs_bench_serving_worst_round": min(case["ratio_worst"] for case in every),
        "rollout_ratio_vs_bench_serving_whole_answers": min(case["ratio whole answers"] for case in every),
    }


def cpu_figures(cases: dict[str, Any]) -> dict[str, float]:
    """Return the lowest ratio of CPU seconds of any case."""
    every = [case["figures"] for case in cases.values()]
    return {
        "cpu_ratio_vs_bench_serving": min(case["cpu_ratio plain"] for case in every),
        "cpu_ratio_vs_bench_serving_whole_answers": min(case["cpu_ratio whole answers"] for case in every),
    }
