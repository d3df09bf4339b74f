"""The planner compared with Megatron-Core: accepted layouts can be built, with equal sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.memory import stage_memory
from support.ranks.launcher import run as run_on_ranks

CASES = 150


def _ask(function: str, **arguments: Any) -> Any:
    command = [sys.executable, "-W", "ignore", "-m", "support.ranks.planner_cases"]
    done = subprocess.run(
        [*command, function, json.dumps(arguments)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 8, "pipeline": 16, "expert": 8, "layers_in_first_stage": 4, "layers_in_last_stage": 1},
        {"tensor": 8, "pipeline": 8, "context": 4, "expert": 32, "layers_in_first_stage": 7,
         "layers_in_last_stage": 6},
        {"pipeline": 16, "expert": 16, "layers_in_first_stage": 4, "layers_in_last_stage": 1},
    ],
    ids=["tp8-pp16-ep8", "tp8-pp8-cp4-ep32", "tp1-pp16-ep16"],
)  # fmt: skip
def test_parameters_of_deepseek_v3_on_each_stage_equal_megatrons(sizes: dict[str, int]) -> None:
    hf = architecture("deepseek-v3")
    layout, guessing = Layout(world=256, **sizes), sizes.get("context") == 4
    stages = stage_memory(ModelShape.from_hf(hf), layout, Workload(8192), mtp=guessing)
    found = _ask("built", hf=hf, sizes={"world": 256} | sizes, mtp=guessing)
    assert found == [stage.weights // 2 for stage in stages]


def test_parameters_of_other_families_on_each_stage_equal_megatrons() -> None:
    layouts: dict[str, dict[str, int]] = {
        "llama-3.1-8b": {"world": 8, "tensor": 4, "pipeline": 2, "expert_tensor": 4},
        "qwen2.5-7b": {"world": 8, "tensor": 2, "pipeline": 4, "expert_tensor": 2},
        "glm-4.7": {"world": 64, "tensor": 2, "pipeline": 4, "expert": 16},
    }
    cases = [{"hf": architecture(name), "sizes": sizes} for name, sizes in layouts.items()]
    found = dict(zip(layouts, _ask("all_built", cases=cases), strict=True))
    for name, sizes in layouts.items():
        stages = stage_memory(ModelShape.from_hf(architecture(name)), Layout(**sizes), Workload(8192))
        assert found[name] == [stage.weights // 2 for stage in stages], name


def test_the_planner_accepts_exactly_what_megatron_can_build() -> None:
    result = _ask("disagreements", count=CASES)
    assert result["disagreements"] == []
    assert CASES // 10 < result["accepted"] < CASES, "the cases decide nothing"


def test_real_groups_have_the_sizes_of_the_layout() -> None:
    layouts = [
        {"world": 8, "tensor": 2, "expert": 2},
        {"world": 8, "tensor": 2, "pipeline": 2, "expert": 2},
        {"world": 8, "tensor": 2, "context": 2, "expert": 4, "expert_tensor": 2},
        {"world": 8, "pipeline": 4, "expert": 2},
        {"world": 8, "tensor": 4, "expert": 8},
        {"world": 8, "context": 8, "expert": 4},
    ]
    for sizes in run_on_ranks("planner_cases:group_sizes", 8, layouts=layouts):
        for fields, got in zip(layouts, sizes, strict=True):
            layout = Layout(**fields)
            assert got == [
                layout.tensor, layout.pipeline, layout.context, layout.data,
                layout.expert, layout.expert_tensor, layout.expert_data,
            ]  # fmt: skip
