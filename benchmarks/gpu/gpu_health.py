"""GPU health on real GPUs: what NVML supports, how long a reading takes, and whether a real XID arrives.

    python benchmarks/gpu/gpu_health.py gpu_health.json

Needs nvidia-ml-py, torch and triton, with operator, worker_images and devcluster on PYTHONPATH. The fault is
that of an application (page_fault.py), the only one that needs no root. So it shows that NVML's
events reach the monitor, and that such an XID is not held against the GPU.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from grpo_devcluster.results import stamp, write_raw
from grpo_worker.gpu_health.nvml import Nvml
from grpo_worker.gpu_health.service import GpuWatch

XID_SECONDS = 30.0  # to wait for the event after the fault
READINGS = 20


def reading_figures() -> dict[str, Any]:
    """Return the first GPU's reading, what it does not support, and seconds of a reading of all GPUs."""
    nvml = Nvml()
    first, *_ = gpus = nvml.read()
    began = time.perf_counter()
    for _ in range(READINGS):
        nvml.read()
    values = asdict(first)
    return {
        "gpus": len(gpus),
        "first": values,
        "unsupported": sorted(name for name, value in values.items() if value is None),
        "seconds": (time.perf_counter() - began) / READINGS,
    }


def fault_figures() -> dict[str, Any]:
    """Return the XIDs that arrive after a page fault, after how long, and the verdict on the GPUs."""
    watch = GpuWatch(1.0)
    watch.start()
    script = Path(__file__).with_name("page_fault.py")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    began = time.monotonic()
    while not watch.monitor.xid_counts and time.monotonic() - began < XID_SECONDS:
        time.sleep(0.01)
    waited = time.monotonic() - began
    watch.stop()
    return {
        "error": ended.stderr.strip()[-300:],
        "xids": {str(code): count for (_, code), count in watch.monitor.xid_counts.items()},
        "seconds_after_the_process": waited,
        "severities": sorted({str(severity) for severity in watch.monitor.severities().values()}),
    }


def main() -> None:
    """Write the figures to the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    result: Path = parser.parse_args().result
    cases = {"reading": reading_figures(), "fault": fault_figures()}
    where = (
        f"{cases['reading']['gpus']} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    )
    write_raw(result, stamp(where), cases=cases, failed=[] if cases["fault"]["xids"] else ["fault"])


if __name__ == "__main__":
    main()
