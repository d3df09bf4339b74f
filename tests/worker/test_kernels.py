"""Kernels of the layers: which are chosen, and that those of one kind hold the other's tensors."""

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


def test_kernels_that_are_not_there_are_refused() -> None:
    (problem,) = run_on_ranks("kernel_cases:build", 1, choice="transformer-engine")
    assert problem.startswith("spec.trainer.kernels=transformer-engine: this rank computes on a CPU: ")


@pytest.mark.parametrize("choice", ["auto", "local"])
def test_a_cpu_computes_without_transformer_engine(choice: str) -> None:
    assert run_on_ranks("kernel_cases:build", 1, choice=choice) == ["local"]
