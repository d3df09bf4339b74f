"""Narrower gradients and optimizer state on one GPU: memory, steps and checkpoints.

    python benchmarks/gpu/precision_aware.py precision_aware.json FOLDER

Each case trains kernel_models.SLICE (2.4 B parameters) with other dtypes of trainer.precisionAwareOptimizer.
Measured beside the planner's figures: bytes of weights, gradients and optimizer state, and the peak of an
update. Then the steps' losses, seconds of an update, whether a reload has the bits of the time of the save,
and the loss of the step after a load of the fp32 case's checkpoint, beside that case's own. FOLDER on a fast
file system needs 70 GB.
Needs transformer_engine and megatron-core on PYTHONPATH beside operator, worker_images and devcluster.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import process_group
import torch
from kernel_models import BF16, ENGINE, ONE, SLICE, discard, free, policy, seconds
from rank_checkpoint import digest
from trainer_speed import rows_of

from grpo_devcluster.results import stamp, write_raw
from grpo_operator.api.v1alpha1.optimizer_dtypes import OptimizerDtypes
from grpo_operator.api.v1alpha1.recompute import NOTHING
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.memory import of_precision, stage_memory
from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.checkpointing.store import Origin, directory
from grpo_worker.megatron.checkpoint.checkpointer import Checkpointer
from grpo_worker.megatron.training.policy import PolicyModel

TOKENS, ROWS, STEPS = 1024, 4, 6
CASES = {
    "fp32": {},
    "bf16 moments": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "bf16 moments and gradients": {
        "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "main_grads_dtype": "bf16",
    },
}  # fmt: skip


def planned(dtypes: OptimizerDtypes) -> dict[str, int]:
    """Return the planner's bytes."""
    workload = Workload(TOKENS, 1, ROWS, NOTHING)
    precision = of_precision(BF16, dtypes)
    (stage,) = stage_memory(ModelShape.from_hf(SLICE), ONE, workload, precision=precision)
    return {"state": stage.state, "peak": stage.total}


class Job:
    """A policy with dtypes, its updates and its checkpoint in a folder of its own."""

    def __init__(self, folder: Path, dtypes: OptimizerDtypes) -> None:
        self._folder = folder
        self.model: PolicyModel = policy(SLICE, (ENGINE, BF16), optimizer_dtypes=dtypes)
        self._rows = rows_of([TOKENS] * ROWS, ROWS, SLICE["vocab_size"])
        self._checkpoints = Checkpointer(str(folder), self.model.parts(False), 1, Origin("model", str(ONE)))

    def update(self) -> float:
        """Take an optimizer step and return its loss."""
        return self.model.update(self._rows, PolicyLossConfig(), 0.001, 1.0)["actor/loss"]

    def save(self) -> None:
        """Save a checkpoint and wait until it is complete."""
        self._checkpoints.save(1, {})
        self._checkpoints.poll(blocking=True)

    def load(self, folder: Path | None = None) -> None:
        """Load the checkpoint in this job's folder, or in another one."""
        self._checkpoints.load(directory(folder or self._folder, 1))


def measure(folder: Path, name: str, baseline: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a case. ``baseline``: those of the fp32 case, or none."""
    free()
    before, dtypes = torch.cuda.memory_allocated(), OptimizerDtypes.model_validate(CASES[name])
    job = Job(folder / name.replace(" ", "-"), dtypes)
    found: dict[str, Any] = {"losses": [job.update() for _ in range(STEPS)], "planned": planned(dtypes)}
    free()
    found["state"] = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    found["update_seconds"] = statistics.median(seconds(job.update) for _ in range(3))
    found["peak"] = torch.cuda.max_memory_allocated() - before
    job.save()
    saved = digest(job.model)
    found["next_loss"] = job.update()
    job.load()
    found["same_bits"] = digest(job.model) == saved
    found["same_next_loss"] = job.update() == found["next_loss"]
    if baseline:
        job.load(folder / "fp32")
        found["losses_from_fp32"] = [job.update(), baseline["next_loss"]]
    for kind in ("state", "peak"):
        found[f"{kind}_ratio"] = round(found["planned"][kind] / found[kind], 4)
    discard(job.model)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    process_group.alone()
    found: dict[str, Any] = {}
    for name in CASES:
        found[name] = measure(args.folder, name, found.get("fp32", {}))
        print(name, found[name], flush=True)
        write_raw(args.result, stamp(f"1 x {torch.cuda.get_device_name()}"), cases=found)


if __name__ == "__main__":
    main()
