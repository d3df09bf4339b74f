"""Transformer Engine's kernels and FP8 beside Megatron-Core's own, on one GPU.

    python benchmarks/gpu/kernels.py kernels.json [CASE ...]

small: four cases about what the kernels compute.
  fidelity: log-probabilities and gradients in bf16 and in FP8, beside fp32 without Transformer Engine.
  packed: log-probabilities of packed beside padded sequences.
  checkpoint: a checkpoint of each kind is loaded and saved by another; it must have the same bits.
  scales: FP8 blocks of a weight as the trainer multiplies them, beside those that engines get.
speed: the actor update of four layers with DeepSeek-V3's widths, whose eight experts get all tokens, beside
a bare loop of Megatron-Core with its own layers of Transformer Engine and the fusions of its users.
profile: launches and host time of that update with few tokens.
Needs transformer_engine and megatron-core on PYTHONPATH beside operator, worker_images and devcluster. Every
case has a process of its own, because its models fill the GPU.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SPEEDS = ("local", "transformer_engine", "fp8", "megatron")
CASES = ("small", *(f"speed {kind}" for kind in SPEEDS))


def in_process(case: str) -> Any:
    import kernel_fidelity
    import kernel_speed
    import process_group

    process_group.alone()
    name, _, argument = case.partition(" ")
    function = getattr(kernel_speed, name, None) or getattr(kernel_fidelity, name)
    return function(argument) if argument else function()


def run(case: str, folder: Path) -> Any:
    """Return the result of a case in a process of its own, or None if it failed."""
    result = folder / f"{case.replace(' ', '-')}.json"
    command = [sys.executable, os.path.abspath(__file__), str(result), "--in-process", case]
    if subprocess.run(command, check=False).returncode:
        return None
    return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--in-process", metavar="CASE")
    args = parser.parse_args()
    if args.in_process:
        args.result.write_text(json.dumps(in_process(args.in_process)))
        return
    import torch
    from kernel_speed import ratios

    from grpo_devcluster.results import stamp, write_raw

    found: dict[str, Any] = {}
    for case in args.cases:
        found[case] = run(case, args.result.parent)
        print(case, json.dumps(found[case]), flush=True)
    speeds = {kind: found.get(f"speed {kind}") for kind in SPEEDS}
    figures = ratios(speeds) if all(speeds.values()) else {}
    print(figures)
    failed = [case for case, result in found.items() if result is None]
    origin = stamp(f"1 x {torch.cuda.get_device_name()}")
    write_raw(args.result, origin, cases=found, figures=figures, failed=failed)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
