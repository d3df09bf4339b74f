"""``make bench-sync-planner``: planned routes of a weight update of DeepSeek-V3 beside a lower bound.

Adds to benchmarks/results/sync.json: the busiest interface's bytes over the linear program's bound (the worst
of six engine layouts), seconds at RATE of each layout, and seconds of planning. No job uses these routes yet.
"""

import math
import time

from grpo_devcluster.results import record
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.training.stages import stage_layers
from grpo_worker.weightsync.planner.bound import lower_bound
from grpo_worker.weightsync.planner.layouts import EngineShape, engine_side, tensors_of, trainer_side
from grpo_worker.weightsync.planner.regions import Atom, atoms
from grpo_worker.weightsync.planner.routes import Routes, plan_id, route

RATE = 44.26e9  # bytes/s of one 400 Gb/s interface: the best published payload rate
LARGEST = 8 << 20
V3 = architecture("deepseek-v3")
ENGINES = ((16, 16), (8, 32), (4, 64))


def node(gpu: int) -> int:
    return gpu // 8


def trainer(replicas: int) -> Layout:
    """Return the layout of 256 ranks, replicated ``replicas`` times."""
    return Layout(256 * replicas, 8, 8, 4, 32, layers_in_first_stage=7, layers_in_last_stage=6)


def planned(layout: Layout, engines: int, width: int, fp8: bool) -> tuple[list[Atom], Routes, float]:
    """Return atoms, routes and the seconds of planning."""
    start = time.perf_counter()
    stages = {number: s for s, layers in enumerate(stage_layers(61, layout)) for number in layers}
    tensors = tensors_of(V3, fp8)
    held = list(trainer_side(V3, layout, stages.__getitem__))
    needed = list(engine_side(V3, EngineShape(width, width), engines))
    parts = atoms(tensors, held, needed, LARGEST)
    routes = route(parts, node)
    plan_id(tensors, held, needed)
    return parts, routes, time.perf_counter() - start


def main() -> None:
    figures: dict[str, float] = {"planner_over_lp_max": 0.0, "plan_seconds_512": 0.0}
    for fp8 in (True, False):
        for engines, width in ENGINES:
            parts, routes, seconds = planned(trainer(1), engines, width, fp8)
            ratio = routes.busiest / lower_bound(parts, node)
            figures["planner_over_lp_max"] = max(figures["planner_over_lp_max"], ratio)
            figures["plan_seconds_512"] = max(figures["plan_seconds_512"], seconds)
            kind = "fp8" if fp8 else "bf16"
            figures[f"predicted_seconds_{kind}_{engines}xep{width}"] = routes.busiest / RATE
            print(kind, engines, width, f"{ratio:.5f}", f"{seconds:.1f} s")
    for replicas in (2, 4, 8):
        parts, _, seconds = planned(trainer(replicas), 8 * replicas, 32, fp8=True)
        figures[f"plan_seconds_{512 * replicas}"] = seconds
        print(512 * replicas, f"{seconds:.1f} s")
    small, large = figures["plan_seconds_1024"], figures["plan_seconds_4096"]
    # 1: grows as n log n; below 1: grows more slowly
    figures["plan_growth_over_n_log_n"] = large / small / (4 * math.log(4096) / math.log(1024))
    print(record("sync", figures).read_text())


if __name__ == "__main__":
    main()
