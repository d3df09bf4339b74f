"""Values of a recomputation that go together."""

import re

import pytest

from grpo_operator.api.v1alpha1.recompute import FULL, NOTHING, Recompute, RecomputeKind, RecomputeModule
from grpo_operator.api.v1alpha1.trainer import TrainerSpec
from support.recompute import recompute_of

SELECTIVE = RecomputeKind.SELECTIVE


@pytest.mark.parametrize(
    ("kind", "modules", "layers", "text"),
    [
        (SELECTIVE, [], None, "recompute=selective with recomputeModules=[]: selective needs modules"),
        ("full", ["mlp"], None, "recompute=full with recomputeModules=[mlp]"),
        ("none", [], 2, "recompute=none with recomputeLayers=2: only full counts layers"),
        (SELECTIVE, ["mlp"], 2, "recompute=selective with recomputeLayers=2"),
        ("full", [], 0, "recompute=full with recomputeLayers=0"),
        (SELECTIVE, ["mlp", "mlp"], None, "recomputeModules=[mlp, mlp] recomputes a module twice"),
        (SELECTIVE, ["moe_act", "moe"], None, "recomputeModules=[moe_act, moe] recomputes a module twice"),
    ],
)
def test_values_that_do_not_go_together_are_refused(
    kind: str, modules: list[str], layers: int | None, text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Recompute(RecomputeKind(kind), tuple(RecomputeModule(module) for module in modules), layers)


def test_only_the_first_layers_of_a_stage_are_counted() -> None:
    two = recompute_of("full:2")
    assert [two.of_layer(place) for place in range(4)] == [FULL, FULL, NOTHING, NOTHING]
    assert FULL.of_layer(99) == FULL
    assert recompute_of("selective:mlp").of_layer(99) == recompute_of("selective:mlp")


def test_a_spec_says_what_its_ranks_recompute() -> None:
    assert _spec().recomputation() == FULL
    assert _spec(recompute="none").recomputation() == NOTHING
    assert _spec(recomputeLayers=3).recomputation() == recompute_of("full:3")
    given = _spec(recompute="selective", recomputeModules=["layernorm", "moe"])
    assert given.recomputation() == recompute_of("selective:layernorm,moe")
    with pytest.raises(ValueError, match="selective needs modules"):
        _spec(recompute="selective").recomputation()


def test_plans_show_what_is_recomputed() -> None:
    texts = [str(recompute_of(text)) for text in ("none", "full", "full:2", "selective:layernorm,mlp")]
    assert texts == ["none", "full", "full, 2 layers of each stage", "selective: layernorm, mlp"]


def _spec(**fields: object) -> TrainerSpec:
    return TrainerSpec.model_validate({"nodes": 1, **fields})
