"""Profiles that are ordered while a job runs: of its trainer, its engine and the controller.

    python3 benchmarks/gpu/profiles.py profiles.json [--cpu] [--nsight]

The job and its paths are those of job.py. ``--nsight``: the trainer runs under Nsight Systems (``nsys`` on
PATH) and is traced by it too. Fails if an order is not written.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from job import prepare, spec_of
from local_job import LocalJob

from grpo_operator.api.messages import ProfileOrder
from grpo_operator.api.v1alpha1.profile_request import parse_request

REQUESTS = ("torch", "torch engines steps=5", "py-spy", "py-spy seconds=2", "py-spy controller")
STEPS = 6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--cpu", action="store_true", help="a small model without GPUs")
    parser.add_argument("--nsight", action="store_true", help="trace with Nsight Systems too")
    args = parser.parse_args()
    profile = {"tool": "nsight"} if args.nsight else None
    requests = [*REQUESTS, *(["nsight"] if args.nsight else [])]
    orders = [ProfileOrder(id=f"p{i}", request=parse_request(text)) for i, text in enumerate(requests)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, args.cpu)
        own = {"totalSteps": STEPS, "observability": {"tensorboard": False, "profile": profile}}
        spec = spec_of(folder, args.cpu, **own)
        with LocalJob(folder, spec) as host:
            history = host.run("profiled", spec, orders=orders)
            reports = host.profiles
        seconds = [step["timing_s/step"] for step in history]
        result = {"profiles": [_case(report.wire()) for report in reports], "step_seconds": seconds}
    args.result.write_text(json.dumps(result, indent=1))
    print(args.result.read_text())
    failed = [
        f"{report.id} {report.state}: {report.message}" for report in reports if report.state != "Written"
    ]
    assert len(reports) == len(orders) and not failed, failed


def _case(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report with the bytes of its files."""
    sizes = {file.name: file.stat().st_size for file in Path(report["path"]).glob("*.*")}
    return {"id": report["id"], "state": report["state"], "message": report["message"], "bytes": sizes}


if __name__ == "__main__":
    main()
