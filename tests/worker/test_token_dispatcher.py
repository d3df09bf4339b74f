"""How tokens reach their experts: which dispatcher is chosen, and what Megatron-Core is told.

DeepEP itself needs GPUs. A package that only has its names stands for its presence; it moves no token.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.ranks.launcher import run as run_on_ranks

TESTS = Path(__file__).parents[1]
DEEPEP = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
BUFFER = """
class Buffer:
    @staticmethod
    def set_num_sms(number):
        assert number == 20

    @staticmethod
    def get_dispatch_config(ranks):
        assert ranks in (2, 8, 16), f"Unsupported number of EP ranks: {ranks}"
"""
UTILS = "class EventHandle: ...\nclass EventOverlap: ...\n"


def _program(folder: Path, package: dict[str, str], *cases: dict[str, Any]) -> Any:
    """Run the cases where ``package`` is what ``import deep_ep`` finds."""
    (folder / "deep_ep").mkdir()
    for name, text in package.items():
        (folder / "deep_ep" / name).write_text(text)
    path = os.pathsep.join([str(folder), str(TESTS), *sys.path])
    answer = subprocess.run(
        [sys.executable, "-m", "support.dispatcher_program", *map(json.dumps, cases)],
        check=False, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-2000:]
    return json.loads(answer.stdout.splitlines()[-1])


def test_where_the_package_is_auto_takes_it_unless_something_is_in_its_way(tmp_path: Path) -> None:
    in_the_way: list[tuple[dict[str, Any], str]] = [
        ({"kernels": "local"}, "without Transformer Engine's kernels"),
        ({"expert": 1}, "no token leaves its rank with spec.trainer.parallelism.expert=1"),
        ({"passed": {"moe_shared_expert_overlap": True}}, "moe_shared_expert_overlap works by alltoall only"),
        ({"gpus": 4}, "it needs 8 of the 8 ranks that share experts on each node, and spec.trainer.gpusPerN"),
        ({"expert": 4, "world": 4}, "the package deep_ep: Unsupported number of EP ranks: 4"),
    ]
    fine: list[dict[str, Any]] = [
        {}, {"expert": 16}, {"expert": 4, "expert_tensor": 2}, {"expert": 2, "gpus": 4}, {"asked": "deepep"},
        {"passed": {"moe_shared_expert_overlap": False}},
    ]  # fmt: skip
    cases = [*fine, {"asked": "alltoall"}, *(case for case, _ in in_the_way)]
    asked = [case | {"asked": "deepep"} for case, _ in in_the_way]
    package = {"__init__.py": BUFFER, "utils.py": UTILS}
    results, model = _program(tmp_path, package, *cases, *asked)
    for _ in fine:
        assert results.pop(0) == {"found": DEEPEP, "logged": ["tokens reach their experts through DeepEP"]}
    assert results.pop(0) == {"found": ALLTOALL, "logged": []}
    for _, reason in in_the_way:
        result = results.pop(0)
        assert result["found"] == ALLTOALL
        (logged,) = result["logged"]
        assert logged.startswith("tokens reach their experts by alltoall, not through DeepEP: ")
        assert reason in logged
    for _, reason in in_the_way:
        error = results.pop(0)["found"]
        assert error.startswith("spec.trainer.moe.dispatcher=deepep: ") and reason in error
        assert error.endswith(", or set the field to auto or alltoall")
    assert model == ["MoEFlexTokenDispatcher", "_DeepepManager", "fp32"]


@pytest.mark.parametrize(
    ("package", "reason", "remedy"),
    [
        (
            {"__init__.py": "raise ImportError('no driver')"},
            "the package deep_ep cannot be imported: no driver",
            "use a trainer image that has DeepEP",
        ),
        (
            {"__init__.py": BUFFER, "utils.py": "class EventHandle: ..."},
            "the package deep_ep lacks deep_ep.utils.EventOverlap, which Megatron-Core imports",
            "use a trainer image that has DeepEP 1",
        ),
    ],
    ids=["unusable", "of another version"],
)
def test_without_the_package_auto_does_without_and_deepep_names_it(
    package: dict[str, str], reason: str, remedy: str, tmp_path: Path
) -> None:
    (auto, asked), model = _program(tmp_path, package, {}, {"asked": "deepep"})
    assert auto["found"] == ALLTOALL
    assert auto["logged"] == [f"tokens reach their experts by alltoall, not through DeepEP: {reason}"]
    assert asked["found"] == (
        f"spec.trainer.moe.dispatcher=deepep: {reason}: {remedy}, or set the field to auto or alltoall"
    )
    assert "callable" in model[0] or "DeepEP is not installed" in model[0], "Megatron-Core agrees"


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("chosen", [DEEPEP, ALLTOALL], ids=["deepep", "alltoall"])
@pytest.mark.parametrize(
    "layout",
    [{"expert": 4}, {"expert": 2, "expert_tensor": 2, "tensor": 2}, {"expert": 2, "pipeline": 2}],
    ids=str,
)
def test_the_configuration_has_the_dispatcher_and_routers_in_fp32(
    model: str, chosen: dict[str, str], layout: dict[str, int]
) -> None:
    (found,) = run_on_ranks("kernel_cases:rendered", 1, model=model, layout=layout, fields=chosen)
    assert found == {"moe_flex_dispatcher_backend": "deepep", "moe_router_dtype": "fp32"} | chosen


def test_ranks_refuse_a_dispatcher_that_is_not_there_when_they_start() -> None:
    for problem in run_on_ranks("kernel_cases:refused_dispatcher", 2, model="deepseek_v3"):
        assert problem.startswith(
            "spec.trainer.moe.dispatcher=deepep: the layers are built without Transform"
        )
    assert run_on_ranks("kernel_cases:refused_dispatcher", 1, model="qwen3") == ["built"], "a reward model"
