"""The notebook of the docs has no outputs, and its job is that of the demo."""

import ast
from typing import Any

import yaml

from grpo_devcluster.paths import REPO
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from support.notebook import code_cells, source_of


def test_cells_are_python_and_have_no_outputs() -> None:
    cells = code_cells()
    for cell in cells:
        assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]
        ast.parse("".join(cell["source"]))
    assert len(cells) > 5


def test_the_spec_is_the_demos_with_fewer_steps() -> None:
    made: dict[str, Any] = {}
    exec(source_of("spec"), made)
    manifest = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())
    assert made["spec"].total_steps < manifest["spec"]["totalSteps"]
    steps = {"totalSteps": made["spec"].total_steps}
    assert made["spec"] == GRPOJobSpec.model_validate(manifest["spec"] | steps)
