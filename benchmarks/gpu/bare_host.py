"""The job of a manifest on one host without Kubernetes, beside which its pods are compared.

    python3 benchmarks/gpu/bare_host.py bare_host.json manifests/gpu/deepseek-v3-1b-2gpu.yaml

ENGINE_PYTHONPATH: packages of the engine, if they differ from the trainer's. Both need operator,
worker_images and devcluster on PYTHONPATH. The engine has one GPU.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import yaml
from local_job import LocalJob

from grpo_devcluster.report import summarise
from grpo_devcluster.results import stamp, write_raw
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec

TIMEOUT = 500  # seconds for the whole job


def main() -> None:
    """Run the job and write the metrics of its steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("manifest", type=Path)
    args = parser.parse_args()
    given = yaml.safe_load(args.manifest.read_text())["spec"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given["checkpoint"]["store"] = {"path": name}
        spec = GRPOJobSpec.model_validate(given)
        with LocalJob(folder, spec, os.environ.get("ENGINE_PYTHONPATH", "")) as host:
            steps = host.run("bare-host", spec, TIMEOUT)
    case = {"steps": steps, "figures": summarise(steps)}
    print(case["figures"])
    origin = stamp(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    write_raw(args.result, origin, cases={args.manifest.stem: case})


if __name__ == "__main__":
    main()
