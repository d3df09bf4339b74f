"""Updates with activations in host memory beside the same updates without: gradients, memory, seconds.

    python benchmarks/gpu/activation_offload.py activation-offload.json

Needs transformer_engine and megatron-core on PYTHONPATH beside operator, worker_images and devcluster. Each
case trains the product's policy three times: twice with its activations on the GPU and once with them
offloaded. Gradients of the first two differ where kernels are not deterministic, so that offloading changes
nothing if its gradients differ as little. Log-probabilities are computed before the updates, which have
different numbers of micro-batches. Planned bytes are those of plan/planner/training/offloaded.py.
"""

import argparse
import os
import statistics
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

import process_group
import torch
from kernel_models import discard, free, policy, seconds
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from offload_cases import CASES, OffloadCase
from trainer_speed import rows_of
from update_cases import MICRO_BATCHES

from grpo_devcluster.results import stamp, write_raw
from grpo_operator.api.v1alpha1.offload import OffloadSpec
from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.megatron.training.policy import PolicyModel

ROUNDS = 3
Gradients = dict[str, torch.Tensor]


def compare(case: OffloadCase) -> dict[str, Any]:
    """Return the figures of a case."""
    kept, kept_figures = measure(case, offload=False)
    repeated = gap(kept, measure(case, offload=False)[0])
    moved, moved_figures = measure(case, offload=True)
    return {
        "kept": kept_figures,
        "offloaded": moved_figures,
        "planned": {"kept": case.planned(False).total, "offloaded": case.planned(True).total},
        "planned_copied": case.planned(True).copied,
        "gradient_gap_repeated": repeated,
        "gradient_gap_offloaded": gap(kept, moved),
    }


def measure(case: OffloadCase, offload: bool) -> tuple[Gradients, dict[str, float]]:
    """Return gradients after two updates' passes, with seconds and peak bytes of an update."""
    free()
    before = torch.cuda.memory_allocated()
    modules = OffloadSpec(activations=list(case.modules)) if offload else OffloadSpec()
    kind = (case.of.kernels, case.of.precision)
    model = policy(case.of.hf, kind, recompute=case.of.recomputed, offload=modules)
    few, batch = (
        rows_of([case.of.tokens] * count, 4, case.of.hf["vocab_size"]) for count in (2, MICRO_BATCHES)
    )

    def update(rows: Any) -> object:
        return model.update(rows, PolicyLossConfig(), 0.001, 1.0)

    scored = [torch.from_numpy(model.log_probs(rows, 1.0)["log_probs"]) for rows in (few, batch)]
    step, model.trainable.step = model.trainable.step, dict  # type: ignore[method-assign]
    found: Gradients = {f"log_probs {number}": values for number, values in enumerate(scored)}
    for number, rows in enumerate((batch, few)):
        update(rows)
        found |= {f"{number} {name}": gradient for name, gradient in _gradients(model)}
    model.trainable.step = step  # type: ignore[method-assign]
    for _ in range(2):
        update(batch)
    free()
    torch.cuda.reset_peak_memory_stats()
    taken = [seconds(lambda: update(batch)) for _ in range(ROUNDS)]
    figures = {
        "seconds": statistics.median(taken),
        "peak": torch.cuda.max_memory_allocated() - before,
        "copied_per_micro_batch": _copied() / MICRO_BATCHES if offload else 0,
    }
    discard(model)
    return found, figures


def _gradients(model: PolicyModel) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, parameter.main_grad.cpu())
        for chunk in model.trainable.ddp
        for name, parameter in chunk.named_parameters()
    ]


def _copied() -> float:
    """Return the bytes that the last update copied to host memory."""
    manager = PipelineOffloadManager.get_instance()
    groups = (group for chunk in manager._cached_chunks_forward for group in chunk.offload_groups)
    return float(sum(group.total_offload_bytes for group in groups))


def gap(expected: Gradients, found: Gradients) -> float:
    """Return the largest difference relative to the largest entry of its tensor; 0: bit for bit the same."""
    assert expected.keys() == found.keys()
    return max(
        float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        for name, value in expected.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    process_group.alone()
    found: dict[str, Any] = {}
    failed = []
    for case in CASES:
        if args.only not in str(case):
            continue
        try:
            found[str(case)] = compare(case)
        except Exception:  # noqa: BLE001 - the other cases run all the same
            traceback.print_exc()
            failed.append(str(case))
        print(case, found.get(str(case)), flush=True)
        write_raw(args.result, stamp(f"1 x {torch.cuda.get_device_name()}"), cases=found, failed=failed)


if __name__ == "__main__":
    main()
