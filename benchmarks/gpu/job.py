"""Whole GRPO steps on GPUs: ours beside TRL's, one step ahead beside on-policy, with and without saves.

    python3 benchmarks/gpu/job.py ours RESULT.json [--cpu]
    python3 benchmarks/gpu/job.py colocated RESULT.json
    python3 benchmarks/gpu/job.py traced RESULT.json
    python3 benchmarks/gpu/job.py trl RESULT.json

The first GPU runs an SGLang engine, the second the trainer; TRL gets both for all it does. The model is
DeepSeek-V3-shaped, with random weights. ENGINE_PYTHONPATH: packages of the engine, when they are others
than the trainer's; TRL_PYTHONPATH likewise. ``--cpu``: a small model, engine and trainer with a core each,
without TRL. colocated: trainer and engine take turns on one GPU. traced: the trainer runs under Nsight
Systems (``nsys`` on PATH). ONLY: of the jobs of a case this one.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from one_host import REPO, OneHost

from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec

sys.path.insert(0, str(REPO / "benchmarks" / "learning"))

import start

MODEL = architecture("deepseek-v3") | {
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 512,
    "n_routed_experts": 32,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SMALL = architecture("tiny-moe") | {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
}
PROMPTS, RESPONSE, GROUP = 3, 2048, 16  # about as long to generate as to train on
CPU_PROMPTS, CPU_RESPONSE = 4, 128
TRL_ROWS, TRL_STEPS = 8, 3
SAVES = 4  # steps between two checkpoints
INTERVAL = 600  # seconds between two checkpoints of a real job
ONLY = os.environ.get("ONLY", "")
_GPU_ENGINE = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]


def spec_of(folder: Path, cpu: bool, **own: Any) -> GRPOJobSpec:
    """The job; ``own``: what differs from it, by field."""
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
    wanted: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {
            "train": str(folder / "prompts.jsonl"), "promptLength": 120,
            "trainBatchSize": CPU_PROMPTS if cpu else PROMPTS,
            "responseLength": CPU_RESPONSE if cpu else RESPONSE,
        },
        "reward": {"function": f"{REPO / 'benchmarks/gpu/reward.py'}:compute_score"},
        "algorithm": {"samplesPerPrompt": GROUP, "maxLogProbGap": 1.0},
        "trainer": {
            "device": device, "nodes": 1, "gpusPerNode": 1, "recompute": "none", "maxTokensPerGpu": 16384,
            "miniBatchSize": CPU_PROMPTS if cpu else PROMPTS,
        },
        "rollout": {"template": {"engine": engine}},
        "checkpoint": {"store": {"path": str(folder)}, "everySteps": 1000},
        "observability": {"tensorboard": False},
        "totalSteps": 5,
    }  # fmt: skip
    return GRPOJobSpec.model_validate(wanted | own)


def prepare(folder: Path, cpu: bool) -> None:
    """Model and prompts."""
    start.write(folder / "model", SMALL if cpu else MODEL, 1)
    rows = [{"prompt": f"What is {n} times {n + 7}?\n", "answer": str(n * (n + 7))} for n in range(4096)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))


def seconds(history: list[dict[str, Any]], name: str, skip: int = 1) -> float:
    """Median of a phase over the steps, without the first ones."""
    return statistics.median(step.get(f"timing_s/{name}", 0.0) for step in history[skip:])


def ours(folder: Path, cpu: bool, target: Path) -> dict[str, Any]:
    """The jobs' metrics, step by step; each is written as soon as its job has ended."""
    found: dict[str, Any] = {}
    with OneHost(folder, spec_of(folder, cpu), os.environ.get("ENGINE_PYTHONPATH", "")) as host:
        lag = {"maxVersionLag": 1}
        saves = {"store": {"path": str(folder)}, "everySteps": SAVES}
        jobs: dict[str, dict[str, Any]] = {
            "on_policy": {"totalSteps": 5},
            "ahead": {"totalSteps": 6, "staleness": lag},
        }
        if cpu:  # what a save costs beside a step does not need the larger model
            jobs["saving"] = {"totalSteps": 2 * SAVES, "checkpoint": saves}
        for name, own in jobs.items():
            if ONLY not in (name, ""):
                continue
            found[name] = host.run(name, spec_of(folder, cpu, **own))
            target.write_text(json.dumps({"steps": found}))
    return found


def colocated(folder: Path, target: Path) -> dict[str, Any]:
    """Jobs on one GPU, which cannot hold what engine and trainer take at once."""
    offload = dict.fromkeys(("parameters", "gradients", "optimizer"), True)
    static = spec_of(folder, False).wire()
    static["rollout"]["template"]["engine"]["memoryFraction"] = 0.82
    own = {"mode": "colocated", "totalSteps": 4, "trainer": static["trainer"] | {"offload": offload}}
    specs = {
        transport: spec_of(
            folder, False, **own, rollout=static["rollout"], weightSync={"transport": transport}
        )
        for transport in ("cuda-ipc", "staged")
        if ONLY in (transport, "")
    }
    found: dict[str, Any] = {}
    with OneHost(folder, next(iter(specs.values())), os.environ.get("ENGINE_PYTHONPATH", "")) as host:
        for name, spec in specs.items():
            with MemoryMeter() as memory:
                history = host.run(name, spec)
            found[name] = turns(history, memory.used)
            target.write_text(json.dumps({"jobs": found}))
    return {"jobs": found, "figures": {name: each["figures"] for name, each in found.items()}}


def traced(folder: Path) -> dict[str, Any]:
    """Steps of a job whose second step Nsight Systems captures, and the files that it leaves."""
    profile = {"tool": "nsight", "ranks": [0], "stepStart": 2, "stepEnd": 2}
    spec = spec_of(folder, False, totalSteps=4, observability={"tensorboard": False, "profile": profile})
    with OneHost(folder, spec, os.environ.get("ENGINE_PYTHONPATH", "")) as host:
        history = host.run("traced", spec)
        files = {file.name: file.stat().st_size for file in (folder / "traced" / "profile").iterdir()}
    assert files, "nsys wrote nothing"
    return {"figures": {"bytes": files, "step_seconds": [step["timing_s/step"] for step in history]}}


def turns(history: list[dict[str, Any]], megabytes_used: list[int]) -> dict[str, Any]:
    """Of one job: seconds of a step's parts, and how much of the GPU was in use at once."""
    phases = ("gen", "to_trainers", "update_actor", "update_weights", "to_engines", "step")
    told = {f"{phase}_seconds": seconds(history, phase) for phase in phases}
    gap = statistics.median(entry["train/train_rollout_logprob_abs_diff"] for entry in history)
    told |= {"logprob_gap_mean": gap, "peak_gigabytes": max(megabytes_used) / 1e3}
    return {"figures": told, "steps": history, "megabytes_used": megabytes_used}


class MemoryMeter:
    """Megabytes in use on the first GPU, each half a second."""

    def __init__(self) -> None:
        self.used: list[int] = []

    def __enter__(self) -> "MemoryMeter":
        command = [
            "nvidia-smi",
            "--id=0",
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
            "-lms",
            "500",
        ]
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


def _trained(history: list[dict[str, Any]]) -> float:
    return sum(seconds(history, phase) for phase in ("old_log_prob", "ref", "update_actor"))


def figures(found: dict[str, Any]) -> dict[str, float]:
    """Ratios of one run."""
    own, ahead = found["on_policy"], found["ahead"]
    step, ahead_step = seconds(own, "step", 2), seconds(ahead, "step", 2)
    saves = _saves(found["saving"], step) if "saving" in found else {}
    return saves | {
        "tokens_per_step": statistics.median(entry["perf/total_num_tokens"] for entry in own),
        "tokens_per_second": _throughput(own),
        "tokens_per_second_ahead": _throughput(ahead),
        "generation_to_training": seconds(own, "gen", 2) / _trained(own[1:]),
        "update_weights_seconds": seconds(own, "update_weights", 2),
        "overlap_ratio": step / ahead_step,
        "controller_overhead_pct": 100 * seconds(own, "controller_cpu", 2) / step,
        "logprob_gap_mean": statistics.median(entry["train/train_rollout_logprob_abs_diff"] for entry in own),
    }


def _saves(saving: list[dict[str, Any]], step: float) -> dict[str, float]:
    # From the first save to just before the next one: what a save costs in all, also the steps beside it.
    disturbed = [entry["timing_s/step"] for entry in saving[SAVES - 1 : 2 * SAVES - 1]]
    cost = max(sum(disturbed) - SAVES * step, 0.0)
    return {"checkpoint_seconds": cost, "checkpoint_stall_pct": 100 * cost / INTERVAL}


def _throughput(history: list[dict[str, Any]]) -> float:
    """Tokens per second, prompts and answers both counted."""
    return statistics.median(e["perf/total_num_tokens"] / e["timing_s/step"] for e in history[2:])


def peer(folder: Path) -> dict[str, Any]:
    """TRL on all GPUs: seconds and tokens of its steps."""
    file = folder / "spec.json"
    file.write_text(json.dumps(spec_of(folder, cpu=False).wire()))
    here, result = Path(__file__).parent, folder / "peer.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(torch.cuda.device_count()),
        str(here / "peer.py"), str(file), str(folder / "model"), str(folder / "prompts.jsonl"),
        str(TRL_STEPS), str(TRL_ROWS), str(result),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    told = json.loads(result.read_text())
    taken = [b - a for a, b in zip(told["at"], told["at"][1:], strict=False)]
    tokens = [b - a for a, b in zip([0, *told["tokens"]], told["tokens"], strict=False)]
    speed = statistics.median(n / t for n, t in zip(tokens[1:], taken[1:], strict=True))
    return {"seconds": taken, "tokens": tokens, "tokens_per_second": speed}


def main() -> None:
    case, target, cpu = sys.argv[1], Path(sys.argv[2]), "--cpu" in sys.argv
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, cpu)
        if case == "ours":
            found = ours(folder, cpu, target)
            result: dict[str, Any] = {"figures": figures(found) if not ONLY else {}, "steps": found}
            print(json.dumps(result["figures"], indent=1))
        elif case in ("colocated", "traced"):
            result = colocated(folder, target) if case == "colocated" else traced(folder)
            print(json.dumps(result["figures"], indent=1))
        else:
            result = peer(folder)
            print(json.dumps(result))
    if cpu:
        from grpo_devcluster.results import record  # only where there is no GPU

        names = ("checkpoint_stall_pct", "controller_overhead_pct")
        told = {name: result["figures"][name] for name in names}
        told["cpu_overlap_ratio"] = result["figures"]["overlap_ratio"]
        record("trainer", {name: round(value, 3) for name, value in told.items()})
    else:
        result["gpus"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    target.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
