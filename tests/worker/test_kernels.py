"""Kernels of the layers: which are chosen, and that those of one kind hold the other's tensors."""

from typing import Any

import pytest
import torch

from support.ranks.launcher import run as run_on_ranks

LAYOUTS = {
    "one": (1, {}),
    "ep2": (2, {"expert": 2}),
    "tp2": (2, {"tensor": 2, "expert_tensor": 2}),
    "tp2-pp2-ep2": (4, {"tensor": 2, "pipeline": 2, "expert": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_in_one_module_are_the_same_hugging_face_tensors(name: str) -> None:
    world, layout = LAYOUTS[name]
    for apart, together in run_on_ranks("kernel_cases:same_tensors", world, model="qwen3_moe", layout=layout):
        assert [part[:-1] for part in together] == [part[:-1] for part in apart]
        assert all(torch.equal(a[-1], b[-1]) for a, b in zip(apart, together, strict=True))
        assert any(".mlp.experts." in part[0] for part in apart)


def test_weights_that_ranks_have_whole_are_not_taken_for_parts() -> None:
    for plain, marked in run_on_ranks("kernel_cases:whole_projections", 2):
        assert [part[:-1] for part in marked] == [part[:-1] for part in plain]
        assert any(part[0].endswith("q_a_proj.weight") for part in plain)


def test_kernels_that_are_not_there_are_refused() -> None:
    (problem,) = run_on_ranks("kernel_cases:build", 1, choice="transformer-engine")
    assert problem.startswith("spec.trainer.kernels=transformer-engine: this rank computes on a CPU: ")


@pytest.mark.parametrize("choice", ["auto", "local"])
def test_a_cpu_computes_without_transformer_engine(choice: str) -> None:
    assert run_on_ranks("kernel_cases:build", 1, choice=choice) == ["local"]


def test_a_rank_without_transformer_engine_refuses_fp8() -> None:
    (problem,) = run_on_ranks("kernel_cases:refused_precision", 1)
    assert problem == (
        "spec.trainer.precision=fp8-block128 needs Transformer Engine: use an image that has it, or set it "
        "to bf16"
    )


@pytest.mark.parametrize(
    ("model", "fields", "rope", "router"),
    [
        ("qwen3_moe", {}, True, True),
        ("qwen3_moe", {"moe_enable_routing_replay": True}, True, False),
        ("deepseek_v3", {"rope_type": "yarn"}, True, True),
        ("deepseek_v3", {"rope_type": "rope"}, False, True),
    ],
)
def test_fusions_that_would_compute_something_else_are_off(
    model: str, fields: dict[str, Any], rope: bool, router: bool
) -> None:
    (found,) = run_on_ranks("kernel_cases:fused_fields", 1, model=model, fields=fields)
    assert found == {"apply_rope_fusion": rope, "moe_router_fusion": router}
