"""``make bench-sync-planner``: planned weight updates of DeepSeek-V3, beside a lower bound.

The trainer of the 512-GPU manifest sends a version to engines of several kinds, by the plans that jobs make:
one for each kind of engine. ``predicted_seconds``: of the busiest interface's bytes at RATE; ``sim_seconds``:
until all engines have the version, by makespan.py, which sync_cluster.py compares with executed plans. Adds
to benchmarks/results/sync.json.
"""

import math
import time
from collections import Counter
from dataclasses import dataclass, replace

import yaml

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import record
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.stages import stage_layers
from grpo_worker.weightsync.planner.bound import lower_bound
from grpo_worker.weightsync.planner.engine_plan import EnginePlan, plan_engine
from grpo_worker.weightsync.planner.layouts import (
    EngineShape,
    engine_side,
    kept_by_rank,
    tensors_of,
    trainer_side,
)
from grpo_worker.weightsync.planner.makespan import Interfaces, makespan
from grpo_worker.weightsync.planner.regions import Held, Tensor, atoms

MANIFEST = REPO / "manifests" / "deepseek-v3-512xh100.yaml"
RATE = 44.26e9  # bytes/s of one 400 Gb/s interface: the best published payload rate
NODE = 8  # GPUs
BUCKET, LARGEST = 512 << 20, 8 << 20
V3 = architecture("deepseek-v3")


@dataclass(frozen=True)
class Case:
    """Engines of one kind, which serve in FP8 or bf16."""

    name: str
    shape: EngineShape
    engines: int
    fp8: bool


CASES = (
    Case("fp8_8xep32", EngineShape(32, 32), 8, True),
    Case("fp8_16xep16", EngineShape(16, 16), 16, True),
    Case("fp8_4xep64", EngineShape(64, 64), 4, True),
    Case("fp8_16xtp16", EngineShape(16, 1, 16), 16, True),
    Case("bf16_8xep32", EngineShape(32, 32), 8, False),
    Case("bf16_16xep16", EngineShape(16, 16), 16, False),
    Case("bf16_4xep64", EngineShape(64, 64), 4, False),
)


def trainer(replicas: int) -> Layout:
    """Return the layout of the manifest's trainer, replicated ``replicas`` times."""
    spec = GRPOJobSpec.model_validate(yaml.safe_load(MANIFEST.read_text())["spec"])
    layout = spec.trainer.parallelism.layout(spec.trainer.world)
    return replace(layout, world=layout.world * replicas)


def sides(layout: Layout, fp8: bool) -> tuple[dict[str, Tensor], list[Held]]:
    """Return the tensors and the regions that trainer ranks hold."""
    layers = stage_layers(V3["num_hidden_layers"], layout)
    stages = {number: stage for stage, numbers in enumerate(layers) for number in numbers}
    return tensors_of(V3, fp8), list(trainer_side(V3, layout, stages.__getitem__))


def plan(tensors: dict[str, Tensor], held: list[Held], case: Case) -> tuple[EnginePlan, float]:
    """Return the plan of all engines of the case, and the seconds of planning."""
    regions = kept_by_rank(V3, case.shape)
    start = time.perf_counter()
    made = plan_engine(tensors, held, regions, _node, BUCKET, case.engines)
    return made, time.perf_counter() - start


def _node(gpu: int) -> int:
    return gpu // NODE


def simulated(made: EnginePlan, case: Case, engines: int) -> float:
    """Return the seconds until ``engines`` engines have a version; every GPU has an interface."""
    interfaces = Interfaces(int, lambda engine, rank: engine * case.shape.tensor + rank)
    return makespan([made.waves] * engines, interfaces, RATE)


def busiest(made: EnginePlan, engines: int) -> int:
    """Return the bytes of the busiest interface."""
    received: Counter[int] = Counter()
    for message in (message for wave in made.waves for message in wave):
        received[message.landing] += message.nbytes
    return max(engines * max(made.sent.values()), *received.values())


def figures_of(case: Case) -> dict[str, float]:
    """Return the figures of a case on 256 + 256 GPUs."""
    tensors, held = sides(trainer(1), case.fp8)
    made, seconds = plan(tensors, held, case)
    whole, one = simulated(made, case, case.engines), simulated(made, case, 1)
    bound = lower_bound(atoms(tensors, held, list(engine_side(V3, case.shape, case.engines)), LARGEST), _node)
    print(
        case.name,
        f"{whole:.2f} s, bound {bound / RATE:.2f} s, one engine {one:.2f} s, planned in {seconds:.1f} s",
    )
    return {
        f"sim_seconds_{case.name}": whole,
        f"predicted_seconds_{case.name}": busiest(made, case.engines) / RATE,
        "planner_over_lp_max": busiest(made, case.engines) / bound,
        "sim_over_lp_max": whole * RATE / bound,
        "sim_rejoin_over_version_max": one / whole,
        "plan_seconds_512": seconds,
    }


def planning_seconds(replicas: int) -> float:
    """Return the seconds of planning with ``replicas`` times as many trainer ranks and engines."""
    case = replace(CASES[0], engines=CASES[0].engines * replicas)
    return plan(*sides(trainer(replicas), case.fp8), case)[1]


def main() -> None:
    figures: dict[str, float] = {}
    for case in CASES:
        for name, value in figures_of(case).items():
            figures[name] = max(figures.get(name, 0.0), value)
    for replicas in (2, 4, 8):
        figures[f"plan_seconds_{512 * replicas}"] = planning_seconds(replicas)
        print(512 * replicas, f"planned in {figures[f'plan_seconds_{512 * replicas}']:.1f} s")
    small, large = figures["plan_seconds_1024"], figures["plan_seconds_4096"]
    # 1: grows as n log n; below 1: grows more slowly
    figures["plan_growth_over_n_log_n"] = large / small / (4 * math.log(4096) / math.log(1024))
    print(record("sync", figures).read_text())


if __name__ == "__main__":
    main()
