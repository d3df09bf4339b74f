"""The planner's arithmetic against published figures, and its refusals."""

import dataclasses
import math
from typing import Any

import pytest

from grpo_operator.api.catalog.architectures import ARCHITECTURES, architecture
from grpo_operator.api.catalog.gpus import GPUS, GpuType
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.offload import OffloadSpec
from grpo_operator.api.v1alpha1.optimizer_dtypes import OptimizerDtypes
from grpo_operator.api.v1alpha1.stages import chunk_counts, stage_counts, stage_layers
from grpo_operator.api.v1alpha1.trainer import Precision
from grpo_operator.plan.planner import transfer_bounds
from grpo_operator.plan.planner.engines import shape as engine_rules
from grpo_operator.plan.planner.engines.memory import engine_memory, kv_bytes_per_token
from grpo_operator.plan.planner.engines.shape import EngineShape
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload, layer_activations, logits_bytes
from grpo_operator.plan.planner.training.memory import StageMemory, of_precision, stage_memory
from grpo_operator.plan.planner.training.rules import batch_problems, fp8_problems, problems
from grpo_operator.plan.planner.training.search import TrainingPool, feasible, fits, nearest, worst
from grpo_worker.megatron.families.deepseek_v3 import DEEPSEEK_V3
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.quantization.fp8 import blocks, is_quantised

V3 = ModelShape.from_hf(architecture("deepseek-v3"))
H100 = GPUS[GpuType.H100]
TP8_PP8 = Layout(256, 8, 8, 4, 32, layers_in_first_stage=7, layers_in_last_stage=6)


def test_parameters_and_bytes_of_deepseek_v3_are_the_published_ones() -> None:
    assert parameters.total(V3).total == pytest.approx(671.026e9, rel=1e-6)
    assert parameters.total(V3).expert == pytest.approx(653.91e9, rel=1e-5)
    assert parameters.model_bytes(V3) == pytest.approx(1342.05e9, rel=1e-5)
    assert parameters.model_bytes(V3, fp8=True) == pytest.approx(673.15e9, rel=1e-5)
    assert transfer_bounds.checkpoint_bytes(V3) == pytest.approx(9.39e12, rel=1e-3)


@pytest.mark.parametrize(
    ("layout", "gigabytes"),
    [
        (Layout(256, 8, 16, 1, 8, layers_in_first_stage=4, layers_in_last_stage=1), 69.0),
        (TP8_PP8, 52.8),
        (Layout(256, 1, 16, 1, 16, layers_in_first_stage=4, layers_in_last_stage=1), 57.0),
    ],
    ids=str,
)
def test_model_state_per_gpu_equals_the_known_figures_within_three_percent(
    layout: Layout, gigabytes: float
) -> None:
    states = [stage.state / 1e9 for stage in stage_memory(V3, layout, Workload(8192))]
    assert max(states) == pytest.approx(gigabytes, rel=0.03)


def test_offloaded_state_is_on_the_gpu_only_while_in_use() -> None:
    def first_stage(**offload: bool) -> StageMemory:
        return stage_memory(
            V3, TP8_PP8, Workload(8192), offload=OffloadSpec(**offload), frozen=1, critic=True
        )[0]

    plain = first_stage()
    weights = first_stage(parameters=True)
    assert plain.total - weights.total == plain.weights / 2 + plain.frozen
    assert 0 < plain.total - first_stage(optimizer=True).total <= plain.optimizer
    everything = first_stage(parameters=True, gradients=True, optimizer=True)
    assert everything.host == plain.weights + plain.frozen + plain.optimizer
    assert everything.weights == plain.weights / 2 and everything.gradients == plain.gradients / 2


@pytest.mark.parametrize(
    ("dtypes", "gradients", "optimizer", "stepping"),
    [
        ({}, 4, 12, 0),
        ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 4, 6, 8),
        ({"exp_avg_dtype": "bf16"}, 4, 8, 4),
        ({"main_grads_dtype": "bf16"}, 2, 10, 0),
    ],
)
def test_narrower_gradients_and_moments_take_fewer_bytes(
    dtypes: dict[str, str], gradients: int, optimizer: int, stepping: int
) -> None:
    given = OptimizerDtypes.model_validate(dtypes)
    precision = of_precision(Precision.BF16, given)
    assert (precision.gradients, precision.optimizer, precision.stepping) == (gradients, optimizer, stepping)
    plain = stage_memory(V3, TP8_PP8, Workload(8192))[0]
    found = stage_memory(V3, TP8_PP8, Workload(8192), precision=precision)[0]
    assert found.weights == plain.weights and found.saved == plain.saved, "checkpoints have fp32"
    assert found.gradients == plain.gradients * gradients // 4
    assert found.optimizer == plain.optimizer * optimizer // 12


def test_the_optimizer_step_needs_room_for_fp32_copies_of_narrower_moments() -> None:
    dense = ModelShape.from_hf(architecture("qwen3-8b"))

    def stage(**dtypes: str) -> StageMemory:
        given = OptimizerDtypes.model_validate(dtypes)
        precision = of_precision(Precision.BF16, given)
        return stage_memory(dense, Layout(world=1), Workload(64), precision=precision)[0]

    plain, narrow = stage(), stage(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    assert narrow.optimizer == plain.optimizer // 2
    assert narrow.activations + narrow.working == 8 * plain.weights // 2


def test_passes_without_gradients_need_one_layer_or_the_logits_and_no_gradients() -> None:
    layout = dataclasses.replace(TP8_PP8, context=1)

    def stages(log_prob_tokens: int | None, **offload: bool) -> tuple[StageMemory, ...]:
        work = Workload(8192, micro_batches=4, log_prob_tokens=log_prob_tokens)
        return stage_memory(V3, layout, work, offload=OffloadSpec(**offload))

    plain = stages(None)
    assert stages(8192) == plain, "the size of the update"
    for tokens in (2**18, 2**20):
        large = stages(tokens)
        for index, (mine, update) in enumerate(zip(large, plain, strict=True)):
            layer = layer_activations(V3, layout, Workload(tokens), 3)
            logits = logits_bytes(V3, layout, Workload(tokens)) if index == 7 else 0
            assert mine.activations + mine.working == max(layer.working, logits)
            assert mine.total - update.total == mine.working - update.working > 0
    assert logits > layer.working
    free = stages(2**20, gradients=True)[0]
    assert large[0].working - free.working == free.gradients, "the gradients are not there meanwhile"


def test_multi_token_prediction_costs_a_layer_on_the_last_stage() -> None:
    assert parameters.mtp_layer(V3).total == pytest.approx(11.61e9, rel=0.01)  # 14 B with what it shares
    plain = stage_memory(V3, TP8_PP8, Workload(8192))
    guessing = stage_memory(V3, TP8_PP8, Workload(8192), mtp=True)
    assert plain[:-1] == guessing[:-1]
    added = guessing[-1].weights - plain[-1].weights
    experts = parameters.mtp_layer(V3).expert // 32
    assert 2 * experts < added < 2 * experts * 1.2 and guessing[-1].total > plain[-1].total + added


def _published_bytes(shapes: dict[str, tuple[int, ...]], fp8: bool) -> int:
    eight = [shape for name, shape in shapes.items() if fp8 and is_quantised(name)]
    scales = sum(4 * math.prod(blocks(shape)) for shape in eight)
    return 2 * sum(map(math.prod, shapes.values())) - sum(map(math.prod, eight)) + scales


# Of published files whose sizes their authors name.
PUBLISHED = {
    "llama-3.1-8b": 8.03e9, "qwen2.5-7b": 7.62e9, "glm-4.5-air": 106e9, "glm-4.7": 355e9, "kimi-k2": 1.03e12
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_parameters_and_tensors_are_those_of_the_files(name: str) -> None:
    hf = architecture(name)
    model, shapes = ModelShape.from_hf(hf), family_of(hf).shapes(hf)
    biases = [shape for name, shape in shapes.items() if name.endswith("e_score_correction_bias")]
    total = sum(map(math.prod, shapes.values())) - sum(map(math.prod, biases))
    assert parameters.total(model).total == total == pytest.approx(PUBLISHED.get(name, total), rel=0.01)
    assert parameters.hf_tensors(model) == len(shapes)
    assert parameters.hf_tensors(model, fp8=True) == len(shapes) + sum(map(is_quantised, shapes))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_versions_contain_the_multi_token_prediction_layer_if_it_is_trained(fp8: bool) -> None:
    shapes = DEEPSEEK_V3.mtp_shapes(architecture("deepseek-v3"))
    added = parameters.model_bytes(V3, fp8, mtp=True) - parameters.model_bytes(V3, fp8)
    assert added == pytest.approx(_published_bytes(shapes, fp8), rel=1e-5)  # routers have a small bias
    assert added / parameters.model_bytes(V3, fp8) == pytest.approx(0.0173, abs=0.0002)
    tensors = len(shapes) + fp8 * sum(map(is_quantised, shapes))
    assert parameters.hf_tensors(V3, fp8, mtp=True) - parameters.hf_tensors(V3, fp8) == tensors
    checkpoint = transfer_bounds.checkpoint_bytes(V3, mtp=True) - transfer_bounds.checkpoint_bytes(V3)
    assert checkpoint == 14 * parameters.mtp_layer(V3).total


def test_only_engines_that_draft_receive_the_multi_token_prediction_layer() -> None:
    engine = EngineShape(32, 32, 32, fp8=True)
    drafting = dataclasses.replace(engine, drafts=True)
    layout = dataclasses.replace(TP8_PP8, layers_in_first_stage=5, layers_in_last_stage=8)
    plain = transfer_bounds.sync_bound(V3, layout, engine, 8, 50e9, 8)
    trained = transfer_bounds.sync_bound(V3, layout, engine, 8, 50e9, 8, mtp=True)
    drafted = transfer_bounds.sync_bound(V3, layout, drafting, 8, 50e9, 8, mtp=True)
    layer = trained.version_bytes - plain.version_bytes
    assert drafted.version_bytes == trained.version_bytes and layer > 11e9
    assert trained.received_bytes == plain.received_bytes and trained.seconds == plain.seconds
    assert 8 * layer < drafted.received_bytes - plain.received_bytes < 8 * 4 * layer
    assert drafted.seconds > 1.1 * plain.seconds, "the last stage sends a layer more"


def test_layers_of_stages_follow_megatron_core() -> None:
    assert stage_counts(61, TP8_PP8) == (7, 8, 8, 8, 8, 8, 8, 6)
    assert stage_layers(4, Layout(2, 1, 2)) == ((0, 1), (2, 3))
    assert stage_layers(8, Layout(2, 1, 2, virtual_pipeline=2)) == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_chunks_may_differ_by_a_layer() -> None:
    layout = Layout(8, pipeline=8, virtual_pipeline=4)
    counts = chunk_counts(61, layout)
    assert sum(counts) == 61 and set(counts) == {1, 2} and counts[0] == counts[-1] == 1
    assert stage_counts(61, layout) == (7, 8, 8, 8, 8, 8, 7, 7)
    assert stage_layers(5, Layout(2, pipeline=2, virtual_pipeline=2)) == ((0, 2, 3), (1, 4))


@pytest.mark.parametrize("layers", range(4, 70, 5))
def test_chunks_are_as_equal_as_they_can_be(layers: int) -> None:
    for pipeline, virtual in ((2, 2), (3, 1), (4, 3), (8, 4)):
        if virtual == 1 or layers < pipeline * virtual:
            continue
        layout = Layout(pipeline, pipeline=pipeline, virtual_pipeline=virtual)
        counts, stages = chunk_counts(layers, layout), stage_counts(layers, layout)
        assert sum(counts) == layers and max(counts) - min(counts) <= 1
        assert max(stages) - min(stages) <= 1 and stages[-1] == min(stages)
        assert sorted(n for stage in stage_layers(layers, layout) for n in stage) == list(range(layers))


@pytest.mark.parametrize(
    ("layers", "sizes", "text"),
    [
        (61, {"pipeline": 8}, "layersInFirstStage=7 and layersInLastStage=6"),
        (61, {"pipeline": 2, "layers_in_first_stage": 31, "layers_in_last_stage": 29}, "61 layers"),
        (8, {"layers_in_first_stage": 2}, "need pipeline > 1"),
        (
            8,
            {"pipeline": 4, "virtual_pipeline": 3},
            "8 layers are fewer than the 12 chunks",
        ),
        (
            8,
            {"pipeline": 2, "virtual_pipeline": 2, "layers_in_first_stage": 3},
            "virtualPipeline=2: a stage of 3 layers",
        ),
        (8, {"virtual_pipeline": 2}, "needs pipeline > 1"),
    ],
)
def test_an_impossible_pipeline_split_is_refused_with_a_remedy(
    layers: int, sizes: dict[str, int], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        stage_counts(layers, Layout(world=8, **sizes))


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(6, tensor=3), "tensor=3: attention heads"),
        (Layout(24, tensor=8, expert=24), "expert=24: the number of experts"),
        (Layout(24, expert_tensor=3), "expertTensor=3: the width of an expert"),
        (Layout(8, tensor=8), "expert=1 it must equal"),
        (Layout(8, pipeline=8), "pipeline=8: 61 layers"),
    ],
    ids=str,
)
def test_rules_name_field_value_and_remedy(layout: Layout, text: str) -> None:
    assert any(text in problem for problem in problems(V3, layout)), problems(V3, layout)
    assert not problems(V3, TP8_PP8)


def test_expert_parallelism_needs_a_model_with_experts() -> None:
    qwen = ModelShape.from_hf(architecture("qwen3-8b"))
    assert problems(qwen, Layout(8, expert=8)) == [
        "parallelism.expert=8: a qwen3 model has no experts: use expert=1"
    ]
    found = problems(qwen, Layout(6, tensor=6, expert_tensor=6))
    assert any("key-value heads (8) is not divisible" in problem for problem in found)


def test_batches_must_divide_evenly() -> None:
    assert not batch_problems(Layout(8), 64, 4)
    assert "= 32: change one" in batch_problems(Layout(8), 48, 4)[0]
    interleaved = Layout(8, pipeline=4, virtual_pipeline=2)
    assert "3 micro-batches are not a multiple of pipeline 4" in batch_problems(interleaved, 6, 1)[0]


def test_fp8_blocks_must_not_be_split() -> None:
    assert not fp8_problems(V3, TP8_PP8)
    assert not fp8_problems(V3, Layout(256, 8, 8, 4, 4, expert_tensor=8))
    small = dataclasses.replace(V3, ffn=18432 // 16)
    (found,) = fp8_problems(small, Layout(8, tensor=8, expert=8))
    assert "tensor=8: the dense feed-forward width (1152)" in found


@pytest.mark.parametrize(
    ("engine", "count", "seconds"),
    [
        (EngineShape(16, 16, 16, fp8=True), 16, 0.94),
        (EngineShape(32, 32, 32, fp8=True), 8, 0.49),
        (EngineShape(64, 64, 64, fp8=True), 4, 0.26),
        (EngineShape(32, 32, 4), 8, 0.98),
        (EngineShape(64, 64, 8), 4, 0.53),
    ],
    ids=str,
)
def test_sync_bounds_equal_the_reference(engine: EngineShape, count: int, seconds: float) -> None:
    bound = transfer_bounds.sync_bound(V3, TP8_PP8, engine, count, 50e9, 8)
    assert bound.seconds == pytest.approx(seconds, abs=0.006)


def test_deepseek_v3_engines_need_16_gpus_in_fp8_and_32_in_bf16() -> None:
    def tokens(gpus: int, fp8: bool) -> int:
        engine = EngineShape(gpus, gpus, 1, fp8)
        options: dict[str, Any] = {"memory": H100.memory, "fraction": 0.85, "context": 8192, "requests": 64}
        return engine_memory(V3, engine, **options).kv_tokens

    assert tokens(8, True) == 0 < tokens(16, True)
    assert tokens(16, False) == 0 < tokens(32, False)
    assert kv_bytes_per_token(V3, EngineShape(16)) == 70272


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        (EngineShape(8, 3), "expertParallel=3 does not divide"),
        (EngineShape(8, 8, 3), "attentionDataParallel=3 does not divide"),
        (EngineShape(48, 48, 1), "attention heads cannot be split over 48"),
        (EngineShape(32, 1, 32, fp8=True), "raise expertParallel"),
        (EngineShape(32, 32, 1, fp8=True), "the dense feed-forward width"),
    ],
    ids=str,
)
def test_engine_rules_name_field_value_and_remedy(engine: EngineShape, text: str) -> None:
    found = engine_rules.problems(V3, engine)
    assert any(text in problem for problem in found), found


def test_engines_draft_only_with_layers_that_are_trained() -> None:
    glm = ModelShape.from_hf(architecture("glm-4.7"))
    assert not engine_rules.problems(glm, EngineShape(16, 16))
    (found,) = engine_rules.problems(glm, EngineShape(16, 16, drafts=True))
    assert found.startswith("speculative=mtp: the trainer has no multi-token-prediction layer of a glm4_moe")


def _pool(world: int, sequence: int = 8192) -> TrainingPool:
    return TrainingPool(V3, H100, world, 8, sequences=2048, sequence=sequence, micro_batch=1)


@pytest.mark.parametrize("world", [256, 384, 448, 512])
def test_auto_finds_a_layout_that_fits_and_is_the_same_every_time(world: int) -> None:
    pool = _pool(world)
    options = feasible(pool)
    assert options and all(fits(pool, layout) for layout in options)
    assert options == feasible(pool)
    costs = [pool.cost(layout).total for layout in options]
    assert costs == sorted(costs)


def test_too_few_gpus_are_refused() -> None:
    assert feasible(_pool(128)) == [] and nearest(_pool(128), TP8_PP8) is None


def test_a_layout_over_the_memory_limit_gets_a_neighbour_that_fits() -> None:
    pool = _pool(512)
    wanted = Layout(512, 8, 8, 1, 8, layers_in_first_stage=7, layers_in_last_stage=6)
    assert worst(pool.memory(wanted)).state / 1e9 > 79
    other = nearest(pool, wanted)
    assert other is not None and fits(pool, other)


TOO_LARGE = ("deepseek-v3", "glm-4.5-air", "glm-4.7", "kimi-k2", "qwen3-235b-a22b")  # for 8 GPUs


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_known_architecture_can_be_planned(name: str) -> None:
    model = ModelShape.from_hf(architecture(name))
    pool = TrainingPool(model, H100, 8, 8, sequences=64, sequence=1024, micro_batch=1)
    assert name in TOO_LARGE or feasible(pool)


def test_unknown_models_and_missing_keys_are_named() -> None:
    with pytest.raises(ValueError, match="'gpt2' is not supported; known: deepseek_v3"):
        ModelShape.from_hf({"model_type": "gpt2"})
    with pytest.raises(ValueError, match="lacks 'kv_lora_rank'"):
        ModelShape.from_hf({k: v for k, v in architecture("deepseek-v3").items() if k != "kv_lora_rank"})
    with pytest.raises(ValueError, match="unknown architecture 'gpt-2'"):
        architecture("gpt-2")
