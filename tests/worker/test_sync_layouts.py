"""The update planner's view of trainer ranks equals the shards of real ranks."""

from collections.abc import Iterator
from itertools import groupby, pairwise

import pytest

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.stages import stage_layers
from grpo_worker.weightsync.planner.layouts import trainer_side
from support.ranks.launcher import run as run_on_ranks
from support.tiny_models import tiny_model

Part = tuple[str, int, int, int, int]  # tensor, top, bottom, left, right


@pytest.mark.parametrize(
    ("model", "world", "sizes"),
    [
        ("deepseek_v3", 2, {"tensor": 2, "expert_tensor": 2}),
        ("deepseek_v3", 2, {"pipeline": 2, "layers_in_first_stage": 3}),
        ("deepseek_v3", 4, {"tensor": 2, "pipeline": 2, "expert": 2}),
        ("deepseek_v3", 4, {"tensor": 2, "context": 2, "expert": 4}),
        ("deepseek_v3", 4, {"expert": 2}),
        ("glm4_moe", 2, {"tensor": 2, "expert": 2}),
        ("qwen2", 2, {"tensor": 2, "expert_tensor": 2}),
    ],
    ids=str,
)
def test_the_planners_trainer_side_equals_real_ranks(model: str, world: int, sizes: dict[str, int]) -> None:
    hf, layout = tiny_model(model), Layout(world=world, **sizes)
    stages = {n: s for s, layers in enumerate(stage_layers(hf["num_hidden_layers"], layout)) for n in layers}
    planned = {
        (part.tensor, part.box.top, part.box.bottom, part.box.left, part.box.right, rank)
        for part in trainer_side(hf, layout, stages.__getitem__)
        for rank in part.ranks
    }
    found = run_on_ranks("sync_cases:held", world, model=model, layout=sizes)
    real = {(*part, rank) for rank, parts in enumerate(found) for part in _joined(parts)}
    assert planned == real


def _joined(parts: list[Part]) -> Iterator[Part]:
    """Join the heads of a fused tensor, which a rank holds one by one, where they follow each other."""
    for (name, left, right), boxes in groupby(parts, key=lambda part: (part[0], *part[3:])):
        rows = [(top, bottom) for _, top, bottom, _, _ in boxes]
        assert all(before[1] == after[0] for before, after in pairwise(rows)), name
        yield name, rows[0][0], rows[-1][1], left, right
