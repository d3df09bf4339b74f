"""``python benchmarks/from_gpu.py FOLDER``: takes over what was measured on a host with GPUs.

FOLDER holds what there is of sync.json (benchmarks/gpu/sync.py), ours.json with trl.json, on_policy.json,
colocated.json and traced.json (benchmarks/gpu/job.py; on_policy: ``ours`` with ONLY=on_policy). Writes
sync_gpu.json, sync_gpu.png, job_gpu.json, update_weights_gpu.json, colocated_gpu.json and traced_gpu.json,
and adds to sync.json and trainer.json in benchmarks/results/.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from grpo_devcluster.results import RESULTS, record

_PARTS = {
    "engine_receive_and_load": ("receive and load", "tab:blue"),
    "request": ("the request around it", "tab:cyan"),
    "verify": ("verify", "tab:orange"),
    "rest": ("pause and resume", "tab:gray"),
}


def sync(found: dict[str, Any]) -> dict[str, float]:
    """Figures of the ways between GPUs. A case for which there were too few GPUs stays as it was."""
    file, measured = RESULTS / "sync_gpu.json", found["cases"]
    for case in measured.values():
        case["gpus"] = found["gpus"]
    earlier = json.loads(file.read_text())["cases"] if file.is_file() else {}
    found = found | {"cases": measured | {name: earlier[name] for name in earlier.keys() - measured.keys()}}
    file.write_text(json.dumps(found, indent=1) + "\n")
    small, wide, fp8 = (measured[name]["figures"] for name in ("small", "wide", "fp8"))
    draw(measured, found["gpus"])
    split = {
        figure: measured[case]["figures"]["bytes_ratio_vs_nccl"]
        for figure, case in (
            ("bytes_ratio_2_to_2", "small 2 to 2"),
            ("bytes_ratio_2_to_2_shared_gpus", "small 2 to 2, shared GPUs"),
        )
        if case in measured
    }
    return split | {
        "bytes_ratio_vs_nccl": wide["bytes_ratio_vs_nccl"],
        "bytes_ratio_small_matrices": small["bytes_ratio_vs_nccl"],
        "speedup_vs_per_tensor": small["speedup_vs_per_tensor"],
        "pause_seconds": small["pause_seconds"],
        "raw_copy_seconds": small["raw_seconds"],
        "extra_memory_buckets": _most(measured, "extra_memory_buckets"),
        "trainer_extra_memory_buckets": _most(measured, "trainer_extra_memory_buckets"),
        "fp8_speedup": wide["engine_receive_and_load_seconds"] / fp8["engine_receive_and_load_seconds"],
    }


def _most(cases: dict[str, Any], name: str) -> float:
    return max(float(case["figures"][name]) for case in cases.values())


def draw(cases: dict[str, Any], gpus: str) -> None:
    """Which part of the pause took what, beside a bare broadcast and the baseline."""
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
    axes.set_xlabel(f"milliseconds in which the engine stands still ({gpus})")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / "sync_gpu.png", dpi=120)


def _seconds(told: dict[str, float]) -> dict[str, float]:
    rest = told["pause"] - told["send"] - told["verify"]
    return told | {"request": told["send"] - told["engine_receive_and_load"], "rest": rest}


def job(ours: dict[str, Any], peer: dict[str, Any]) -> dict[str, float]:
    """Figures of whole steps."""
    found = ours["figures"]
    ratios = {
        "step_ratio_vs_trl": found["tokens_per_second"] / peer["tokens_per_second"],
        "step_ratio_vs_trl_ahead": found["tokens_per_second_ahead"] / peer["tokens_per_second"],
        "overlap_ratio": found["overlap_ratio"],
    }
    told = {"gpus": ours["gpus"], "figures": found | ratios, "steps": ours["steps"], "trl": peer}
    (RESULTS / "job_gpu.json").write_text(json.dumps(told, indent=1) + "\n")
    return ratios


def update_weights(found: dict[str, Any]) -> dict[str, float]:
    """Seconds that a version takes a job, and what goes on beside it; medians without the first step."""
    steps = found["steps"]["on_policy"][1:]
    parts = ("update_weights", "update_weights_pause", "update_weights_publish")
    figures = {f"{part}_seconds": statistics.median(s[f"timing_s/{part}"] for s in steps) for part in parts}
    (RESULTS / "update_weights_gpu.json").write_text(
        json.dumps(found | {"figures": figures}, indent=1) + "\n"
    )
    return {"job_update_weights_seconds": figures["update_weights_seconds"]}


def _record(name: str, figures: dict[str, float], found: dict[str, Any]) -> None:
    record(name, {figure: round(value, 4) for figure, value in figures.items()}, found["gpus"])


def main() -> None:
    files = Path(sys.argv[1]).glob("*.json")
    found = {file.stem: json.loads(file.read_text()) for file in files}
    if "sync" in found:
        _record("sync", sync(found["sync"]), found["sync"])
    if "ours" in found:
        _record("trainer", job(found["ours"], found["trl"]), found["ours"])
    if "on_policy" in found:
        _record("sync", update_weights(found["on_policy"]), found["on_policy"])
    for name in found.keys() & {"colocated", "traced"}:
        (RESULTS / f"{name}_gpu.json").write_text(json.dumps(found[name], indent=1) + "\n")


if __name__ == "__main__":
    main()
