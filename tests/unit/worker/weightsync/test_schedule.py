"""Waves of messages: every route's bytes once, even waves, parts that travel as JSON."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.stages import stage_layers
from grpo_worker.weightsync.planner.boxes import disjoint, held_regions, needed_regions
from grpo_worker.weightsync.planner.engine_plan import Part, plan_engine
from grpo_worker.weightsync.planner.layouts import EngineShape, engine_side, tensors_of, trainer_side
from grpo_worker.weightsync.planner.regions import FP8, Atom, Box, RegionError, Tensor, atoms
from grpo_worker.weightsync.planner.routes import route
from grpo_worker.weightsync.planner.schedule import Wave, make_schedule
from grpo_worker.weightsync.protocol.manifest import Slice

V3 = architecture("deepseek-v3")


def slice_of(name: str, rows: int, offset: int, length: int, dtype: str = "bfloat16") -> Slice:
    return Slice(name, (rows, 256), dtype, 0, offset, length, 0, 0)


def test_waves_of_deepseek_v3_are_as_even_as_the_routes() -> None:
    """Even if every wave waited for all members, a version would take at most 1.2 times the bound."""
    layout = Layout(256, 8, 8, 4, 32, layers_in_first_stage=7, layers_in_last_stage=6)
    stages = {number: s for s, layers in enumerate(stage_layers(61, layout)) for number in layers}
    tensors = tensors_of(V3, fp8=True)
    needed = engine_side(V3, EngineShape(32, 32), 8)
    parts = atoms(tensors, trainer_side(V3, layout, stages.__getitem__), needed, 8 << 20)
    routes = route(parts, lambda gpu: gpu // 8)
    limit = 512 << 20
    waves = make_schedule(parts, routes, tensors, limit, 64 << 20)
    assert max(max(received_bytes(wave).values()) for wave in waves) <= limit
    messages = [message for wave in waves for message in wave]
    assert sum(len(message.regions) for message in messages) == sum(
        len(each.atoms) for of_pair in routes.pairs.values() for each in of_pair
    )
    assert sum(_busiest(wave) for wave in waves) < 1.2 * routes.busiest


def received_bytes(wave: Wave) -> Counter[int]:
    """Return the bytes that each engine rank gets in a wave."""
    received: Counter[int] = Counter()
    for message in wave:
        for rank in message.receivers:
            received[rank] += message.nbytes
    return received


def _busiest(wave: Wave) -> int:
    carried: Counter[tuple[str, int]] = Counter()
    for message in wave:
        carried["out", message.source] += message.nbytes
        carried["in", message.landing] += message.nbytes
    return max(carried.values())


def test_an_atom_that_fits_in_no_wave_is_refused() -> None:
    parts = [Atom("a", Box(0, 64), (0,), (0,), 128)]
    with pytest.raises(ValueError, match="a wave of 100 bytes cannot hold an atom of 128"):
        make_schedule(parts, route(parts, lambda gpu: gpu), {"a": Tensor(64)}, 100, 100)
    assert make_schedule([], route([], lambda gpu: gpu), {}, 100, 100) == []


@pytest.mark.parametrize("links", [1, 4, 8])
def test_a_sender_needs_no_more_memory_for_more_links(links: int) -> None:
    tensors, held = held_regions([[slice_of("a", 1 << 16, 0, 1 << 16)]])
    kept = {rank: {"a": [Box(4096 * rank, 4096 * (rank + 1), 0, 256)]} for rank in range(16)}
    bucket = 16 << 20
    plan = plan_engine(tensors, held, kept, lambda rank: rank, bucket, links)
    most = max(sum(message.nbytes for message in wave) for wave in plan.waves)
    assert 0.3 * bucket / links < most <= 1.01 * bucket / links
    regions = [region for wave in plan.waves for message in wave for region in message.regions]
    assert len(set(regions)) == len(regions)
    assert sum(region.box.size for region in regions) == tensors["a"].box.size


def test_an_engine_is_planned_around_the_load_of_the_others() -> None:
    tensors, held = held_regions([[slice_of("a", 512, 0, 512)], [slice_of("a", 512, 0, 512)]])
    kept = {0: {"a": [Box(0, 512, 0, 256)]}}
    busy = {0: 1 << 30}
    plan = plan_engine(tensors, held, kept, lambda rank: rank, 1 << 20, sent=busy)
    assert {message.source for wave in plan.waves for message in wave} == {1}
    assert plan.sent == busy | {1: 512 * 256 * 2}
    assert plan_engine(tensors, held, kept, lambda rank: rank, 1 << 20).plan_id != plan.plan_id


def test_a_part_travels_as_json() -> None:
    tensors, held = held_regions([[slice_of("a", 512, 0, 256), slice_of("b", 512, 0, 512)],
                                  [slice_of("a", 512, 256, 256)]])  # fmt: skip
    kept = {rank: {"a": [Box(0, 512, 0, 256)], "b": [Box(0, 128, 0, 256)]} for rank in (0, 1)}
    plan = plan_engine(tensors, held, kept, lambda rank: 0, 1 << 20)
    for part in (*plan.of_trainers(2), *plan.of_engine(2)):
        assert Part.from_data(json.loads(json.dumps(part.to_data()))) == part
    assert set(plan.of_trainers(2)[1].tensors) == {"a"}


boxes = st.builds(
    lambda top, height, left, width: Box(top, top + height, left, left + width),
    st.integers(0, 8), st.integers(1, 5), st.integers(0, 8), st.integers(1, 5),
)  # fmt: skip


@given(st.lists(boxes, max_size=6))
def test_disjoint_boxes_cover_the_given_ones(given_boxes: list[Box]) -> None:
    made = disjoint(given_boxes)
    assert all(a.intersection(b) is None for i, a in enumerate(made) for b in made[i + 1 :])
    for box in given_boxes:
        assert sum(part.size for part in (box.intersection(each) for each in made) if part) == box.size


def test_touching_boxes_become_one() -> None:
    assert disjoint([Box(0, 2, 0, 4), Box(2, 5, 0, 4)]) == [Box(0, 5, 0, 4)]
    assert disjoint([Box(0, 2, 0, 4), Box(0, 2, 4, 6), Box(2, 3, 0, 6)]) == [Box(0, 3, 0, 6)]
    assert disjoint([Box(0, 1, 0, 1), Box(5, 6, 5, 6)]) == [Box(0, 1, 0, 1), Box(5, 6, 5, 6)]


def test_scales_are_needed_with_their_values() -> None:
    tensors = {"a": Tensor(512, 256, FP8)}
    kept = {0: {"a": [Box(100, 200, 0, 256)], "a_scale_inv": [Box(2, 3, 0, 2)]}}
    assert [need.box for need in needed_regions(kept, tensors)] == [Box(0, 384, 0, 256)]


def test_ranks_that_disagree_on_a_tensor_are_refused() -> None:
    with pytest.raises(RegionError, match="a: ranks disagree on its shape or dtype"):
        held_regions([[slice_of("a", 512, 0, 512)], [slice_of("a", 256, 0, 256)]])
    deep = Slice("a", (2, 2, 4), "bfloat16", 2, 0, 2, 0, 0)
    with pytest.raises(RegionError, match="cut along dimension 2; only 0 and 1 are supported"):
        held_regions([[deep]])
    with pytest.raises(RegionError, match="dtype must be one of"):
        Tensor(1, 1, "int4")
