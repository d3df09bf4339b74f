"""Overlap of the experts' communication: schedule plans change no gradient, and what excludes them."""

from typing import Any

import pytest
import torch

from support.ranks.launcher import run as run_on_ranks

EP2 = {"expert": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"layout": EP2}),
    "ep2-packed": (2, {"layout": EP2, "packed": True}),
    "ep2-replayed": (2, {"layout": EP2, "replay": True}),
    "ep2-recomputed": (2, {"layout": EP2, "recompute": "selective:mla_up_proj,core_attn"}),
    "tp2-ep2": (2, {"layout": {"tensor": 2, "expert": 2}}),
    "cp2-ep2-packed": (2, {"layout": {"context": 2, "expert": 2}, "packed": True}),
    "pp2-vpp2-ep2": (4, {"layout": {"pipeline": 2, "virtual_pipeline": 2, "expert": 2}}),
    "qwen3-ep2": (2, {"layout": EP2, "model": "qwen3_moe"}),
}


@pytest.mark.parametrize("name", CASES)
def test_expert_overlapping_changes_no_bit_of_a_gradient_and_no_figure(name: str) -> None:
    world, how = CASES[name]
    arguments = {"model": "deepseek_v3"} | how
    plain = run_on_ranks("expert_overlap_cases:step", world, overlap=False, **arguments)
    found = run_on_ranks("expert_overlap_cases:step", world, overlap=True, **arguments)
    for mine, expected in zip(found, plain, strict=True):
        assert expected["plans"] == 0 and mine["plans"] >= 2, "several micro-batches, or nothing overlaps"
        assert mine["figures"] == expected["figures"]
        assert any(tensor.abs().max() > 0 for tensor in expected["gradient"].values())
        changed = [n for n, t in expected["gradient"].items() if not torch.equal(mine["gradient"][n], t)]
        assert changed == []


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ({"layout": {}}, ["parallelism.expert=1: set expert above 1"]),
        ({"layout": EP2 | {"pipeline": 2}}, ["parallelism.pipeline=2 has virtualPipeline=1: set"]),
        ({"layout": EP2, "recompute": "full"}, ["recompute=full", "set recompute to selective"]),
        ({"layout": EP2, "recompute": "selective:moe"}, ["recomputeModules without moe"]),
        ({"layout": {}, "model": "qwen3"}, ["a qwen3 model has no experts: remove spec.trainer.moe"]),
        (
            {"layout": EP2, "model": "qwen3_moe", "mlp_only_layers": [3]},
            ["the model's last layer has no experts: set overlapCommunication to false"],
        ),
    ],
    ids=["no experts elsewhere", "not interleaved", "whole layers", "whole experts", "dense", "dense end"],
)
def test_ranks_refuse_what_excludes_the_overlap(arguments: dict[str, Any], texts: list[str]) -> None:
    sizes = arguments["layout"].values()
    world = max(1, *sizes) * (2 if len(sizes) > 1 else 1) if sizes else 1
    for message in run_on_ranks(
        "expert_overlap_cases:refused", world, **{"model": "deepseek_v3"} | arguments
    ):
        assert message.startswith("spec.trainer.moe.overlapCommunication=true: ")
        assert all(text in message for text in texts)
