"""Figures of the jobs of manifests/gpu, as devcluster/gpu-node.sh leaves them (pure).

A job that ended too early counts too, but not among those that succeeded.
"""

import statistics
from collections.abc import Mapping
from datetime import datetime
from typing import Any

_KEPT = (
    *("step", "critic/score/mean", "train/train_rollout_logprob_abs_diff", "actor/entropy", "wall_time"),
    *("timing_s/step", "timing_s/gen", "timing_s/update_actor", "timing_s/update_weights_pause"),
    *("timing_s/to_engines", "timing_s/to_trainers", "timing_s/save_checkpoint", "weight_sync/link_failures"),
    *("perf/throughput", "perf/max_memory_allocated_gb", "perf/waiting_memory_reserved_gb"),
)
_WARM_UP = 2  # steps in which kernels are compiled
# Suffixes of the figures of each manifest.
_KINDS = {
    "deepseek-v3-1b-1gpu": "colocated", "deepseek-v3-1b-2gpu": "static", "deepseek-v3-1b-fp8-2gpu": "fp8",
    "qwen3-moe-1b-2gpu": "colocated_2", "deepseek-v3-1b-4gpu": "static_4",
}  # fmt: skip
_FAULTED = {"deepseek-v3-1b-1gpu": "_colocated", "deepseek-v3-1b-2gpu": "", "deepseek-v3-1b-4gpu": "_4"}
_RECOVERIES = {
    "trainer": ("rank", "trainer_pod"),
    "engine": ("engine_generating", "engine_updating"),
    "controller": ("controller",),
}
# Gigabytes of the fullest GPU: what its rank takes while it trains, and while engines have the GPU.
_TRAINING, _WAITING = "perf/max_memory_allocated_gb", "perf/waiting_memory_reserved_gb"
_GAP = "train/train_rollout_logprob_abs_diff"


def case_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of a job's file."""
    status, steps = content["status"], content["steps"]
    return {
        "phase": status["phase"],
        "progress": status["progress"],
        "weightPath": status["weightPath"],
        "network": status.get("network", ""),
        "goodput": status.get("goodput"),
        "figures": figures_of(status, steps) | content["figures"],
        "steps": [{name: step[name] for name in _KEPT if name in step} for step in steps],
    }


def figures_of(status: Mapping[str, Any], steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of a job beside those of report.summarise."""
    seconds = [step["timing_s/step"] for step in steps[_WARM_UP:]]
    began = datetime.fromisoformat(status["startedAt"]).timestamp()
    found = {
        "start_to_first_step_seconds": round(steps[0]["wall_time"] - began, 1),
        "step_seconds_median": round(statistics.median(seconds), 2),
        "step_seconds_longest": round(max(seconds), 2),
        "logprob_gap_mean": round(statistics.mean(step[_GAP] for step in steps), 4),
        "pause_seconds_longest": round(max(s["timing_s/update_weights_pause"] for s in steps[_WARM_UP:]), 3),
        "link_failures": max(step.get("weight_sync/link_failures", 0) for step in steps),
    }
    shares = [1 - s[_WAITING] / s[_TRAINING] for s in steps[_WARM_UP:] if _WAITING in s]
    return found | ({"memory_returned_share": round(min(shares), 3)} if shares else {})


def fault_case(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of the file of benchmarks/gpu/faults.py about the run with faults."""
    kept = {name: content[name] for name in ("faults", "differences", "equal_steps")}
    return kept | {"phase": content["status"]["phase"], "progress": content["status"]["progress"]}


def fault_figures(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures of jobs that suffered faults, by manifest; see ``fault_case``."""
    found: dict[str, float] = {}
    for name, suffix in _FAULTED.items():
        if name not in cases:
            continue
        survived = {each["fault"]: each["seconds"] for each in cases[name]["faults"] if "failed" not in each}
        found[f"faults_survived{suffix}"] = len(survived)
        found[f"replay_difference{suffix}"] = max(cases[name]["differences"].values())
        found[f"replay_equal_steps{suffix}"] = cases[name]["equal_steps"]
        for kind, faults in _RECOVERIES.items():
            seconds = [survived[fault] for fault in faults if fault in survived]
            if seconds:
                found[f"recovery_seconds_{kind}{suffix}"] = max(seconds)
    return found


def _gpus(manifest: str) -> int:
    """Return the number of GPUs with which the name of a manifest ends, such as "deepseek-v3-1b-4gpu"."""
    return int(manifest.rpartition("-")[2].removesuffix("gpu"))


def figures(
    cases: Mapping[str, Mapping[str, Any]],
    deterministic: Mapping[str, Any],
    faulted: Mapping[str, Mapping[str, Any]],
) -> dict[str, float]:
    """Return the figures of all jobs.

    ``deterministic``: cases of benchmarks/gpu/deterministic.py. ``faulted``: see ``fault_figures``.
    """
    succeeded = {name: case["figures"] for name, case in cases.items() if case["phase"] == "Succeeded"}
    found: dict[str, float] = {"jobs_succeeded": len(succeeded)}
    if succeeded:  # the worst of them
        found["gpus"] = max(map(_gpus, succeeded))
        for figure in ("start_to_first_step_seconds", "logprob_gap_mean"):
            found[figure] = max(own[figure] for own in succeeded.values())
    found |= fault_figures(faulted)
    for name, kind in _KINDS.items():
        if name in cases:
            own = cases[name]["figures"]
            found |= {
                f"step_seconds_{kind}": own["step_seconds_median"],
                f"start_to_first_step_seconds_{kind}": own["start_to_first_step_seconds"],
                f"steps_{kind}": own["steps"],
                f"p_value_{kind}": float(f"{own['p_value']:.2g}"),
                f"logprob_gap_mean_{kind}": own["logprob_gap_mean"],
                f"pause_seconds_longest_{kind}": own["pause_seconds_longest"],
                f"sync_seconds_{kind}": round(own["sync_seconds"], 2),
            }
            if "memory_returned_share" in own:
                found[f"{kind}_memory_returned_share"] = own["memory_returned_share"]
    slow, fast = (deterministic[f"{kind}: transformer_engine on 1"] for kind in ("deterministic", "plain"))
    found["deterministic_price_pct"] = round(100 * (slow["seconds"] / fast["seconds"] - 1), 1)
    return found
