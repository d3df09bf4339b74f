"""Updates in layouts of four GPUs: beside a bare Megatron-Core loop, beside the plan, and beside one rank.

    torchrun --nproc-per-node 4 benchmarks/gpu/layouts.py layouts.json [--only slice fidelity]

slice: update_cases.LAYOUTS. Ours and the bare loop have the same layers of Transformer Engine, layout and
tokens, in bf16 and in FP8. Context-parallel rows are packed in ours and padded in the loop, whose rows are
all of the full length. Planned are the seconds of an update, and the peak of each stage.
fidelity: log-probabilities and gradients of each layout beside those of ranks with whole models. How far
rounding alone leads is measured beside it: the same without Transformer Engine in fp32.
Needs transformer_engine and megatron-core on PYTHONPATH beside operator, worker_images, devcluster,
benchmarks and tests.
"""

import argparse
import faulthandler
import statistics
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import layout_loop
import numpy as np
import process_group
import torch
import torch.distributed as dist
from kernel_models import BF16, ENGINE, FP8, LOCAL, SMALL, Kind, discard, free, policy, seconds
from megatron.core import parallel_state
from models import training_mfu_pct
from trainer_speed import rows_of
from update_cases import LAYOUTS, MICRO_BATCHES, UpdateCase

from grpo_devcluster.results import stamp, write_raw
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.common.ragged_batch import RaggedBatch, joined
from grpo_worker.megatron.model.build import initialize_parallel
from kernel_fit import Measured, gpu_type
from support.ranks.fidelity_cases import keep_gradients
from support.ranks.policy_cases import whole_weights

ROUNDS, WARM_UP = 5, 2
SIZES = {"TP2 EP2": {"tensor": 2, "expert": 2}, "PP2 EP2": {"pipeline": 2, "expert": 2},
         "EP4": {"expert": 4}, "CP2 EP2": {"context": 2, "expert": 2}}  # fmt: skip
COMPARED = SMALL | {"num_hidden_layers": 4, "n_routed_experts": 16, "vocab_size": 4096}
LENGTHS = (1500, 512, 77, 1000, 411, 2048, 64, 900)
PACK = 2048  # tokens of a packed micro-batch on each rank
KINDS: dict[str, Kind] = {"bf16": (ENGINE, BF16), "fp8": (ENGINE, FP8)}


def speed(case: UpdateCase) -> dict[str, Any]:
    """Return seconds of updates, peaks of the stages, and both beside the plan and the bare loop."""
    with _ranks(case.layout):
        ours = _measured(case, _ours)
    with _ranks(case.layout):
        bare = _measured(case, layout_loop.bare)
    tokens = case.tokens * MICRO_BATCHES * case.layout.data / case.layout.world
    name = torch.cuda.get_device_name()
    measured = Measured(case, ours["seconds"], None, max(ours["peaks"]), gpu_type(name))
    planned = measured.planned_peaks()
    return {
        "seconds": ours["seconds"], "seconds_all": ours["all"], "bare_seconds_all": bare["all"],
        "ratio_vs_megatron": bare["seconds"] / ours["seconds"],
        "mfu_pct": training_mfu_pct(case.hf, case.tokens, tokens / ours["seconds"], name),
        "mfu_pct_bare": training_mfu_pct(case.hf, case.tokens, tokens / bare["seconds"], name),
        "peak": max(ours["peaks"]), "peaks": ours["peaks"], "bare_peaks": bare["peaks"], "planned": planned,
        "planned_seconds": measured.cost().total,
        "memory_error_pct": [100 * (p / m - 1) for p, m in zip(planned, ours["peaks"], strict=True)],
        "beside_allocator": ours["beside"], "unused_of_allocator": ours["unused"],
    }  # fmt: skip


def _measured(case: UpdateCase, build: Callable[[UpdateCase], tuple[Any, Any]]) -> dict[str, Any]:
    """Return the median and all seconds of a step, and the largest peak in bytes of each stage's ranks.

    ``beside``, ``unused``: bytes that a rank takes beside PyTorch's allocator, and that it keeps and does
    not use, at most.
    """
    free()
    before = torch.cuda.memory_allocated()
    step, drop = build(case)
    for _ in range(WARM_UP):
        step()
    free()
    torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(ROUNDS):
        dist.barrier()
        taken.append(seconds(step))
    peak = torch.cuda.max_memory_allocated() - before
    unused = torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()
    found = _on_all((parallel_state.get_pipeline_model_parallel_rank(), peak, taken, _beside(), unused))
    drop()
    stages, peaks, times, beside, unuseds = zip(*found, strict=True)
    slowest = [max(each) for each in zip(*times, strict=True)]
    of_stages = [max(p for s, p in zip(stages, peaks, strict=True) if s == i) for i in range(max(stages) + 1)]
    return {
        "seconds": statistics.median(slowest), "all": slowest, "peaks": of_stages,
        "beside": max(beside), "unused": max(unuseds),
    }  # fmt: skip


def _beside() -> int:
    """Return the bytes of this GPU that are taken, but not by PyTorch's allocator: CUDA's and NCCL's."""
    free_bytes, every = torch.cuda.mem_get_info()
    return every - free_bytes - torch.cuda.memory_reserved()


def _ours(case: UpdateCase) -> tuple[Callable[[], Any], Callable[[], None]]:
    packs = case.tokens // case.layout.context if case.layout.context > 1 else None
    kind = case.kernels, case.precision
    model = policy(case.hf, kind, max_tokens=packs, layout=case.layout, recompute=case.recomputed)
    rank = parallel_state.get_data_parallel_rank()
    batch = rows_of([case.tokens] * MICRO_BATCHES, 4 + rank, case.hf["vocab_size"])
    return partial(model.update, batch, PolicyLossConfig(), 0.001, 1.0), partial(discard, model)


def _on_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def computed(kind: Kind, dtype: torch.dtype, layout: Layout) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Return the log-probabilities of all rows, and the gradient of an update under Hugging Face names."""
    model = policy(COMPARED, kind, dtype, max_tokens=PACK, layout=layout)
    rank, parts = parallel_state.get_data_parallel_rank(), _parts()
    share = len(parts) // layout.data
    own = joined(parts[rank * share : (rank + 1) * share])
    log_probs = model.log_probs(own, 1.0).get("log_probs")
    whole = np.zeros((layout.data, layout.context, sum(LENGTHS)), np.float32)
    for other, place, values in _on_all((rank, parallel_state.get_context_parallel_rank(), log_probs)):
        if values is not None:
            whole[other, place, : len(values)] = values
    sizes = [int(joined(parts[n * share : (n + 1) * share]).lengths.sum()) for n in range(layout.data)]
    rows = np.concatenate([whole[n].sum(0)[:size] for n, size in enumerate(sizes)])
    with patch.object(model.trainable, "step", lambda: keep_gradients(model)):
        model.update(own, PolicyLossConfig(), 0.001, 1.0)
    gradients = whole_weights(model)
    discard(model)
    return rows, gradients


def _parts() -> list[RaggedBatch]:
    """Return the rows of four ranks with whole models. The policy has not changed since they were drawn."""
    drawn = -np.log(np.float32(COMPARED["vocab_size"]))
    return [
        replace(
            part, width=max(LENGTHS), response={n: np.full_like(v, drawn) for n, v in part.response.items()}
        )
        for part in (rows_of(list(LENGTHS[n::4]), 7 + n, COMPARED["vocab_size"]) for n in range(4))
    ]


def fidelity(kind: str, name: str) -> dict[str, Any]:
    """Return the distance of a layout from whole models, and of these from fp32."""
    world = dist.get_world_size()
    layout = Layout(world, **SIZES[name])
    whole = _whole(KINDS[kind], torch.bfloat16)
    with _ranks(layout):
        apart = _distance(computed(KINDS[kind], torch.bfloat16, layout), whole)
    return {"layout": apart, "rounding": _distance(whole, _whole((LOCAL, BF16), torch.float32))}


@cache
def _whole(kind: Kind, dtype: torch.dtype) -> "Computed":
    """Return what ranks with a whole model each compute."""
    models = Layout(dist.get_world_size())
    with _ranks(models):
        return computed(kind, dtype, models)


@contextmanager
def _ranks(layout: Layout) -> Iterator[None]:
    initialize_parallel(layout, 1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        free()


Computed = tuple[np.ndarray, dict[str, torch.Tensor]]


def _distance(ours: Computed, wanted: Computed) -> dict[str, float]:
    """Return gaps of log-probabilities, and the relative distance of all gradients."""
    gap = np.abs(ours[0] - wanted[0])
    names = [name for name in wanted[1] if not name.endswith("e_score_correction_bias")]
    apart = sum(float((ours[1][name].float() - wanted[1][name].float()).norm()) ** 2 for name in names)
    size = sum(float(wanted[1][name].float().norm()) ** 2 for name in names)
    finite = all(bool(ours[1][name].isfinite().all()) for name in names)
    return {
        "logprob_mean": float(gap.mean()), "logprob_max": float(gap.max()),
        "gradient": (apart / size) ** 0.5, "tensors": len(names), "finite": finite,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds of a case; stacks are printed then"
    )
    args = parser.parse_args()
    process_group.of_torchrun()
    calls: list[tuple[str, Callable[[], Any]]] = [
        *((str(case), partial(speed, case)) for case in LAYOUTS),
        *((f"fidelity {kind} {name}", partial(fidelity, kind, name)) for kind in KINDS for name in SIZES),
    ]
    calls = [call for call in calls if any(part in call[0] for part in args.only)]
    calls.sort(key=lambda call: "CP2" in call[0])  # last: its ranks have waited for each other without end
    found: dict[str, Any] = {}
    failed: list[str] = []
    for name, call in calls:
        faulthandler.dump_traceback_later(args.limit, exit=True)  # ranks that wait for each other
        try:
            found[name] = call()
        except Exception:  # noqa: BLE001 - the other cases run all the same
            traceback.print_exc()
            failed.append(name)
        faulthandler.cancel_dump_traceback_later()
        if dist.get_rank() == 0:
            print(name, found.get(name), flush=True)
            origin = stamp(f"{dist.get_world_size()} x {torch.cuda.get_device_name()}")
            write_raw(args.result, origin, cases=found, failed=failed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
