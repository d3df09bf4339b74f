"""Fidelity of FP8 in the trainer: loss curves, and the gap between engine and trainer; on one GPU.

    CUDA_HOME=... ENGINE_PYTHONPATH=... python3 benchmarks/gpu/precision.py precision.json [--only CASE]

curve bf16, curve fp8: 200 optimizer steps of a small DeepSeek-V3 on sequences with structure, from the same
weights and with the same data; every ten steps the loss of held-out sequences. curve bf16-halves: the first
curve in micro-batches of half the tokens, whose distance from it says what rounding alone does.
engine bf16, engine fp8: an engine in bf16 or in FP8 blocks samples from the model that ``curve bf16``
exported. gap: the trainer computes the log-probabilities of the same tokens in bf16 and in FP8.
Engines and trainers have processes of their own, one after the other. ``--folder`` keeps the models, and the
results of earlier calls, so that the cases may be measured in several calls.
Needs transformer_engine and megatron-core on PYTHONPATH beside operator, worker_images and devcluster, and
SGLang on ENGINE_PYTHONPATH.
"""

import argparse
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import precision_gap
from precision_figures import figures

CASES = ("curve bf16", "curve fp8", "engine bf16", "engine fp8", "gap", "curve bf16-halves")


def in_process(case: str, folder: Path) -> Any:
    import precision_cases
    import process_group

    process_group.alone()
    name, _, argument = case.partition(" ")
    return getattr(precision_cases, name)(argument, folder)


def run_apart(case: str, folder: Path) -> Any:
    """Return the result of a case in a process of its own. Raises CalledProcessError if it failed."""
    result = folder / f"{case.replace(' ', '-')}.part"
    command = [sys.executable, os.path.abspath(__file__), str(result), "--in-process", case]
    subprocess.run([*command, "--folder", str(folder)], check=True)
    return json.loads(result.read_text())


def run(case: str, folder: Path) -> Any:
    name, _, argument = case.partition(" ")
    if name == "engine":
        return precision_gap.sample(argument, folder)
    if name == "gap":
        return precision_gap.gaps(folder, lambda trainer: run_apart(f"log_probs {trainer}", folder))
    return run_apart(case, folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--only", choices=CASES, action="append", help="run this case; may be repeated")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/precision"))
    parser.add_argument("--in-process", metavar="CASE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        args.result.write_text(json.dumps(in_process(args.in_process, args.folder)))
        return
    import torch

    from grpo_devcluster.results import stamp, write_raw

    args.folder.mkdir(parents=True, exist_ok=True)
    origin, failed = stamp(f"1 x {torch.cuda.get_device_name()}"), []
    for case in args.only or CASES:
        kept = _kept(case, args.folder)
        kept.unlink(missing_ok=True)
        try:
            kept.write_text(json.dumps(run(case, args.folder)))
        except Exception:  # noqa: BLE001 - the other cases run all the same
            failed.append(case)
            traceback.print_exc()
        found = {
            name: json.loads(file.read_text())
            for name in CASES
            if (file := _kept(name, args.folder)).exists()
        }
        print(case, "ended" if case in found else "failed", figures(found), flush=True)
        write_raw(args.result, origin, cases=found, failed=failed)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _kept(case: str, folder: Path) -> Path:
    """Return the file of a case that has ended, in this call or an earlier one."""
    return folder / f"{case.replace(' ', '-')}.json"


if __name__ == "__main__":
    main()
