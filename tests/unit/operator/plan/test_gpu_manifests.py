"""The manifests of first jobs on one node with GPUs."""

from pathlib import Path

import pytest
import yaml

from grpo_operator.api.catalog.presets import PRESETS, preset
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.plan.capacity.feasibility import infeasible
from grpo_operator.plan.capacity.pod_requests import job_requests
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.resolve import resolve
from grpo_operator.plan.planner.resources import completed_job, completed_template

FILES = sorted((Path(__file__).parents[4] / "manifests" / "gpu").glob("*.yaml"))
CORES, GIBIBYTES = 16, 120  # of a node for each GPU


def _spec(file: Path) -> GRPOJobSpec:
    return GRPOJobSpec.model_validate(yaml.safe_load(file.read_text())["spec"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_all_pods_fit_on_one_node(file: Path) -> None:
    spec = _spec(file)
    gpus = int(file.stem.rsplit("-", 1)[1].removesuffix("gpu"))
    template = spec.rollout.template
    assert template is not None
    planned = resolve(spec, template).resources
    requests = job_requests(completed_job(spec, planned), completed_template(template, planned))
    assert sum(request.count * request.gpus for request in requests) == gpus
    room = {"cpu": str(CORES * gpus), "memory": f"{GIBIBYTES * gpus}Gi", "nvidia.com/gpu": str(gpus)}
    node = {"metadata": {"name": "only"}, "spec": {}, "status": {"allocatable": room}}
    assert infeasible(requests, [node]) is None


@pytest.mark.parametrize("name", sorted({*PRESETS} - {"tiny-moe"}))
def test_the_models_have_more_than_a_billion_parameters(name: str) -> None:
    model = ModelShape.from_hf(preset(f"preset:{name}"))
    assert parameters.model_bytes(model) / 2 > 1.1e9
