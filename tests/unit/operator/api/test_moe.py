"""Balance of the experts: which models have a use for which field."""

import pytest

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.moe import MoeSpec, TokenDispatcher
from grpo_operator.api.v1alpha1.recompute import FULL, NOTHING, Recompute
from grpo_operator.plan.planner.model.shape import KNOWN, ModelShape
from support.recompute import recompute_of
from support.tiny_models import tiny_model


@pytest.mark.parametrize("model_type", KNOWN)
def test_defaults_suit_every_model(model_type: str) -> None:
    assert MoeSpec().problem(model_type) is None
    assert MoeSpec(bias_update_rate=0.001, aux_loss_coefficient=0).problem(model_type) is None


def test_only_models_with_experts_have_an_auxiliary_loss() -> None:
    moe = MoeSpec(aux_loss_coefficient=0.01)
    assert moe.problem("deepseek_v3") is None and moe.problem("qwen3_moe") is None
    assert moe.problem("qwen3") == (
        "spec.trainer.moe.auxLossCoefficient=0.01: a qwen3 model has no experts: remove spec.trainer.moe"
    )


def test_only_models_with_experts_have_a_dispatcher() -> None:
    moe = MoeSpec(dispatcher=TokenDispatcher.DEEPEP)
    assert moe.problem("deepseek_v3") is None and moe.problem("qwen3_moe") is None
    assert moe.problem("llama") == (
        "spec.trainer.moe.dispatcher=deepep: a llama model has no experts: remove spec.trainer.moe"
    )


def test_only_models_with_experts_overlap_their_communication() -> None:
    moe = MoeSpec(overlap_communication=True)
    assert moe.problem("deepseek_v3") is None and moe.problem("qwen3_moe") is None
    assert moe.problem("qwen2") == (
        "spec.trainer.moe.overlapCommunication=true: a qwen2 model has no experts: remove spec.trainer.moe"
    )


@pytest.mark.parametrize(
    ("layout", "recompute", "text"),
    [
        (Layout(2), NOTHING, "parallelism.expert=1: set expert above 1"),
        (Layout(4, pipeline=2, expert=2), NOTHING, "pipeline=2 has virtualPipeline=1: set virtualPipeline"),
        (Layout(2, expert=2), FULL, "recompute=full needs whole ones: set recompute to selective"),
        (Layout(2, expert=2), recompute_of("selective:moe"), "set recomputeModules without moe"),
    ],
)
def test_what_excludes_the_overlap_is_named_with_its_remedy(
    layout: Layout, recompute: Recompute, text: str
) -> None:
    found = str(MoeSpec(overlap_communication=True).overlap_problem(layout, recompute))
    assert found.startswith("moe.overlapCommunication=true: ") and text in found
    assert found.endswith(", or overlapCommunication to false")
    assert MoeSpec().overlap_problem(layout, recompute) is None


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        (Layout(2, expert=2), NOTHING),
        (Layout(4, pipeline=2, virtual_pipeline=2, expert=2), recompute_of("selective:layernorm,moe_act")),
    ],
)
def test_communication_overlaps_in_interleaved_stages_and_with_modules_kept_apart(
    layout: Layout, recompute: Recompute
) -> None:
    assert MoeSpec(overlap_communication=True).overlap_problem(layout, recompute) is None


def test_only_models_with_an_expert_bias_have_its_rate() -> None:
    frozen = MoeSpec(bias_update_rate=0)
    assert frozen.problem("deepseek_v3") is None
    assert frozen.problem("qwen3_moe") == (
        "spec.trainer.moe.biasUpdateRate=0: the routers of a qwen3_moe model have no expert bias: "
        "remove the field"
    )
    assert "biasUpdateRate=0: a qwen3 model has no experts" in str(frozen.problem("qwen3"))


@pytest.mark.parametrize("model_type", KNOWN)
def test_the_fields_suit_what_the_model_has(model_type: str) -> None:
    experts = ModelShape.from_hf(tiny_model(model_type) | {"mlp_only_layers": []}).experts
    assert (MoeSpec(aux_loss_coefficient=0.01).problem(model_type) is None) == (experts is not None)
    assert (MoeSpec(bias_update_rate=0).problem(model_type) is None) == bool(experts and experts.biases)
