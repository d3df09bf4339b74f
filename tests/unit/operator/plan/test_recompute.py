"""Cost and memory of recomputation in plans, and specs that plans complete."""

from itertools import pairwise
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from grpo_devcluster.paths import REPO
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.catalog.gpus import GPUS, GpuType
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.recompute import FULL, NOTHING, Recompute
from grpo_operator.cli.report import as_data, as_table
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.resolve import RefusedError, resolve
from grpo_operator.plan.planner.settled import with_layout
from grpo_operator.plan.planner.training.activations import Workload, layer_activations
from grpo_operator.plan.planner.training.cost import Rows, passes_of_update
from grpo_operator.plan.planner.training.memory import stage_memory
from grpo_operator.plan.planner.training.recompute import selective
from grpo_operator.plan.planner.training.search import TrainingPool, choices, feasible, is_safe, worst
from grpo_operator.plan.status.grpojob import layout_status
from support.objects import pool_of
from support.recompute import recompute_of
from support.tiny_models import tiny_model

H100 = GPUS[GpuType.H100]
V3 = ModelShape.from_hf(architecture("deepseek-v3"))
ROWS = Rows(1, 8192, 4096)
LAYOUT = Layout(256, 2, 16, 1, 16, layers_in_first_stage=3, layers_in_last_stage=2)
DEFAULT = "layernorm,mla_up_proj,moe_act,mlp"


def test_the_default_modules_are_those_that_the_model_and_its_kernels_have() -> None:
    assert selective(V3, grouped=True) == recompute_of(f"selective:{DEFAULT}")
    assert selective(V3, grouped=False) == recompute_of("selective:layernorm,mla_up_proj,mlp")
    dense, mixture = (ModelShape.from_hf(architecture(n)) for n in ("qwen3-8b", "qwen3-30b-a3b"))
    assert selective(dense, grouped=True) == recompute_of("selective:layernorm,mlp")
    assert selective(mixture, grouped=True) == recompute_of("selective:layernorm,moe_act")


def test_an_update_costs_the_passes_that_it_recomputes() -> None:
    def passes(text: str) -> float:
        return passes_of_update(V3, LAYOUT, ROWS, recompute_of(text))

    assert passes("none") == 3 and passes("full") == 4
    assert passes("selective:layernorm") == passes("selective:moe_act") == 3
    assert passes("full:1") == 3.25, "one of the four layers of the largest stage"
    assert passes("full:4") == passes("full:60") == 4
    parts = ("mla_up_proj", "mlp", "moe", "core_attn")
    each = [passes(f"selective:{part}") - 3 for part in parts]
    assert all(part > 0 for part in each)
    together = passes(f"selective:{','.join(parts)}")
    assert together == pytest.approx(3 + sum(each)) and 3.7 < together < 4
    assert 3.05 < passes(f"selective:{DEFAULT}") < 3.15


def test_longer_sequences_make_attention_a_larger_share() -> None:
    short, long = (
        passes_of_update(V3, LAYOUT, Rows(1, 8192, attended), recompute_of("selective:core_attn"))
        for attended in (1024, 16384)
    )
    assert 3 < short < long < 4


def test_each_module_drops_the_bytes_that_it_computes_again() -> None:
    def kept(text: str, layer: int) -> float:
        """Return bytes per token of a layer on one rank."""
        return (
            layer_activations(V3, Layout(1), Workload(1024, recompute=recompute_of(text)), layer).kept / 1024
        )

    dense, mixture = kept("none", 0), kept("none", 3)
    assert dense - kept("selective:layernorm", 0) == 2 * 2 * 7168
    assert dense - kept("selective:mlp", 0) == 2 * 3 * 18432 and kept("selective:mlp", 3) == mixture
    assert mixture - kept("selective:moe_act", 3) == 2 * 8 * 2048 and kept("selective:moe", 0) == dense
    assert mixture - kept("selective:shared_experts", 3) == 2 * 3 * 2048
    assert kept("selective:core_attn", 3) == mixture, "flash attention saves no scores"
    both = kept("selective:layernorm,mla_up_proj", 3)
    assert both == kept("selective:layernorm", 3) + kept("selective:mla_up_proj", 3) - mixture
    assert kept("full", 3) == 2 * 7168 < kept(f"selective:{DEFAULT}", 3) < 0.6 * mixture


def test_the_backward_pass_needs_what_it_recomputes() -> None:
    def working(text: str) -> int:
        return layer_activations(V3, Layout(1), Workload(1024, recompute=recompute_of(text)), 3).working

    none, full = working("none"), working("full")
    assert none < working("selective:moe_act") < working("selective:moe") < full


def test_only_counted_layers_of_each_stage_are_recomputed() -> None:
    def kept(text: str) -> list[int]:
        workload = Workload(8192, 1, 64, recompute_of(text))
        return [stage.activations for stage in stage_memory(V3, LAYOUT, workload)]

    none, one, three, full = (kept(text) for text in ("none", "full:1", "full:3", "full"))
    assert all(a > b > c >= d for a, b, c, d in zip(none, one, three, full, strict=True))
    assert three[0] == full[0] and three[1] > full[1], "stages of three and of four layers"


def test_each_further_layer_takes_no_memory_and_saves_no_time() -> None:
    counts = range(1, 6)
    kept = [
        [
            s.activations
            for s in stage_memory(V3, LAYOUT, Workload(8192, 1, 64, recompute_of(f"full:{count}")))
        ]
        for count in counts
    ]
    for fewer, more in pairwise(kept):
        assert all(a >= b for a, b in zip(fewer, more, strict=True))
    assert all(stages[0] > stages[-1] for stages in kept), "a later stage holds fewer micro-batches"
    costs = [passes_of_update(V3, LAYOUT, ROWS, recompute_of(f"full:{count}")) for count in counts]
    assert costs == sorted(costs) and costs[0] < costs[-1]


def test_virtual_stages_count_the_layers_of_each_chunk() -> None:
    model = ModelShape.from_hf(tiny_model("deepseek_v3"))
    layout = Layout(2, pipeline=2, virtual_pipeline=2)
    kept = {
        text: [s.activations for s in stage_memory(model, layout, Workload(64, 1, 8, recompute_of(text)))]
        for text in ("full:1", "full")
    }
    assert kept["full:1"] == kept["full"], "each chunk has one layer"
    assert passes_of_update(model, layout, Rows(8, 64, 32), recompute_of("full:1")) == 4


def test_a_counted_layer_is_never_the_one_of_multi_token_prediction() -> None:
    last = [
        stage_memory(V3, LAYOUT, Workload(8192, 1, 64, recompute_of(text)), mtp=True)[-1].activations
        for text in ("full", "full:512")
    ]
    assert last[0] < last[1]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"recompute": "selective", "recomputeModules": ["mla_up_proj"]}, "has no latent attention: remove"),
        ({"recompute": "selective", "recomputeModules": ["mlp"]}, "has no layer without experts: remove mlp"),
        ({"recompute": "selective", "recomputeModules": ["shared_experts"]}, "has no shared experts"),
    ],
)
def test_modules_that_the_model_does_not_have_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(RefusedError) as error:
        _resolved("qwen3-30b-a3b-16xh100", changes)
    assert str(error.value).startswith("spec.trainer.recomputeModules=[") and text in str(error.value)


def test_modules_of_an_unknown_model_must_be_given() -> None:
    with pytest.raises(RefusedError, match=r"set spec\.model\.architecture, or recomputeModules"):
        _resolved("qwen3-30b-a3b-16xh100", {"recompute": "selective"}, architecture=None)
    given = {"recompute": "selective", "recomputeModules": ["layernorm"]}
    assert _resolved("qwen3-30b-a3b-16xh100", given, architecture=None)[1] == recompute_of(
        "selective:layernorm"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"recompute": "full"}, FULL),
        ({"recompute": "none"}, NOTHING),
        ({"recompute": "full", "recomputeLayers": 2}, recompute_of("full:2")),
        ({"recompute": "selective", "recomputeModules": ["moe"]}, recompute_of("selective:moe")),
        ({"recompute": "selective"}, recompute_of("selective:layernorm,moe_act")),
        ({"recompute": "selective", "kernels": "local"}, recompute_of("selective:layernorm")),
    ],
    ids=str,
)
def test_ranks_get_what_was_planned(changes: dict[str, Any], expected: Any) -> None:
    spec, planned = _resolved("qwen3-30b-a3b-16xh100", changes)
    assert planned == expected == spec.trainer.recomputation()


def _resolved(manifest: str, changes: dict[str, Any], **model: Any) -> tuple[GRPOJobSpec, Any]:
    """Return the spec as the ranks read it, and what the plan says of recomputation."""
    body = yaml.safe_load((REPO / "manifests" / f"{manifest}.yaml").read_text())["spec"]
    body["data"] |= {"promptLength": 512, "responseLength": 512}  # so that any kind fits
    body["trainer"] |= {"maxTokensPerGpu": 1024} | changes
    body["model"] |= model
    spec = GRPOJobSpec.model_validate(body)
    plan = resolve(spec, pool_of(spec))
    return with_layout(spec, layout_status(plan)), plan.recompute


@pytest.mark.parametrize(
    ("tokens", "expected"), [(2048, NOTHING), (4096, recompute_of("selective:layernorm,moe_act"))]
)
def test_auto_keeps_layers_in_parts_where_communication_overlaps(tokens: int, expected: Recompute) -> None:
    overlap = {"moe": {"overlapCommunication": True}}
    plan = resolve(spec := _auto(tokens, **overlap), pool_of(spec))
    assert plan.recompute == expected and plan.training is not None
    assert worst(plan.stages).total <= plan.training.gpu.usable
    spec = _auto(16384, **overlap)
    with pytest.raises(RefusedError) as caught:
        resolve(spec, pool_of(spec))
    assert "spec.trainer.parallelism: TP1" in str(caught.value) and "to full" not in str(caught.value)


def test_a_forward_pass_beside_a_backward_pass_keeps_one_more_micro_batch() -> None:
    def kept(layout: Layout, overlap: bool, micro_batches: int = 64) -> list[int]:
        workload = Workload(8192, 1, micro_batches, recompute_of("none"), overlap=overlap)
        return [stage.activations for stage in stage_memory(V3, layout, workload)]

    flat, interleaved = Layout(64, expert=64), Layout(128, pipeline=2, expert=64, virtual_pipeline=2)
    assert kept(flat, True) == [2 * kept(flat, False)[0]]
    assert kept(flat, True, 1) == kept(flat, False, 1), "the only one"
    without, with_overlap = kept(interleaved, False), kept(interleaved, True)
    assert [a * 6 // 5 for a in without[:1]] == pytest.approx(with_overlap[:1], rel=1e-6)
    assert [a * 4 // 3 for a in without[1:]] == pytest.approx(with_overlap[1:], rel=1e-6)


def test_a_given_layout_and_recomputation_must_allow_the_overlap() -> None:
    moe = {"moe": {"overlapCommunication": True}, "recompute": "none"}
    spec, recompute = _resolved("qwen3-30b-a3b-16xh100", moe)
    assert spec.trainer.parallelism.expert > 1 and recompute == NOTHING
    with pytest.raises(ValidationError, match=r"excludes recompute full and recomputeModules moe"):
        _resolved("qwen3-30b-a3b-16xh100", moe | {"recompute": "full"})
    auto = moe | {"parallelism": {"auto": True}}
    assert _resolved("qwen3-30b-a3b-16xh100", auto)[0].trainer.parallelism.expert > 1


def test_too_many_activations_name_the_recomputation_that_fits() -> None:
    with pytest.raises(RefusedError, match=r"usable on h100-80gb: set spec\.trainer\.recompute to full \("):
        _resolved("qwen3-30b-a3b-16xh100", {"recompute": "none", "maxTokensPerGpu": 16384})


def _auto(tokens: int, **changes: Any) -> GRPOJobSpec:
    """Return a job that packs so many tokens, with the choice of what to recompute left open."""
    body = yaml.safe_load((REPO / "manifests" / "qwen3-30b-a3b-16xh100.yaml").read_text())["spec"]
    body["data"] |= {"promptLength": 512, "responseLength": 512}
    body["trainer"] |= {
        "recompute": "auto",
        "maxTokensPerGpu": tokens,
        "parallelism": {"expert": 16},
    } | changes
    return GRPOJobSpec.model_validate(body)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(4096, NOTHING), (8192, recompute_of("selective:layernorm,moe_act")), (16384, FULL)],
)
def test_auto_recomputes_as_little_as_fits(tokens: int, expected: Recompute) -> None:
    plan = resolve(spec := _auto(tokens), pool_of(spec))
    assert plan.recompute == expected and plan.training is not None
    assert worst(plan.stages).total <= plan.training.safe
    assert plan.reason.startswith(f"given; recompute={expected.kind}: fastest by estimate of none, selective")
    assert with_layout(spec, layout_status(plan)).trainer.recomputation() == expected
    assert f"recomputation   {expected}" in as_table(as_data(spec, pool_of(spec), plan, 5e9))


def test_auto_says_when_nothing_fits() -> None:
    spec = _auto(2**19)
    with pytest.raises(RefusedError, match=r"spec\.trainer\.parallelism: .* needs .* in total"):
        resolve(spec, pool_of(spec))


def test_auto_needs_a_known_model() -> None:
    with pytest.raises(RefusedError, match=r"recompute=auto: the operator cannot read the model: set spec"):
        _resolved("qwen3-30b-a3b-16xh100", {"recompute": "auto"}, architecture=None)
    with pytest.raises(ValueError, match="the planner has not chosen yet"):
        _auto(4096).trainer.recomputation()


def test_auto_takes_the_fastest_kind_in_each_layout() -> None:
    pools = [
        TrainingPool(
            V3, GPUS[GpuType.H100], 384, 8, sequences=2048, sequence=8192, micro_batch=1, recompute=kind
        )
        for kind in (NOTHING, selective(V3, grouped=True), FULL)
    ]
    found = choices(pools)
    assert [choice.layout for choice in found] == list({choice.layout: None for choice in found})
    safe = {layout for pool in pools for layout in feasible(pool) if is_safe(pool, layout)}
    assert {choice.layout for choice in found} == safe
    assert {choice.pool.recompute.kind for choice in found} == {"none", "selective", "full"}
    for choice in found:
        each = [pool.cost(choice.layout).total for pool in pools if is_safe(pool, choice.layout)]
        assert choice.cost.total == min(each)
    full = [layout for layout in feasible(pools[2]) if is_safe(pools[2], layout)]
    assert found[0].cost.total < pools[2].cost(full[0]).total, "faster than always full"
