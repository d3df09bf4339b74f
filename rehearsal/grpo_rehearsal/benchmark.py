"""``make rehearse``: rehearsals of the flagship manifest, and short ones of all manifests.

Writes benchmarks/results/rehearsal.json. ``manifests_checked`` counts the manifests with GPUs whose plan
fits, whose engines SGLang builds as planned, and which were rehearsed with few prompts.

Each scenario runs in a process of its own, so that the memory of one is not counted for another. Reports and
pictures are written to build/rehearsal.
"""

import argparse
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import RESULTS, record
from grpo_operator.cli.manifest import Manifest
from grpo_operator.plan.planner.efficiency import MEASURED
from grpo_rehearsal.manifests import engines_built, gpu_manifests, plan_fits

MANIFEST = REPO / "manifests" / "deepseek-v3-512xh100.yaml"
OUTPUT = REPO / "build" / "rehearsal"
PICTURE = RESULTS / "rehearsal.svg"
_FEW = ("--prompts", "16", "--mean-response", "512")  # prompts of a step where only the ranks matter

ALL_MANIFESTS = "manifests"  # name of the short rehearsals of all manifests


def _lost(when: int, *nodes: int) -> tuple[str, ...]:
    """Return the options for nodes that are lost at the same time."""
    return tuple(f"--lose-node={node}:{when}" for node in nodes)


SCENARIOS: dict[str, tuple[str, ...]] = {
    "calm": (),
    # Two samples for each place of the engines: calm has a place for each sample.
    "over-subscribed": ("--running", "512"),
    "engine-death": ("--kill-engine", "3:120"),
    "16-engines": ("--engines", "16"),
    "long-tail": ("--sigma", "1.2"),
    # Every response as long as it may be: the most that the controller holds.
    "full-length": ("--mean-response", "14336", "--sigma", "0.001"),
    "straggler": ("--slow-engine", "2:1.5"),
    "late-engines": ("--late-engine", "1:400", "--late-engine", "2:600"),
    # 1/64 of the prompts: at full size the engines would keep 125 GB of experts.
    "routing-replay": ("--prompts", "8", "--routing-replay"),
    # A straggler among the ranks, and an agent whose reports take most of their five seconds.
    "slow-rank": ("--slow-rank", "77:1.3"),
    "late-agent": (*_FEW, "--late-agent", "2:4"),
    # In the first call after generation.
    "lost-node": (*_FEW, "--lose-node", "5:62"),
    # Three nodes at once, during the update of the third step.
    "store-restore": (*_FEW, "--steps", "4", "--checkpoint-every", "1", *_lost(290, 5, 6, 21)),
    "hang": (*_FEW, "--hang-rank", "77:62"),
    # In the second step, after a checkpoint.
    "lost-head": (*_FEW, "--steps", "3", "--checkpoint-every", "1", "--lose-head", "290"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the scenarios, by default all; return 1 when a job did not succeed or a manifest failed a check."""
    names = [*SCENARIOS, ALL_MANIFESTS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", default=names, help=f"of {', '.join(names)}")
    options = parser.parse_args(arguments)
    wanted = [name for name in options.scenarios if name != ALL_MANIFESTS]
    reports = {name: run(MANIFEST, name, SCENARIOS[name]) for name in wanted}
    figures = figures_of(reports) if reports else {}
    failed = []
    if ALL_MANIFESTS in options.scenarios:
        checks = check_manifests()
        failed = [name for name, passed in checks.items() if not passed]
        figures |= {"manifests_checked": float(len(checks) - len(failed))}
    print(record("rehearsal", figures).read_text())
    for name in failed:
        print(f"{name}: it does not fit, SGLang builds other engines, or its rehearsal failed")
    return int(bool(failed) or any(report["phase"] != "Succeeded" for report in reports.values()))


def check_manifests() -> dict[str, bool]:
    """Return for each manifest with GPUs whether it passes all checks, with a short rehearsal."""
    found = list(gpu_manifests())
    return {
        job.file.stem: plan_fits(job) and same and run(job.file, ALL_MANIFESTS, _FEW)["phase"] == "Succeeded"
        for job, same in zip(found, engines_built(found), strict=True)
    }


def run(manifest: Path, name: str, options: tuple[str, ...]) -> dict[str, Any]:
    """Run one scenario in a new process and return its report; its phase is "" without one."""
    ((job, _),) = Manifest.read(manifest).jobs
    file = OUTPUT / f"{job}-{name}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "grpo_rehearsal.main", str(manifest), "--name", name]
    subprocess.run([*command, "--output", str(OUTPUT), *options], check=False)
    if not file.is_file():
        return {"phase": ""}
    report: dict[str, Any] = json.loads(file.read_text())
    if name == "calm":
        PICTURE.write_bytes(file.with_suffix(".svg").read_bytes())
    return report


def figures_of(reports: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """Return the figures of the result file."""
    figures: dict[str, float | None] = {
        "livelocks": float(sum(report["phase"] != "Succeeded" for report in reports.values())),
        "samples_consumed_twice": float(sum(r["ledger"]["consumed_twice"] for r in reports.values())),
        "samples_missing": float(sum(r["ledger"]["missing"] for r in reports.values())),
    }
    if "calm" in reports:
        figures |= _of_calm(reports["calm"]) | model_errors()
        figures |= _margins([reports[name] for name in ("calm", "store-restore") if name in reports])
    if "full-length" in reports:
        figures |= {
            f"{key}_full_length": value for key, value in _of_controller(reports["full-length"]).items()
        }
    if "store-restore" in reports:
        figures |= _of_store_restore(reports["store-restore"])
    for name, key in (
        ("engine-death", "step_seconds_engine_death"),
        ("16-engines", "step_seconds_16_engines"),
        ("long-tail", "step_seconds_long_tail"),
        ("straggler", "step_seconds_straggler"),
        ("late-engines", "step_seconds_late_engines"),
        ("slow-rank", "step_seconds_slow_rank"),
    ):
        if name in reports:
            figures[key] = reports[name]["steps"][0]["step"]
    if "over-subscribed" in reports:
        figures["in_flight_share_512"] = reports["over-subscribed"]["generation"]["in_flight_share"]
    if "routing-replay" in reports:
        replayed = reports["routing-replay"]
        figures["r3_bytes_through_controller"] = replayed["routed_experts_bytes"]
        experts = replayed["links"]["engine>trainer"] - replayed["joins"]["kept_bytes"]
        figures["r3_gib_engine_to_ranks_scaled"] = 64 * experts / 2**30
    if "lost-node" in reports:
        figures["lost_node_recovery_seconds"] = reports["lost-node"]["lost_node_recovery_seconds"]
    if "lost-head" in reports:
        figures["lost_head_recovery_seconds"] = reports["lost-head"]["lost_head_recovery_seconds"]
    if "hang" in reports:
        figures["hang_named_seconds"] = reports["hang"]["hang_named_seconds"]
    return figures


def model_errors() -> dict[str, float | None]:
    """Return the largest errors, in percent, of the cost model on measured steps that it was not fitted to.

    ``model_error_pct_max_gpu``: of steps on GPUs; ``model_error_pct_tiny_moe``: of tiny-moe on real pods;
    ``model_error_pct_max``: of both, and of other jobs on CPUs.
    """
    sys.path.insert(0, str(REPO / "benchmarks"))
    gpu = float(import_module("step_fit").figures(MEASURED)["step_model_error_pct_max"])
    cpu = float(import_module("cpu_steps").figures()["cpu_step_model_error_pct_max"])
    pods = float(import_module("pod_fit").figures()["cpu_step_model_error_pct_tiny_moe"])
    return {
        "model_error_pct_max": max(gpu, cpu, pods),
        "model_error_pct_max_gpu": gpu,
        "model_error_pct_tiny_moe": pods,
    }


def _of_calm(report: dict[str, Any]) -> dict[str, float | None]:
    step = report["steps"][0]
    return {
        "step_seconds_predicted_512": step["step"],
        "generation_seconds_512": step["gen"],
        "update_seconds_512": step["update_actor"],
        "sync_seconds_512": step["update_weights"],
        "idle_share_rollout_512": report["idle_share"]["rollout"],
        "idle_share_trainer_512": report["idle_share"]["trainer"],
        **_of_controller(report),
    }


def _of_controller(report: dict[str, Any]) -> dict[str, float | None]:
    """Return the CPU seconds, the memory and the sent bytes of the controller."""
    return {
        "controller_seconds_per_step": report["controller_cpu"]["serial_per_step"],
        "generation_client_cpu_seconds_per_step": report["controller_cpu"]["client_per_step"],
        "controller_rss_gib": report["memory"]["controller_peak_rss"] / 2**30,
        "controller_egress_bytes": report["egress_ratio"] * report["batch_bytes"],
        "controller_egress_ratio": report["egress_ratio"],
    }


def _of_store_restore(report: dict[str, Any]) -> dict[str, float | None]:
    """Return the seconds of a save and of a restore, and the smallest margin of the calls that make them."""
    saved, loads = report["checkpoints"]["saves"][0], report["checkpoints"]["loads"]
    margins = [entry["margin"] for entry in report["deadlines"] if "_checkpoint " in entry["what"]]
    return {
        "checkpoint_save_seconds_512": report["steps"][0]["save_checkpoint"],
        "checkpoint_written_seconds_512": saved["written"],
        "checkpoint_read_seconds_512": loads[0]["seconds"] if loads else None,
        "checkpoint_deadline_margin_512": min(margins, default=None),
        "store_restore_seconds_512": report["lost_node_recovery_seconds"],
    }


def _margins(reports: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the smallest margin of the waits that are known, and of those of which a longer one is known."""
    entries = [entry for report in reports for entry in report["deadlines"] if entry["margin"] is not None]
    exact, bounds = (
        [entry["margin"] for entry in entries if entry["upper_bound"] is bound] for bound in (False, True)
    )
    return {
        "smallest_deadline_margin": min(exact, default=None),
        "smallest_deadline_margin_of_bounds": min(bounds, default=None),
    }


if __name__ == "__main__":
    sys.exit(main())
