"""``python benchmarks/from_gpu.py FOLDER``: add measurements of GPU hosts to benchmarks/results.

FOLDER holds any of these files, with the origin of each in the file itself:
sync.json (benchmarks/gpu/sync.py); ours.json with trl.json, on_policy.json (``ours --only on_policy``),
colocated.json and traced.json (benchmarks/gpu/job.py); update.json, packing.json and rounding.json
(benchmarks/gpu/trainer_speed.py); draft.json (benchmarks/gpu/draft.py); engine.json
(benchmarks/gpu/engine_speed.py); wave_work.json (benchmarks/gpu/wave_work.py); kernels.json
(benchmarks/gpu/kernels.py); context.json (benchmarks/gpu/context_speed.py); rank_checkpoint.json
(benchmarks/gpu/rank_checkpoint.py); precision.json (benchmarks/gpu/precision.py); precision_aware.json
(benchmarks/gpu/precision_aware.py); overlap.json (benchmarks/gpu/overlap_speed.py); expert_overlap.json
(benchmarks/gpu/expert_overlap_speed.py); activation_offload.json (benchmarks/gpu/activation_offload.py);
nccl_memory.json and nccl_memory_network.json (benchmarks/gpu/nccl_memory.py); deterministic.json
and deterministic_plain.json (benchmarks/gpu/deterministic.py); rollout.json
(benchmarks/gpu/rollout_speed.py); gpu_health.json (benchmarks/gpu/gpu_health.py); layouts.json
(benchmarks/gpu/layouts.py); peak_tensors.json (benchmarks/gpu/peak_tensors.py); jobs of
manifests/gpu under their names, as devcluster/gpu-node.sh leaves them; memory-*.json and
held-out-*.json (benchmarks/gpu/planner_memory.py); updates-*.json (benchmarks/gpu/planner_updates.py).
Raw data go to the files with ``_gpu`` in their name, planner_memory.json and planner_memory_held_out.json,
figures to sync.json and trainer.json.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import RESULTS, Stamp, record, record_cases

sys.path.insert(0, str(REPO / "benchmarks" / "gpu"))

import gpu_jobs
import layout_figures
from job_figures import mfu_figures, update_weights_figures
from models import MODEL, SEQUENCE, training_mfu_pct
from precision_figures import figures as precision_figures
from rollout_cases import GPU_CASES
from rollout_figures import figures as rollout_figures

KUBERNETES, FAULTS = "gpu_kubernetes", "gpu_faults"
_RAW = {  # files whose content is kept as it is -> results file
    "colocated": "colocated_gpu", "traced": "traced_gpu", "engine": "engine_speed_gpu",
    "wave_work": "wave_work_gpu", "precision_aware": "precision_aware_gpu", "overlap": "overlap_gpu",
    "expert_overlap": "expert_overlap_gpu", "activation_offload": "activation_offload_gpu",
    "deterministic": "deterministic_gpu", "deterministic_plain": "deterministic_gpu",
    "nccl_memory": "nccl_memory_gpu", "nccl_memory_network": "nccl_memory_gpu", "gpu_health": "gpu_health",
    "peak_tensors": "peak_tensors_gpu",
}  # fmt: skip
_PARTS = {
    "engine_receive_and_load": ("receive and load", "tab:blue"),
    "rest": ("the request around it, pause and resume", "tab:gray"),
}


def sync(measured: dict[str, Any]) -> None:
    """Record updates between GPUs. Cases that the host had too few GPUs for keep their earlier figures."""
    cases, origin = measured["cases"], measured["of"]
    if "small" not in cases:
        _sync_on_one_gpu(cases, origin)
        return
    record_cases("sync_gpu", cases, origin)
    draw(cases, origin["machine"])
    small, wide, fp8 = (cases[name]["figures"] for name in ("small", "wide", "fp8"))
    figures = {
        "bytes_ratio_vs_nccl": wide["bytes_ratio_vs_nccl"],
        "bytes_ratio_small_matrices": small["bytes_ratio_vs_nccl"],
        "bytes_ratio_fp8": fp8["bytes_ratio_vs_nccl"],
        "receive_ratio_fp8": fp8["bytes_ratio_vs_nccl"],
        "pause_ratio_wide": wide["pause_ratio"],
        "pause_ratio_small": small["pause_ratio"],
        "pause_ratio_fp8": fp8["pause_ratio"],
        "first_over_later": _most(cases, "first_over_later"),
        "rejoin_over_version": _most(cases, "rejoin_over_version"),
        "speedup_vs_per_tensor": small["speedup_vs_per_tensor"],
        "speedup_vs_per_tensor_wide": wide["speedup_vs_per_tensor"],
        "pause_seconds": small["pause_seconds"],
        "pause_seconds_longest": max(r["pause"] for case in cases.values() for r in case["rounds"][1:]),
        "raw_copy_seconds": small["raw_seconds"],
        "extra_memory_buckets": _most(cases, "extra_memory_buckets"),
        "trainer_extra_memory_buckets": _most(cases, "trainer_extra_memory_buckets"),
        "fp8_speedup": wide["engine_receive_and_load_seconds"] / fp8["engine_receive_and_load_seconds"],
        "buffered_pause_seconds": small["buffered_pause_seconds"],
        "buffered_whole_seconds": small["buffered_whole_seconds"],
    }
    kinds = {"wide": wide, "small": small, "fp8": fp8}
    figures |= {f"buffered_pause_ratio_{kind}": of["buffered_pause_ratio"] for kind, of in kinds.items()}
    split = {"bytes_ratio_2_to_2": "small 2 to 2",
             "bytes_ratio_2_to_2_shared_gpus": "small 2 to 2, shared GPUs"}  # fmt: skip
    for figure, case in split.items():
        if case in cases:
            figures[figure] = cases[case]["figures"]["bytes_ratio_vs_nccl"]
    if split["bytes_ratio_2_to_2_shared_gpus"] in cases:
        figures["ratio_2_to_2_shared"] = figures["bytes_ratio_2_to_2_shared_gpus"]
    _record("sync", figures, origin)


def _sync_on_one_gpu(cases: dict[str, Any], origin: Stamp) -> None:
    """Record updates within one GPU by CUDA IPC, beside a copy of the same bytes in its memory."""
    record_cases("sync_one_gpu", cases, origin)
    kinds = {name.partition(",")[0]: case["figures"] for name, case in cases.items()}
    figures = {f"one_gpu_copy_ratio_{kind}": of["bytes_ratio_vs_nccl"] for kind, of in kinds.items()}
    figures |= {f"one_gpu_pause_ratio_{kind}": of["pause_ratio"] for kind, of in kinds.items()}
    figures |= {
        f"one_gpu_buffered_pause_ratio_{kind}": of["buffered_pause_ratio"] for kind, of in kinds.items()
    }
    worst = "first_over_later", "rejoin_over_version", "extra_memory_buckets", "trainer_extra_memory_buckets"
    figures |= {f"one_gpu_{figure}": _most(cases, figure) for figure in worst}
    _record("sync", figures, origin)


def _most(cases: dict[str, Any], name: str) -> float:
    return max(float(case["figures"][name]) for case in cases.values())


def draw(cases: dict[str, Any], gpus: str) -> None:
    """Draw the parts of the pause beside a bare broadcast and the baseline."""
    figure, axes = plt.subplots(figsize=(9, 3))
    for row, case in enumerate(cases.values()):
        left = 0.0
        for part, (label, colour) in _PARTS.items():
            width = 1e3 * statistics.median(_seconds(r)[part] for r in case["rounds"][2:])
            axes.barh(row, width, left=left, color=colour, label=label if row == 0 else None)
            left += width
        limit = 1e3 * case["figures"]["raw_seconds"]
        axes.plot([limit, limit], [row - 0.4, row + 0.4], "k--", label="bare broadcast" if row == 0 else None)
        if "per_tensor_seconds" in case["figures"]:
            plain = f"tensor by tensor: {1e3 * case['figures']['per_tensor_seconds']:.0f} ms"
            axes.text(left + 2, row, plain, va="center", fontsize=8)
    axes.set_yticks(range(len(cases)), [f"{n}: {c['bytes'] / 1e9:.1f} GB" for n, c in cases.items()])
    axes.invert_yaxis()
    axes.set_xlabel(f"milliseconds in which the engine is paused ({gpus})")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / "sync_gpu.png", dpi=120)


def _seconds(parts: dict[str, float]) -> dict[str, float]:
    return parts | {"rest": parts["pause"] - parts["engine_receive_and_load"]}


def job(ours: dict[str, Any], trl: dict[str, Any]) -> None:
    """Record whole steps, and their throughput beside TRL's."""
    figures, baseline = ours["figures"], trl["cases"]["trl"]
    ratios = {
        "step_ratio_vs_trl": figures["tokens_per_second"] / baseline["tokens_per_second"],
        "step_ratio_vs_trl_ahead": figures["tokens_per_second_ahead"] / baseline["tokens_per_second"],
    }
    record_cases("job_gpu", ours["cases"], ours["of"])
    record_cases("job_gpu", trl["cases"], trl["of"])
    record("job_gpu", figures | ratios, ours["of"])
    mfu = {f"job_{name}": value for name, value in mfu_figures(ours["cases"]["on_policy"]).items()}
    _record("trainer", ratios | mfu | {"overlap_ratio": figures["overlap_ratio"]}, ours["of"])


def update_weights(measured: dict[str, Any]) -> None:
    """Record the seconds that a weight version takes a job, and the work beside it."""
    figures = update_weights_figures(measured["cases"]["on_policy"])
    record_cases("update_weights_gpu", measured["cases"], measured["of"])
    record("update_weights_gpu", figures, measured["of"])
    _record("sync", {"job_update_weights_seconds": figures["update_weights_seconds"]}, measured["of"])


def trainer(measured: dict[str, Any]) -> None:
    """Record one case of the trainer's speed or rounding."""
    record_cases("trainer_gpu", measured["cases"], measured["of"])
    for name, case in measured["cases"].items():
        _record("trainer", trainer_figures(name, case, measured["of"]["machine"]), measured["of"])


def layouts(measured: dict[str, Any]) -> None:
    """Record updates in layouts of several GPUs."""
    record_cases("trainer_gpu", measured["cases"], measured["of"])
    _record("trainer", layout_figures.figures(measured["cases"]), measured["of"])


def trainer_figures(name: str, case: dict[str, Any], machine: str) -> dict[str, float]:
    """Return the figures of one case. ``machine``: "N x GPU", whose peak rate the utilisation needs."""
    if name == "packing":
        return {"packing_ratio": case["packing_ratio"]}
    if name == "rounding":
        return {
            "bf16_logprob_diff_mean": case["ours_bf16"]["mean"],
            "bf16_logprob_diff_mean_transformers": case["transformers_bf16"]["mean"],
        }
    hf = MODEL | {"num_nextn_predict_layers": 0}
    speeds = [row["tokens_per_second_per_gpu"]["ours"] for row in case["rows"]]
    utilisations = [training_mfu_pct(hf, SEQUENCE, speed, machine) for speed in speeds]
    return {
        "runner_overhead_ratio": case["runner_overhead_ratio"],
        "runner_update_mfu_pct_max": max(utilisations),
        "runner_update_mfu_pct_min": min(utilisations),
    }


def kernels(measured: dict[str, Any]) -> None:
    """Record cases of the kernels, and the figures that all speeds together give."""
    record_cases("kernels_gpu", measured["cases"], measured["of"])
    if measured["figures"]:
        _record("trainer", measured["figures"], measured["of"])


def context(measured: dict[str, Any]) -> None:
    """Record what two context-parallel GPUs compute, and packed beside padded rows."""
    cases, origin = measured["cases"], measured["of"]
    record_cases("context_gpu", cases, origin)
    ratios = {
        "packing_cp_ratio": cases["packing transformer_engine"]["ratio"],
        "packing_cp_ratio_local": cases["packing local"]["ratio"],
    }
    _record("trainer", ratios, origin)


def job_kernels(measured: dict[str, Any]) -> None:
    """Record the same job with and without Transformer Engine's kernels."""
    record_cases("job_kernels_gpu", measured["cases"], measured["of"])
    record("job_kernels_gpu", measured["figures"], measured["of"])
    _record(
        "trainer", {"step_speedup_whole_job": measured["figures"]["step_speedup_whole_job"]}, measured["of"]
    )


def rank_checkpoint(measured: dict[str, Any]) -> None:
    """Record the saves of one rank of DeepSeek-V3's size. The first one pins host memory for all others."""
    cases, origin = measured["cases"], measured["of"]
    record_cases("rank_checkpoint_gpu", cases, origin)
    saves = [cases[name] for name in ("save 1", "save 2", "save 3")]
    rate = cases["limits_gb_per_second"]["plain_file"]
    figures = {
        "checkpoint_stall_seconds_rank": saves[-1]["stall_seconds"],
        "checkpoint_stall_seconds_rank_first": saves[0]["stall_seconds"],
        "checkpoint_host_peak_ratio": max(save["host_peak_ratio"] for save in saves),
        "checkpoint_gpu_extra_ratio": max(save["gpu_extra_ratio"] for save in saves),
        "checkpoint_write_ratio_vs_file": saves[-1]["gb_per_second"] / rate,
        "checkpoint_update_ratio_beside": max(save["update_seconds"] for save in saves)
        / cases["update_seconds_alone"],
    }
    _record("trainer", figures, origin)


def precision(measured: dict[str, Any]) -> None:
    """Record the curves and gaps of both precisions, and the figures that the cases of this file give."""
    record_cases("precision_gpu", measured["cases"], measured["of"])
    found = precision_figures(measured["cases"])
    if found:
        record("trainer", found, measured["of"])


def rollout(measured: dict[str, Any]) -> None:
    """Record the rollout phase beside bench_serving. One model and run: the lowest ratio of all its cases."""
    missing = GPU_CASES.keys() - measured["cases"].keys()
    if missing:
        raise SystemExit(f"rollout.json lacks the cases {sorted(missing)}: measure all of them in one run")
    record_cases("rollout_gpu", measured["cases"], measured["of"])
    _record("trainer", rollout_figures(measured["cases"]), measured["of"])


def drafts(measured: dict[str, Any]) -> None:
    """Record how often drafts are accepted after an update, beside an engine started with the new weights."""
    versions = {name: measured[name] for name in ("version 1", "version 2")}
    accepted = versions["version 2"]["accepted"]
    record_cases("draft_gpu", versions, measured["of"])
    figures = {
        "accepted_tokens_after_update": accepted,
        "accepted_over_fresh_engine": accepted / measured["accepted_by_fresh"],
        "logprob_gap_mean_max": max(version["mean_logprob_gap"] for version in versions.values()),
    }
    _record("draft_gpu", figures, measured["of"])


def kubernetes(origin: Stamp) -> None:
    """Record the figures of all jobs of pods on GPUs."""
    jobs, deterministic, faulted = (_cases(name) for name in (KUBERNETES, "deterministic_gpu", FAULTS))
    record(KUBERNETES, gpu_jobs.figures(jobs, deterministic, faulted), origin)


def _cases(name: str) -> dict[str, Any]:
    file = RESULTS / f"{name}.json"
    return dict(json.loads(file.read_text())["cases"]) if file.exists() else {}


def _record(name: str, figures: dict[str, float], origin: Stamp) -> None:
    record(name, {figure: round(value, 4) for figure, value in figures.items()}, origin)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    files = parser.parse_args().folder.glob("*.json")
    measured = {file.stem: json.loads(file.read_text()) for file in files}
    failed = {name: content["failed"] for name, content in measured.items() if content.get("failed")}
    if failed:
        raise SystemExit(f"nothing was recorded, because cases failed: {failed}; measure them again")
    single: dict[str, Callable[[dict[str, Any]], None]] = {
        "sync": sync, "on_policy": update_weights, "update": trainer, "packing": trainer, "rounding": trainer,
        "draft": drafts, "kernels": kernels, "rank_checkpoint": rank_checkpoint, "precision": precision,
        "context": context, "job_kernels": job_kernels, "rollout": rollout, "layouts": layouts,
    }  # fmt: skip
    for name, content in measured.items():
        if name in single:
            single[name](content)
        elif name in _RAW:
            _keep(_RAW[name], content)
        elif name.startswith("memory-"):
            _keep("planner_memory", content)
        elif name.startswith("updates-"):
            record_cases("updates_gpu", content["cases"], content["of"])
        elif name.startswith("held-out-"):
            _keep("planner_memory_held_out", content)
        elif name.startswith("faulted"):
            record_cases(FAULTS, {content["manifest"]: gpu_jobs.fault_case(content)}, content["of"])
            kubernetes(content["of"])
        elif name == "ours":
            job(content, measured["trl"])
        elif (REPO / "manifests" / "gpu" / f"{name}.yaml").exists():
            record_cases(KUBERNETES, {name: gpu_jobs.case_of(content)}, content["of"])
            kubernetes(content["of"])


def _keep(name: str, content: dict[str, Any]) -> None:
    if "cases" in content:
        record_cases(name, content["cases"], content["of"])
    if "figures" in content:
        record(name, content["figures"], content["of"])


if __name__ == "__main__":
    main()
