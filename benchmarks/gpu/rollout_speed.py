"""Output tokens per second of the controller's rollout phase beside ``sglang.bench_serving``.

    CUDA_HOME=... ENGINE_PYTHONPATH=... python3 benchmarks/gpu/rollout_speed.py rollout.json [--only CASE]
    python3 benchmarks/gpu/rollout_speed.py --cpu [--only CASE]

One engine, started as a rollout pod starts it, with dummy weights. In each round bench_serving and our phase
get the same prompts, lengths, temperature and number of requests in flight, one after the other, each with an
empty prefix cache. Ours returns log-probabilities and judges the answers, as a job needs it; bench_serving
does neither. The engine's plugin draws by a seed for both. ``plain`` is bench_serving as its users run it,
with a part of the stream for each token. The last round also has one that waits for whole answers, which
costs the server less than ours does.
``--cpu``: a small model and small cases; writes benchmarks/results/rollout_cpu.json. Its figures are ratios
of CPU seconds, which vary less than speeds do beside other work on the machine. Otherwise
benchmarks/from_gpu.py reads the result.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from engine_process import REPO, EngineProcess
from models import ENGINE_MODELS
from rollout_cases import CPU_CASES, GPU_CASES, VERSION, RolloutCase
from rollout_figures import Rounds, case_figures, cpu_figures, figures
from rollout_phase import RolloutPhase
from serving_baseline import VARIANTS, ServingBaseline

from grpo_devcluster.results import record, record_cases, stamp, write_raw
from grpo_operator.api.catalog.architectures import architecture
from grpo_worker.rollout.engine_load import RankLoad

PORT = 31500
CONCURRENCY, CPU_CONCURRENCY = 512, 64
_START_SECONDS = 300
_VERSION = ["--weight-version", str(VERSION)]
_GPU = [
    *("--attention-backend", "triton", "--grammar-backend", "none"),
    *("--cuda-graph-bs", "1", "16", "64", "128", "256", "384", "512"),
]


@contextmanager
def started_engine(folder: Path, model: str, cpu: bool) -> Iterator[EngineProcess]:
    """Start the engine; end it when the context is left."""
    own: dict[str, Any] = {
        "context_length": 256, "max_total_tokens": 32768, "max_running_requests": CPU_CONCURRENCY,
        "extra_args": _VERSION,
    } if cpu else {
        "context_length": 2048, "max_total_tokens": 256 * 1024, "max_running_requests": CONCURRENCY,
        "memory_fraction": 0.85, "deterministic": False, "extra_args": [*_GPU, *_VERSION],
    }  # fmt: skip
    config = architecture("tiny-moe") if cpu else ENGINE_MODELS[model]
    engine = EngineProcess(folder, config, PORT, () if cpu else (0,), **own)
    try:
        yield engine
    except Exception:
        print(engine.log_tail(), file=sys.stderr)
        raise
    finally:
        engine.stop()


def flush(engine: EngineProcess) -> None:
    """Empty the engine's prefix cache."""
    headers = {"authorization": f"Bearer {engine.key.read_text()}"}
    httpx.post(f"{engine.url}/flush_cache", headers=headers, timeout=60).raise_for_status()


def measure(
    case: RolloutCase, engine: EngineProcess, baseline: ServingBaseline, rounds: int, concurrency: int
) -> dict[str, Any]:
    """Return the rounds of one case and their figures. One round of each kind before them does not count."""
    phase = RolloutPhase(case, REPO / "benchmarks" / "gpu" / "reward.py", PORT, concurrency)
    requests = [
        (prompt.ids, case.lengths[prompt.index]) for prompt in phase.prompts() for _ in range(case.samples)
    ]
    found: dict[str, Rounds] = {name: [] for name in ("ours", *VARIANTS)}
    try:
        phase.run()
        for number in range(rounds):
            for variant in VARIANTS if number == rounds - 1 else ["plain"]:
                found[variant].append(_round(engine, partial(baseline.run, requests, variant)))
            found["ours"].append(_round(engine, phase.run))
    finally:
        phase.close()
    result = {"requests": len(requests), "concurrency": concurrency, "rounds": found}
    return result | {"figures": case_figures(found)}


def _round(engine: EngineProcess, run: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Run one side with an empty prefix cache; add the CPU seconds that it costs the engine."""
    flush(engine)
    before = engine.cpu_seconds()
    return run() | {"engine_cpu_seconds": engine.cpu_seconds() - before}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("a time limit ended the run"))  # ends the engine too
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path, nargs="?", help="not with --cpu")
    parser.add_argument("--cpu", action="store_true", help="a small model on the CPU")
    parser.add_argument("--only", choices=GPU_CASES, action="append", help="run this case; may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=ENGINE_MODELS, default="qwen3-8b", help="of the engine on a GPU")
    args = parser.parse_args()
    if (args.result is None) != args.cpu:
        parser.error("give a result file on a GPU, none with --cpu")
    origin = stamp("" if args.cpu else _gpu())
    running = CPU_CONCURRENCY if args.cpu else CONCURRENCY
    in_flight = running + RankLoad(max_running=running).queue  # as many as our client keeps in flight
    every, cases = CPU_CASES if args.cpu else GPU_CASES, {}
    with tempfile.TemporaryDirectory() as name, started_engine(Path(name), args.model, args.cpu) as engine:
        engine.await_alive(time.monotonic() + _START_SECONDS)
        baseline = ServingBaseline(Path(name) / "baseline", PORT, engine.environment, in_flight)
        for case in args.only or every:
            cases[case] = {"model": "tiny-moe" if args.cpu else args.model}
            cases[case] |= measure(every[case], engine, baseline, args.rounds, running)
            print(case, json.dumps(cases[case]["figures"], indent=1), flush=True)
            if args.cpu:
                record_cases("rollout_cpu", {case: cases[case]})
            else:
                write_raw(args.result, origin, cases=cases, figures=figures(cases))
    print(json.dumps(figures(cases) | cpu_figures(cases), indent=1))
    if args.cpu and cases.keys() == every.keys():
        record("rollout_cpu", cpu_figures(cases))


def _gpu() -> str:
    import torch

    return f"1 x {torch.cuda.get_device_name()}"


if __name__ == "__main__":
    main()
