"""Tensors that are alive at the peak of an update, by the functions that allocated them.

    python benchmarks/gpu/peak_tensors.py peak_tensors.json "CASE" ...

The cases are named as update_cases.py prints them. The planner's formula of activations
(plan/planner/training/fused_activations.py) was written from what this shows. ``left``: the same for what an
update leaves behind besides weights, gradients and optimizer state. Needs transformer_engine and
megatron-core on PYTHONPATH beside operator, worker_images and devcluster.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import process_group
import torch
from kernel_models import discard, free, policy
from trainer_speed import rows_of
from update_cases import CASES, MICRO_BATCHES, UpdateCase

from grpo_devcluster.results import stamp, write_raw
from grpo_worker.algorithms.losses import PolicyLossConfig

EVENTS = 1_000_000
OWN = ("megatron", "transformer_engine", "grpo_worker")
CALLERS, ROWS = 5, 40
Event = Mapping[str, Any]


def measure(case: UpdateCase) -> dict[str, Any]:
    """Return bytes of the state and at the peak, and the largest groups of tensors alive then."""
    free()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=EVENTS, stacks="python")
    model = policy(case.hf, (case.kernels, case.precision), layout=case.layout, recompute=case.recomputed)
    built = len(_events())
    batch = rows_of([case.tokens] * MICRO_BATCHES, 4, case.hf["vocab_size"])

    def update() -> None:
        model.update(batch, PolicyLossConfig(), 0.001, 1.0)

    update()
    update()
    free()
    state, left = torch.cuda.memory_allocated() - before, _grouped(_alive(_events()[built:]))
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=EVENTS, stacks="python")
    update()
    torch.cuda.synchronize()
    events = _events()
    torch.cuda.memory._record_memory_history(enabled=None)
    peak = torch.cuda.max_memory_allocated() - before
    discard(model)
    return {
        "state": state,
        "peak": peak,
        "alive": _grouped(_alive(events[: _highest(events) + 1])),
        "left": left,
    }


def _events() -> list[Event]:
    torch.cuda.synchronize()
    return list(torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()])


def _highest(events: Iterable[Event]) -> int:
    """Return the number of the event after which the most bytes are allocated."""
    now = most = place = 0
    for number, event in enumerate(events):
        now += {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"]
        if now > most:
            most, place = now, number
    return place


def _alive(events: Iterable[Event]) -> list[Event]:
    """Return the allocations that no later event frees."""
    found: dict[int, Event] = {}
    for event in events:
        if event["action"] == "alloc":
            found[event["addr"]] = event
        elif event["action"] == "free_completed":
            found.pop(event["addr"], None)
    return list(found.values())


def _grouped(allocations: Iterable[Event]) -> list[tuple[int, int, str]]:
    """Return bytes and number of allocations by their callers, the most bytes first."""
    size: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for event in allocations:
        callers = _callers(event["frames"])
        size[callers] += event["size"]
        number[callers] += 1
    return [(total, number[callers], callers) for callers, total in size.most_common(ROWS)]


def _callers(frames: Iterable[Mapping[str, Any]]) -> str:
    own = [frame for frame in frames if any(part in frame["filename"] for part in OWN)]
    return " < ".join(
        f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}" for frame in own[:CALLERS]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("cases", nargs="+", choices=CASES)
    args = parser.parse_args()
    process_group.alone()
    found = {}
    for name in args.cases:
        found[name] = measure(CASES[name])
        print(name, {key: value for key, value in found[name].items() if isinstance(value, int)})
        for key in ("alive", "left"):
            for total, number, callers in found[name][key][:15]:
                print(f"  {key} {total / 1e6:9.1f} MB in {number:3d}  {callers}", flush=True)
        write_raw(args.result, stamp(f"1 x {torch.cuda.get_device_name()}"), cases=found, failed=[])


if __name__ == "__main__":
    main()
