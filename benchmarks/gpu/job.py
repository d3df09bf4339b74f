"""Whole GRPO steps on GPUs: ours beside TRL's, one step ahead beside on-policy, with and without saves.

    python3 benchmarks/gpu/job.py ours ours.json [--only on_policy] [--cpu]
    python3 benchmarks/gpu/job.py colocated colocated.json [--only staged --memory-fraction 0.7]
    python3 benchmarks/gpu/job.py kernels job_kernels.json [--memory-fraction 0.7]
    python3 benchmarks/gpu/job.py traced traced.json
    python3 benchmarks/gpu/job.py trl trl.json

The first GPU runs an SGLang engine and the second one the trainer; TRL trains and generates on both. TRL
generates with transformers here, not with vLLM. The model is DeepSeek-V3-shaped with random weights.
ENGINE_PYTHONPATH: packages of the engine, if they differ from the trainer's; TRL_PYTHONPATH likewise. Both
need operator, worker_images and devcluster on PYTHONPATH. colocated: trainer and engine alternate on one GPU.
kernels: such a job with Transformer Engine's kernels, and the same one without them; Transformer Engine must
be on PYTHONPATH. traced: the trainer runs under Nsight Systems (``nsys`` on PATH). ``--cpu``: a small model,
engine and trainer with a core each, without TRL; writes benchmarks/results/job_cpu.json and adds to
trainer.json. Otherwise benchmarks/from_gpu.py reads the result.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from job_figures import SAVES, Steps, colocated_figures, figures, kernel_figures, trl_figures
from local_job import REPO, LocalJob
from models import GROUP, JOB_TOKENS, PROMPTS, RESPONSE
from models import JOB_MODEL as MODEL

from grpo_devcluster.results import record, record_cases, stamp, write_raw
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.trainer import KernelChoice

sys.path.insert(0, str(REPO / "benchmarks" / "learning"))

import first_weights

SMALL = architecture("tiny-moe") | {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
}
CPU_PROMPTS, CPU_RESPONSE = 4, 128
TRL_ROWS, TRL_STEPS = 8, 5
MEMORY_FRACTION = 0.82  # of a colocated engine
_GPU_ENGINE = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
Keep = Callable[[dict[str, Any]], None]  # writes the cases that have ended so far


def spec_of(folder: Path, cpu: bool, **own: Any) -> GRPOJobSpec:
    """Return the job's spec. ``own``: fields that differ from it."""
    device = "cpu" if cpu else "cuda"
    engine: dict[str, Any] = {
        "device": device,
        "contextLength": 256 if cpu else 3072,
        "maxRunningRequests": 128,
    }
    if cpu:
        engine |= {"dtype": "float32", "maxTotalTokens": 16384}
    else:
        engine |= {"memoryFraction": 0.7, "extraArgs": [*_GPU_ENGINE, "--cuda-graph-bs", "1", "16", "48"]}
    spec: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {
            "train": str(folder / "prompts.jsonl"), "promptLength": 120,
            "trainBatchSize": CPU_PROMPTS if cpu else PROMPTS,
            "responseLength": CPU_RESPONSE if cpu else RESPONSE,
        },
        "reward": {"function": f"{REPO / 'benchmarks/gpu/reward.py'}:compute_score"},
        "algorithm": {"samplesPerPrompt": GROUP, "maxLogProbGap": 1.0},
        "trainer": {
            "device": device, "nodes": 1, "gpusPerNode": 1, "recompute": "none",
            "maxTokensPerGpu": JOB_TOKENS,
            "miniBatchSize": CPU_PROMPTS if cpu else PROMPTS,
        },
        "rollout": {"template": {"engine": engine}},
        "checkpoint": {"store": {"path": str(folder)}, "everySteps": 1000},
        "observability": {"tensorboard": False},
        "totalSteps": 5,
    }  # fmt: skip
    return GRPOJobSpec.model_validate(spec | own)


def prepare(folder: Path, cpu: bool) -> None:
    """Write model and prompts."""
    first_weights.write(folder / "model", SMALL if cpu else MODEL, 1)
    rows = [{"prompt": f"What is {n} times {n + 7}?\n", "answer": str(n * (n + 7))} for n in range(4096)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))


def ours(folder: Path, cpu: bool, only: str, keep: Keep) -> dict[str, Any]:
    """Run the jobs and return the metrics of their steps."""
    cases: dict[str, Steps] = {}
    with LocalJob(folder, spec_of(folder, cpu), os.environ.get("ENGINE_PYTHONPATH", "")) as host:
        saves = {"store": {"path": str(folder)}, "everySteps": SAVES}
        jobs: dict[str, dict[str, Any]] = {
            "on_policy": {"totalSteps": 5},
            "ahead": {"totalSteps": 6, "staleness": {"maxVersionLag": 1}},
        }
        if cpu:  # the cost of a save beside a step does not need the larger model
            jobs["saving"] = {"totalSteps": 2 * SAVES, "checkpoint": saves}
        for name, own in jobs.items():
            if only in (name, ""):
                cases[name] = host.run(name, spec_of(folder, cpu, **own))
                keep(cases)
    return {"cases": cases} | ({} if only else {"figures": figures(cases)})


def colocated(folder: Path, fraction: float, only: str, keep: Keep) -> dict[str, Any]:
    """Run jobs on one GPU, which cannot hold the memory of engine and trainer at the same time."""
    specs = {
        transport: _on_one_gpu(folder, fraction, weightSync={"transport": transport})
        for transport in ("cuda-ipc", "staged")
        if only in (transport, "")
    }
    cases: dict[str, Any] = {}
    with LocalJob(folder, next(iter(specs.values())), os.environ.get("ENGINE_PYTHONPATH", "")) as host:
        for name, spec in specs.items():
            with MemoryMeter() as memory:
                history = host.run(name, spec)
            cases[name] = {
                "figures": colocated_figures(history, memory.used),
                "memory_fraction": fraction,
                "steps": history,
                "megabytes_used": memory.used,
            }
            keep(cases)
    return {"cases": cases}


def kernels(folder: Path, fraction: float, only: str, keep: Keep) -> dict[str, Any]:
    """Run the same job on one GPU with each kind of the trainer's kernels."""
    specs = {
        kind: _on_one_gpu(folder, fraction, kernels=kind)
        for kind in (KernelChoice.TRANSFORMER_ENGINE, KernelChoice.LOCAL)
        if only in (kind, "")
    }
    cases: dict[str, Any] = {}
    with LocalJob(folder, next(iter(specs.values())), os.environ.get("ENGINE_PYTHONPATH", "")) as host:
        for kind, spec in specs.items():
            cases[kind] = {"steps": host.run(kind, spec)}
            keep(cases)
    return {"cases": cases} | ({} if only else {"figures": kernel_figures(cases)})


def _on_one_gpu(folder: Path, fraction: float, kernels: str = "auto", **own: Any) -> GRPOJobSpec:
    """Return the spec of a job whose trainer and engine alternate. ``fraction``: of the engine's memory."""
    static = spec_of(folder, False).wire()
    static["rollout"]["template"]["engine"]["memoryFraction"] = fraction
    offload = dict.fromkeys(("parameters", "gradients", "optimizer"), True)
    trainer = static["trainer"] | {"offload": offload, "kernels": kernels}
    shared = {"mode": "colocated", "totalSteps": 4, "trainer": trainer, "rollout": static["rollout"]}
    return spec_of(folder, False, **shared, **own)


def traced(folder: Path) -> dict[str, Any]:
    """Run a job whose second step Nsight Systems captures; return step times and sizes of the trace files."""
    profile = {"tool": "nsight", "ranks": [0], "stepStart": 2, "stepEnd": 2}
    spec = spec_of(folder, False, totalSteps=4, observability={"tensorboard": False, "profile": profile})
    with LocalJob(folder, spec, os.environ.get("ENGINE_PYTHONPATH", "")) as host:
        history = host.run("traced", spec)
        files = {file.name: file.stat().st_size for file in (folder / "traced" / "profile").iterdir()}
    assert files, "nsys wrote nothing"
    return {"figures": {"bytes": files, "step_seconds": [step["timing_s/step"] for step in history]}}


class MemoryMeter:
    """Megabytes in use on the first GPU, sampled twice a second."""

    def __init__(self) -> None:
        self.used: list[int] = []

    def __enter__(self) -> "MemoryMeter":
        query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        command = ["nvidia-smi", "--id=0", *query, "-lms", "500"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.used.extend(int(line) for line in self._process.stdout)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._reader.join()


def trl(folder: Path) -> dict[str, Any]:
    """Run TRL on all GPUs; return seconds and tokens of its steps."""
    file = folder / "spec.json"
    file.write_text(json.dumps(spec_of(folder, cpu=False).wire()))
    result = folder / "trl-result.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(torch.cuda.device_count()),
        str(Path(__file__).parent / "trl_speed.py"), str(file), str(folder / "model"),
        str(folder / "prompts.jsonl"), str(result), "--steps", str(TRL_STEPS), "--rows", str(TRL_ROWS),
    ]  # fmt: skip
    path = os.pathsep.join([os.environ.get("TRL_PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)
    measured = json.loads(result.read_text())
    return {"cases": {"trl": trl_figures(measured["at"], measured["tokens"])}}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=("ours", "colocated", "kernels", "traced", "trl"))
    parser.add_argument("result", type=Path)
    parser.add_argument("--only", default="", help="run this job of the case alone")
    parser.add_argument("--cpu", action="store_true", help="with ours: a small model without GPUs")
    parser.add_argument("--memory-fraction", type=float, default=MEMORY_FRACTION, help="with colocated")
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("a time limit ended the jobs"))  # their logs are shown
    args = parse()
    where = "" if args.cpu else f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    origin = stamp(where)
    partial = args.result.with_suffix(".partial")

    def keep(cases: dict[str, Any]) -> None:
        if not args.cpu:
            write_raw(partial, origin, cases=cases)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, args.cpu)
        if args.case == "ours":
            result = ours(folder, args.cpu, args.only, keep)
        elif args.case in ("colocated", "kernels"):
            alternating = colocated if args.case == "colocated" else kernels
            result = alternating(folder, args.memory_fraction, args.only, keep)
        else:
            result = traced(folder) if args.case == "traced" else trl(folder)
    print(json.dumps(result.get("figures", {}), indent=1))
    if args.cpu:
        _record(result)
    else:
        write_raw(args.result, origin, **result)
    partial.unlink(missing_ok=True)


def _record(result: dict[str, Any]) -> None:
    record_cases("job_cpu", result["cases"])
    if "figures" in result:
        record("job_cpu", result["figures"])
        names = ("checkpoint_stall_pct_every_4_steps", "checkpoint_stall_pct_at_600_s_interval",
                 "controller_overhead_pct")  # fmt: skip
        own = {name: round(result["figures"][name], 3) for name in names}
        record("trainer", own | {"cpu_overlap_ratio": round(result["figures"]["overlap_ratio"], 3)})


if __name__ == "__main__":
    main()
